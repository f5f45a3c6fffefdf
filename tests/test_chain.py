"""The chain: who is asked, who is bound, why the others lost, and what is never retried."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _backends import FakeBackend, count, inputs, small_problem
from _backends import fresh_chain as fresh_chain
from _platforms import PLATFORMS

from pagedattn import (
    chain,
    device_loss,
    paged_attention,
    policy,
    register_backend,
    registry,
    use_backend,
    verify_child,
)
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    ConfigurationError,
    DeviceError,
    UnknownBackend,
    VerificationError,
)
from pagedattn.probe import probe
from pagedattn.request import Request, parse

pytestmark = pytest.mark.usefixtures("fresh_chain")


def _states(candidate: chain.Candidate) -> tuple[Any, ...]:
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


@pytest.mark.parametrize("how", ["argument", "use_backend", "environment"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"absent": ("no card",)}, BackendUnavailable),
        ({"unsupported": ("no NHD",)}, BackendUnavailable),
        ({"load_fails": "build"}, BuildError),
        ({"load_fails": "import"}, BackendUnavailable),
        ({"run_fails": "wrong"}, VerificationError),
        ({"run_fails": "raises"}, VerificationError),
    ],
)
def test_case_28_a_forced_backend_is_never_left(
    how: str, fault: dict[str, Any], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_backend(FakeBackend("acme", **fault))
    if how == "environment":
        monkeypatch.setenv("PAGEDATTN_BACKEND", "acme")
    context = use_backend("acme") if how == "use_backend" else contextlib.nullcontext()
    with context, pytest.raises(kind) as caught:
        paged_attention(*inputs(), kv_layout="NHD", backend="acme" if how == "argument" else None)
    assert type(caught.value) is kind
    assert "acme: " in str(caught.value)
    assert chain.bindings() == ()


def test_case_28_an_unknown_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownBackend, match=r"'tritonn' \(did you mean triton\?\)"):
        paged_attention(*inputs(), kv_layout="NHD", backend="tritonn")
    with pytest.raises(UnknownBackend, match="did you mean torch"), use_backend("torhc"):
        pass
    monkeypatch.setenv("PAGEDATTN_BACKEND", "referense")
    with pytest.raises(UnknownBackend, match="did you mean reference"):
        paged_attention(*inputs(), kv_layout="NHD")


def test_parse() -> None:
    assert parse("") is None
    assert parse(" auto ") is None
    assert parse("Torch, reference,") == ("torch", "reference")
    assert parse(["torch"]) == ("torch",)
    with pytest.raises(UnknownBackend, match="auto stands alone"):
        parse("auto,torch")
    for wrong in (3, None, b"torch", ["torch", 3]):
        with pytest.raises(TypeError, match="a backend is a name"):
            parse(wrong)  # type: ignore[arg-type]


def test_a_list_is_the_chain_exactly() -> None:
    register_backend(FakeBackend("acme", unsupported=("no",)))
    binding = chain.binding_for(small_problem(), "acme, reference")
    assert [c.name for c in binding.candidates] == ["acme", "reference"]
    with pytest.raises(BackendUnavailable) as caught:
        chain.binding_for(small_problem(), ["acme", "cuda"])
    assert [c.name for c in caught.value.record] == ["acme", "cuda"]


def test_the_variable_counts_when_it_is_set_after_import(monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(FakeBackend("acme"))
    register_backend(FakeBackend("beta"))
    for name in ("acme", "beta", "acme"):
        monkeypatch.setenv("PAGEDATTN_BACKEND", name)
        paged_attention(*inputs(), kv_layout="NHD")
    assert {b.backend: b.calls for b in chain.bindings()} == {"acme": 2, "beta": 1}


def test_an_argument_goes_before_use_backend_and_that_before_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "cuda")
    assert Request.current(None).names == ("cuda",)
    with use_backend("torch"):
        assert Request.current(None) == Request(("torch",), "use_backend('torch')")
        assert Request.current("reference").names == ("reference",)
        with use_backend(["triton", "cuda"]):
            assert Request.current(None).names == ("triton", "cuda")
            with use_backend("auto"):
                assert Request.current(None).names is None
        assert Request.current(None).names == ("torch",)
    assert Request.current(None) == Request(("cuda",), "PAGEDATTN_BACKEND=cuda")


def test_use_backend_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("torch"):
        raise ZeroDivisionError
    assert Request.current(None).names is None


def test_use_backend_is_of_one_thread() -> None:
    seen: list[Any] = []
    with use_backend("torch"):
        other = threading.Thread(target=lambda: seen.append(Request.current(None).names))
        other.start()
        other.join()
    assert seen == [None]


def test_use_backend_is_of_one_task() -> None:
    async def task(name: str) -> Any:
        with use_backend(name):
            await asyncio.sleep(0.01)
            return Request.current(None).names

    async def both() -> Any:
        return await asyncio.gather(task("torch"), task("cuda"), task("reference"))

    assert asyncio.run(both()) == [("torch",), ("cuda",), ("reference",)]


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
    assert count(journal, "run") == 1 + 8  # the proof, and each thread's own
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

    def child(backend: Any, problem: Any) -> list[str]:
        proved.append(backend.name)
        return ["ok", ""]

    monkeypatch.setattr(verify_child, "run", child)
    binding = chain.binding_for(small_problem(device="cuda:0", dtype=torch.float16))
    assert binding.backend == "torch"
    triton = next(c for c in binding.candidates if c.name == "triton")
    assert (triton.present, triton.loadable) == (False, None)
    assert proved == ["torch"]  # nothing else was launched, and this only in a child


def test_every_vendor_ends_on_torch_and_names_known_backends() -> None:
    for vendor in policy.ORDER:
        for device in ("cpu", "cuda"):
            names = policy.order(vendor, device)
            assert names[-1] == "torch"
            assert "reference" not in names
            assert all(policy.reason(name, vendor, device) for name in names)


def test_case_37_a_sticky_error_in_a_proof_is_raised_at_once(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", run_fails="sticky"))
    register_backend(FakeBackend("beta", journal=str(journal)))
    with pytest.raises(DeviceError, match=r"acme failed with: .*illegal memory access"):
        chain.binding_for(small_problem(), "acme,beta")
    assert count(journal, "load") == 0
    _assert_refused("beta", journal)


def test_case_37_a_sticky_error_in_a_call_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", run_fails="sticky"))
    register_backend(FakeBackend("beta", journal=str(journal)))
    arguments = inputs()
    paged_attention(*arguments, kv_layout="NHD", backend="beta")
    before = count(journal, "run")
    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        paged_attention(*arguments, kv_layout="NHD", backend="acme")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(DeviceError, match="was lost earlier"):  # bound before, refused now
        paged_attention(*arguments, kv_layout="NHD", backend="beta")
    assert count(journal, "run") == before
    _assert_refused("beta", journal)


def _assert_refused(name: str, journal: Path) -> None:
    """The CPU was "lost": nothing touches it again, and the first reason is given each time."""
    before = count(journal, "load")
    for problem in (small_problem(), small_problem(num_heads=2)):
        for argument in (name, "reference", None):
            with pytest.raises(DeviceError, match=r"acme failed with: .*illegal memory access"):
                chain.binding_for(problem, argument)
    assert count(journal, "load") == before


def test_case_37_other_runtime_errors_leave_the_device_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    register_backend(FakeBackend("acme", run_fails="raises"))
    with pytest.raises(RuntimeError, match="too many resources"):
        paged_attention(*inputs(), kv_layout="NHD", backend="acme")
    paged_attention(*inputs(), kv_layout="NHD", backend="reference")


def test_a_lost_device_does_not_take_the_others_along() -> None:
    device_loss.lose("cuda:1", DeviceError("cuda:1 hung"))
    device_loss.lose("cuda:1", DeviceError("a later error"))
    with pytest.raises(DeviceError, match="cuda:1 hung"):
        chain.binding_for(small_problem(device="cuda:1"), "reference")
    binding = chain.binding_for(small_problem(), "reference")
    problem = replace(binding.problem, device="cuda:1")
    with pytest.raises(DeviceError, match="cuda:1 hung"):
        replace(binding, problem=problem).run(None)  # type: ignore[arg-type]


def test_calls_are_counted() -> None:
    for _ in range(3):
        paged_attention(*inputs(), kv_layout="NHD", backend="reference")
    (binding,) = chain.bindings()
    assert binding.calls == 3
