"""Devices that were lost: the first error is raised at once, and nothing touches them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from _backends import FakeBackend, count, inputs, small_problem
from _backends import fresh_chain as fresh_chain

from pagedattn import (
    chain,
    device_loss,
    paged_attention,
    register_backend,
)
from pagedattn.backends.errors import (
    DeviceError,
)

pytestmark = pytest.mark.usefixtures("fresh_chain")


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
