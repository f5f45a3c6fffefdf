"""The capability report: it always prints, and says what is known and what is not."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _backends import FakeBackend, inputs
from _backends import fresh_chain as fresh_chain
from _platforms import PLATFORMS, bi_v100
from rich.console import Console

from pagedattn import (
    bind,
    capability_report,
    chain,
    device_loss,
    paged_attention,
    policy,
    register_backend,
    registry,
    report,
    report_text,
    settings,
)
from pagedattn.backends.errors import BackendUnavailable, DeviceError
from pagedattn.probe import probe
from pagedattn.request import Request

pytestmark = pytest.mark.usefixtures("fresh_chain")

STATES = ("present", "loadable", "verified", "selected")


def _text(found: dict[str, Any]) -> str:
    out = io.StringIO()
    report_text.show(found, Console(file=out, width=80, highlight=False, markup=False))
    return out.getvalue()


def _check(found: dict[str, Any]) -> str:
    """What every report must be; returns its text."""
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {"triton", "cuda", "torch"} <= {row["name"] for row in found["backends"]}
    for row in found["backends"]:
        assert all(row[state] in (True, False, None) for state in STATES)
        assert row["selected"] or row["reasons"], row
    assert {"requested", "resolved", "bindings"} <= found["chain"].keys()
    text = _text(found)
    assert "\x1b" not in text
    for line in text.splitlines():
        assert line == line.rstrip(), "padded"
        # a path and a line to paste are not broken, however long
        assert len(line) <= 80 or max(map(len, line.split())) > 60 or "to change that" in line
    return text


def _simulate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    facts = probe(PLATFORMS[name](**changes).sources(tmp_path))
    for module in (chain, report):
        monkeypatch.setattr(module, "probe_facts", lambda: facts)


def test_before_any_call_it_names_what_would_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._instances, "torch", FakeBackend("torch"))
    found = capability_report()
    text = _check(found)
    torch_row = next(r for r in found["backends"] if r["name"] == "torch")
    assert [torch_row[s] for s in STATES] == [True, None, None, True]
    assert found["chain"]["requested"] == "auto"
    assert found["chain"]["resolved"] == "torch"
    assert found["chain"]["order"] == ["torch", "triton", "cuda"]
    assert chain.bindings() == ()  # asking bound nothing
    assert "? = not tried yet" in text


def test_after_a_binding_it_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _simulate("cpu_only", tmp_path, monkeypatch)
    register_backend(FakeBackend("acme", run_fails="wrong"))
    monkeypatch.setenv("PAGEDATTN_BACKEND", "acme,reference")
    bind("cpu")
    paged_attention(*inputs(), kv_layout="NHD")
    found = capability_report()
    rows = {r["name"]: r for r in found["backends"]}
    assert [rows["acme"][s] for s in STATES] == [True, True, False, False]
    assert [rows["reference"][s] for s in STATES] == [True, True, True, True]
    assert found["chain"]["requested"] == ["acme", "reference"]
    assert found["chain"]["resolved"] == "reference"
    assert [b["calls"] for b in found["chain"]["bindings"]] == [0, 1]
    assert "wrong numbers" in found["chain"]["bindings"][0]["passed_over"]["acme"][0]
    text = _check(found)
    assert "acme, reference (PAGEDATTN_BACKEND=acme,reference)" in text
    assert "reference (1 call): cpu, float32, NHD, 4/2/32" in text


def test_a_resolution_that_failed_is_told_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _simulate("cpu_only", tmp_path, monkeypatch)
    register_backend(FakeBackend("acme", load_fails="unavailable"))
    monkeypatch.setenv("PAGEDATTN_BACKEND", "acme")
    with pytest.raises(BackendUnavailable):
        bind("cpu")
    found = capability_report()
    row = next(r for r in found["backends"] if r["name"] == "acme")
    assert [row[s] for s in STATES] == [True, False, False, False]
    assert row["reasons"] == ["libacme.so is too old"]
    assert found["chain"]["resolved"] is None
    assert "nothing can serve" in _check(found)


def test_a_remedy_is_one_line_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "pip install --extra-index-url https://example.org/simple 'acme-kernels[cuda13]>=2.0,<3'"
    register_backend(FakeBackend("acme", absent=("it is not installed",), fix=fix))
    monkeypatch.setenv("PAGEDATTN_BACKEND", "acme")
    assert f"to change that: {fix}\n" in _check(capability_report())


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_has_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _simulate(name, tmp_path, monkeypatch)
    found = capability_report()
    text = _check(found)
    if "bi_v100" in name:
        assert "Iluvatar BI-V100" in text
        assert "warps of 64" in text
        assert "CoreX      3.2.3 at /usr/local/corex" in text
    if name == "nvidia":
        assert "driver     580.65.06, serves CUDA 13.0" in text


def _raise(*args: object, **kwargs: object) -> Any:
    raise OSError("the disk is on fire")


@pytest.mark.parametrize(
    "broken",
    [
        (report, "probe_facts"), (report, "_host"), (report, "reference_problem"),
        (report, "_bound"), (report, "_remarks"), (report, "_candidate"), (report, "asdict"),
        (report, "describe"), (chain, "bindings"), (chain, "examine"), (chain, "failures"),
        (policy, "order"), (policy, "reason"), (registry, "get"),
        (registry, "require_known"), (settings, "unknown_variables"),
        (settings, "invalid_values"), (Request, "current"),
    ],
    ids=lambda pair: pair[1],
)  # fmt: skip
def test_case_38_no_part_that_breaks_breaks_the_report(
    broken: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bind("cpu", backend="reference")
    monkeypatch.setattr(*broken, _raise)
    text = _check(capability_report())
    if broken[1] not in ("require_known", "failures"):  # not needed in this report, or guarded
        assert "the disk is on fire" in " ".join(text.split())


@pytest.mark.parametrize("raising", ["files", "torch", "list_devices", "which", "version"])
def test_case_38_no_probe_that_breaks_breaks_the_report(
    raising: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError(f"no {name}")

        def __call__(self, *args: object, **kwargs: object) -> Any:
            raise OSError("no answer")

    broken: Any = {raising: Broken()}
    sources = replace(bi_v100().sources(tmp_path), **broken)
    for module in (chain, report):
        monkeypatch.setattr(module, "probe_facts", lambda: probe(sources))
    _check(capability_report())


def test_case_28_an_unknown_name_is_told_and_the_report_still_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "tritn")
    found = capability_report()
    text = _check(found)
    assert "'tritn' (did you mean triton?)" in text.replace("\n           ", " ")
    assert found["chain"]["requested"] is None
    assert found["chain"]["resolved"] is None
    assert not any(row["selected"] for row in found["backends"])
    assert "resolved   not known" in text


def test_notes_tell_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    monkeypatch.setenv("PAGEDATTN_VERFY", "child")
    monkeypatch.setenv("PAGEDATTN_BUILD", "maybe")
    found = capability_report()
    notes = "\n".join(found["notes"])
    assert "PAGEDATTN_VERIFY=off: backends are bound without being proved right" in notes
    assert "PAGEDATTN_VERFY is not a variable of pagedattn" in notes
    assert "PAGEDATTN_BUILD='maybe' means nothing" in notes
    assert found["environment"]["PAGEDATTN_VERIFY"] == "off"
    assert "set        PAGEDATTN_VERIFY=off" in _check(found)


def test_a_lost_device_is_told() -> None:
    device_loss.lose("cuda:0", DeviceError("cuda:0 is lost:\nacme hung"))
    assert "cuda:0 is lost: acme hung" in _check(capability_report())
