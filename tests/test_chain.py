"""The chain: who is asked, who is bound, why the others lost, and what is never retried."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from _backends import FakeBackend, count, inputs, small_problem
from _backends import fresh_chain as fresh_chain
from _platforms import PLATFORMS

from pagedattn import (
    Candidate,
    chain,
    paged_attention,
    policy,
    register_backend,
    registry,
    verify_child,
)
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    ConfigurationError,
    VerificationError,
)
from pagedattn.backends.protocol import Problem, Runner
from pagedattn.probe import probe

pytestmark = pytest.mark.usefixtures("fresh_chain")


def _states(candidate: Candidate) -> tuple[Any, ...]:
    c = candidate
    return c.present, c.loadable, c.verified, c.selected


def test_case_29_four_states_are_four_answers() -> None:
    register_backend(FakeBackend("absent", absent=("no card", "no driver"), fix="modprobe acme"))
    register_backend(FakeBackend("unable", unsupported=("no window", "no sinks")))
    register_backend(FakeBackend("unloadable", load_fails="unavailable"))
    register_backend(FakeBackend("unbuilt", load_fails="build"))
    register_backend(FakeBackend("wrong", run_fails="wrong"))
    register_backend(FakeBackend("right"))
    register_backend(FakeBackend("late"))
    names = "absent,unable,unloadable,unbuilt,wrong,right,late"
    binding = chain.binding_for(small_problem(), names)
    found = {c.name: c for c in binding.candidates}
    assert binding.backend == "right"
    assert binding.requested == tuple(names.split(","))
    assert {n: _states(c) for n, c in found.items()} == {
        "absent": (False, None, None, False),
        "unable": (True, None, None, False),
        "unloadable": (True, False, False, False),
        "unbuilt": (True, False, False, False),
        "wrong": (True, True, False, False),
        "right": (True, True, True, True),
        "late": (True, None, None, False),
    }
    assert found["absent"].reasons == ("no card", "no driver")
    assert found["absent"].remedy == "modprobe acme"
    assert found["unable"].reasons == ("no window", "no sinks")
    assert found["unloadable"].reasons == ("libacme.so is too old",)
    assert found["unbuilt"].reasons == ("acme.cu(7): error: expected a ;",)
    assert "wrong numbers on cpu" in found["wrong"].reasons[0]


def test_all_reasons_are_collected_and_none_only_first() -> None:
    register_backend(FakeBackend("acme", absent=("no card",), unsupported=("no fp32",), fix="buy"))
    with pytest.raises(BackendUnavailable) as caught:
        chain.binding_for(small_problem(window=True), "acme")
    text = str(caught.value)
    for said in ("acme: no card", "acme: no fp32", "acme: to change that: buy", "backend='acme'"):
        assert said in text
    assert "float32, packed, 4/2/32, blocks of 16, window" in text
    (candidate,) = caught.value.record
    assert candidate.reasons == ("no card", "no fp32")


@pytest.mark.parametrize("fails", ["not_present_reasons", "not_supported_reasons", "remedy"])
def test_what_a_backend_raises_when_asked_is_a_reason(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, argument: object) -> None:
        raise KeyError("cuda_home")

    monkeypatch.setattr(FakeBackend, fails, broken)
    register_backend(FakeBackend("acme", absent=("no card",)))
    binding = chain.binding_for(small_problem(), "acme,reference")
    assert "KeyError: 'cuda_home'" in binding.candidates[0].reasons[0]


def test_a_list_is_the_chain_exactly() -> None:
    register_backend(FakeBackend("acme", unsupported=("no",)))
    binding = chain.binding_for(small_problem(), "acme, reference")
    assert [c.name for c in binding.candidates] == ["acme", "reference"]
    with pytest.raises(BackendUnavailable) as caught:
        chain.binding_for(small_problem(), ["acme", "cuda"])
    assert [c.name for c in caught.value.record] == ["acme", "cuda"]


def test_wrong_numbers_are_passed_over_and_told(caplog: pytest.LogCaptureFixture) -> None:
    register_backend(FakeBackend("acme", run_fails="wrong"))
    with caplog.at_level(logging.INFO, "pagedattn"):
        binding = chain.binding_for(small_problem(), "acme,reference")
    assert binding.backend == "reference"
    assert isinstance(binding.candidates[0].error, VerificationError)
    assert "passed over: acme: wrong numbers on cpu: relative error 1.0e-02" in caplog.text


def test_a_failed_build_moves_on_and_its_first_message_is_kept(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", load_fails="build", journal=str(journal)))
    for _ in range(3):
        with pytest.raises(BuildError, match=r"acme\.cu\(7\): error: expected a ;"):
            chain.binding_for(small_problem(), "acme")
    binding = chain.binding_for(small_problem(), "acme,reference")
    assert binding.candidates[0].reasons == ("acme.cu(7): error: expected a ;",)
    assert count(journal, "load") == 1  # nothing is built again to hear the same


def test_a_failure_from_before_a_reset_is_not_held_against_the_next() -> None:
    class Replaced(FakeBackend):
        def load(self, problem: Problem) -> Runner:
            register_backend(FakeBackend("mine"))  # by another thread
            raise BuildError("the old one's build failed")

    register_backend(Replaced("mine"))
    with pytest.raises(BuildError):
        chain.binding_for(small_problem(), "mine")
    assert chain.binding_for(small_problem(), "mine").backend == "mine"


def test_a_failure_that_passed_is_forgotten() -> None:
    backend = FakeBackend("acme", run_fails="raises")
    register_backend(backend)
    with pytest.raises(VerificationError):
        chain.binding_for(small_problem(), "acme")
    assert [c.name for c in chain.failures(small_problem())] == ["acme"]
    backend.run_fails = None
    assert chain.binding_for(small_problem(), "acme").backend == "acme"
    assert chain.failures(small_problem()) == ()  # else the report would still say so


def test_errors_of_candidates_hold_no_frames() -> None:
    register_backend(FakeBackend("acme", run_fails="raises"))
    register_backend(FakeBackend("beta", load_fails="import"))
    binding = chain.binding_for(small_problem(), "acme,beta,reference")
    for candidate in binding.candidates[:2]:
        error: BaseException | None = candidate.error
        assert error is not None
        while error is not None:
            assert error.__traceback__ is None
            error = error.__cause__ or error.__context__


def test_a_wrong_setting_is_no_fault_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "of")
    with pytest.raises(ConfigurationError, match=r"PAGEDATTN_VERIFY='of' .*did you mean off"):
        chain.binding_for(small_problem(), "reference")


def test_case_27_a_fallback_is_said_once_with_the_reasons(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = probe(PLATFORMS["nvidia"]().sources(tmp_path))
    monkeypatch.setattr("pagedattn.verify.load_and_verify", lambda *a: lambda call: None)
    register_backend(FakeBackend("acme", absent=("no acme card",)))
    monkeypatch.setattr(chain, "probe_facts", lambda: facts)
    with caplog.at_level(logging.INFO, "pagedattn"):
        for heads in (4, 8):
            problem = small_problem(device="cuda:0", num_heads=heads)
            chain.binding_for(problem, "acme,reference,triton")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "reference serves cuda:0 (backend='acme,reference,triton'); passed over: acme: no acme card"
    )


def test_a_backend_that_was_asked_for_and_serves_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "pagedattn"):
        chain.binding_for(small_problem(), "reference")
    assert [r.levelno for r in caplog.records] == [logging.INFO]


def test_eight_threads_resolve_once(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", journal=str(journal), slow_s=0.1))
    arguments = inputs()
    gate = threading.Barrier(8)
    results: list[torch.Tensor] = []

    def first_call() -> None:
        gate.wait()
        results.append(paged_attention(*arguments, kv_layout="NHD", backend="acme"))

    threads = [threading.Thread(target=first_call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert count(journal, "load") == 1
    assert count(journal, "run") == 1  # the proof
    assert count(journal, "alone") == 1 + 8  # its second part, and each thread's own
    assert len(results) == 8
    assert all(torch.equal(results[0], r) for r in results)


def test_a_slow_first_call_holds_up_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    loading, release = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        def load(self, problem: Any) -> Any:
            loading.set()
            assert release.wait(timeout=60)
            return super().load(problem)

    register_backend(Slow("slow"))
    problem = small_problem(device="cuda:0")
    slow = threading.Thread(target=chain.binding_for, args=(problem, "slow"))
    slow.start()
    try:
        assert loading.wait(timeout=60)
        assert chain.binding_for(small_problem(), "reference").backend == "reference"
        assert slow.is_alive()
    finally:
        release.set()
        slow.join(timeout=60)
    assert [b.backend for b in chain.bindings()] == ["reference", "slow"]


@pytest.mark.parametrize("name", ["bi_v100", "bi_v100_bare"])
def test_corex_ends_on_torch_with_triton_refused_and_proofs_in_a_child(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = probe(PLATFORMS[name]().sources(tmp_path))
    monkeypatch.setattr(chain, "probe_facts", lambda: facts)
    monkeypatch.setitem(registry._instances, "torch", FakeBackend("torch"))
    proved: list[str] = []

    def child(backend: Any, problem: Any, task: str) -> list[str]:
        proved.append(backend.name)
        return ["ok", ""]

    monkeypatch.setattr(verify_child, "run", child)
    binding = chain.binding_for(small_problem(device="cuda:0", dtype=torch.float16))
    assert binding.backend == "torch"
    triton = next(c for c in binding.candidates if c.name == "triton")
    assert (triton.present, triton.loadable) == (False, None)
    assert proved == ["torch"]  # nothing else was launched, and this only in a child


def test_torch_is_the_floor_of_every_vendor_and_what_a_cpu_takes_first() -> None:
    for vendor in policy.ORDER:
        assert vendor == "cpu" or policy.order(vendor, "cuda")[-1] == "torch"
        # Triton's interpreter would serve there too, hundreds of times slower
        assert policy.order(vendor, "cpu")[0] == "torch"
        for device in ("cpu", "cuda"):
            names = policy.order(vendor, device)
            assert "reference" not in names
            assert all(policy.reason(name, vendor, device) for name in names)


def test_calls_are_counted() -> None:
    for _ in range(3):
        paged_attention(*inputs(), kv_layout="NHD", backend="reference")
    (binding,) = chain.bindings()
    assert binding.calls == 3
