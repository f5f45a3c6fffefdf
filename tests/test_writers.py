"""Which implementation writes the cache: who is ready, who is right, and torch otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _backends import FakeBackend, small_problem
from _backends import fresh_chain as fresh_chain
from _build_fixtures import cache as cache
from _build_fixtures import needs_gcc
from _build_fixtures import tree as tree
from _build_fixtures import tree_template as tree_template
from _fake_corex import EmulatedCuda, compiled, emulate, facts_of

import pagedattn
from pagedattn import chain, hard_writes, register_backend, use_backend, writers
from pagedattn.backends import kv_write
from pagedattn.backends.cuda import source
from pagedattn.backends.cuda.write import CudaWriter
from pagedattn.backends.errors import BackendUnavailable, DeviceError, UnknownBackend
from pagedattn.backends.protocol import Problem, Write, Writer, WritesCache

pytestmark = pytest.mark.usefixtures("fresh_chain")


def problem_of(**changes: Any) -> Problem:
    """A class of writes: as many query heads as KV heads."""
    return replace(small_problem(**changes), num_heads=small_problem().num_kv_heads)


@dataclass
class FakeWriting(FakeBackend):
    """A backend whose write is torch's with a fault."""

    fault: Callable[[Write], Write | None] = lambda w: w
    calls: int = 0

    def load_writer(self, problem: Problem) -> Writer:
        if self.load_fails:
            raise BackendUnavailable("nothing is built")

        def write(w: Write) -> None:
            self.calls += 1
            changed = self.fault(w)
            if changed is not None:
                kv_write.write(changed)

        return write


def test_torch_writes_on_a_cpu_and_where_it_is_asked_for() -> None:
    assert writers.writer_for(problem_of()) is kv_write.write
    register_backend(FakeWriting("acme"))
    for name in ("torch", "torch,acme", "reference"):
        with use_backend(name):
            assert writers.writer_for(problem_of()) is kv_write.write


def test_the_first_of_the_chain_that_has_a_right_write_does_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pagedattn")
    register_backend(FakeBackend("plain"))
    register_backend(FakeWriting("unready", load_fails="unavailable"))
    register_backend(FakeWriting("unable", unsupported=("no window",)))
    register_backend(FakeWriting("wrong", fault=lambda w: w._replace(slot_mapping=w[4] ^ 1)))
    right = FakeWriting("right")
    register_backend(right)
    assert isinstance(right, WritesCache)
    key_cache, value_cache = torch.zeros(2, 4, 16, 2, 32)
    key, value = torch.randn(2, 3, 2, 32)
    slots = torch.tensor([1, 20, -1])
    with use_backend("plain,unready,unable,wrong,right"):
        for _ in range(2):
            pagedattn.write_kv(key, value, key_cache, value_cache, slots, kv_layout="NHD")
    assert right.calls == 3  # its proof, and two
    assert torch.equal(key_cache[1, 4], key[1])
    assert "unready does not write caches on cpu: nothing is built" in caplog.text
    assert "wrong bytes in the caches it wrote on cpu" in caplog.text
    assert "right writes caches on cpu" in caplog.text
    pagedattn.write_kv(key, value, key_cache, value_cache, slots, kv_layout="NHD")
    assert right.calls == 3  # outside the block nobody asks for it


def test_a_backend_that_is_ready_only_later_is_asked_again() -> None:
    late = FakeWriting("late", load_fails="unavailable")
    register_backend(late)
    with use_backend("late,torch"):
        assert writers.writer_for(problem_of()) is kv_write.write
        late.load_fails = None
        assert writers.writer_for(problem_of()) is kv_write.write
        chain.binding_for(small_problem(), "torch")  # any binding may have compiled something
        assert writers.writer_for(problem_of()) is not kv_write.write


def test_bind_resolves_the_write_too() -> None:
    acme = FakeWriting("acme")
    register_backend(acme)
    with use_backend("acme"):
        pagedattn.bind("cpu", num_heads=4, num_kv_heads=2, head_dim=32)
        assert acme.calls == 1
        pagedattn.bind("cpu", num_heads=8, num_kv_heads=2, head_dim=32)
    assert acme.calls == 1  # the verdict is kept


def test_unknown_names_and_lost_devices_are_told() -> None:
    with pytest.raises(UnknownBackend), use_backend("acme"):
        pass

    def lose(w: Write) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    register_backend(FakeWriting("acme", fault=lose))
    with use_backend("acme"):
        for _ in range(2):
            with pytest.raises(DeviceError, match="illegal memory access"):
                writers.writer_for(problem_of())


WRONG: dict[str, Callable[[Write], Any]] = {
    "nothing is written": lambda w: None,
    "a slot beyond": lambda w: w._replace(slot_mapping=w.slot_mapping % 80),
    "the offset": lambda w: w._replace(slot_mapping=w.slot_mapping ^ 1),
    "keys for values": lambda w: w._replace(value=w.key),
    "heads": lambda w: w._replace(key=w.key.flip(1)),
    "no scale": lambda w: w._replace(k_scale=None),
    "one scale for all": lambda w: w._replace(v_scale=w.v_scale[:1]),  # type: ignore[index]
    "rounding": lambda w: w._replace(key=torch.nextafter(w.key, torch.tensor(0.0))),
    "large numbers": lambda w: w._replace(key=w.key.clamp(-8, 8)),
}


@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
@pytest.mark.parametrize("mistake", WRONG)
def test_the_judge_sees(mistake: str, layout: Any) -> None:
    for kv_dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        problem = problem_of(kv_dtype=kv_dtype, kv_scales="per_head", kv_layout=layout)

        def writer(w: Write) -> None:
            changed = WRONG[mistake](w)
            if changed is not None:
                kv_write.write(changed)

        assert hard_writes.judge(kv_write.write, problem)[0] == "ok"
        outcome, told = hard_writes.judge(writer, problem)
        assert outcome == "wrong", kv_dtype
        assert "wrong bytes" in told


@needs_gcc
@pytest.mark.usefixtures("cache")
def test_the_compiled_write_serves_once_its_library_is_there(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CoreX: torch until attention has compiled, then the library, proved in a child."""
    monkeypatch.setattr(source, "entry", lambda: source.folder() / source.ENTRY)
    emulate(tree)
    facts = facts_of(tree, tmp_path / "machine")
    for module in (chain, writers):
        monkeypatch.setattr(module, "probe_facts", lambda: facts)
    register_backend(EmulatedCuda())
    problem = replace(problem_of(), head_dim=80, kv_layout="NHD")  # other sizes than attention's
    with use_backend("emulatedcuda,torch"):
        assert writers.writer_for(problem) is kv_write.write
        assert compiled(tree) == 0
        chain.binding_for(small_problem())
        assert compiled(tree) == 1
        writer = writers.writer_for(problem)
        assert isinstance(writer, CudaWriter)
        assert hard_writes.judge(writer, problem)[0] == "ok"
        other = replace(problem, dtype=torch.float16, kv_dtype=torch.float16)
        assert writers.writer_for(other) is kv_write.write  # no library has these types
    assert compiled(tree) == 1


def test_a_writer_from_before_a_reset_is_not_kept_after_it() -> None:
    class Replaced(FakeWriting):
        def load_writer(self, problem: Problem) -> Writer:
            writer = super().load_writer(problem)
            register_backend(after)  # by another thread
            return writer

    before, after = Replaced("mine"), FakeWriting("mine")
    register_backend(before)
    problem = problem_of()
    for _ in range(2):
        with use_backend("mine"):
            writers.writer_for(problem)(hard_writes.make_write(problem))
    assert after.calls > 0


def test_threads_resolve_writers_while_others_forget_them() -> None:
    register_backend(FakeWriting("mine"))
    problem, over = problem_of(), threading.Event()

    def forget() -> None:
        while not over.is_set():
            writers._forget()

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        with use_backend("torch"):
            for _ in range(3000):
                assert writers.writer_for(problem) is kv_write.write
    finally:
        over.set()
        thread.join()
