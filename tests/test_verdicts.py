"""Verdicts on disk: honoured while nothing changed, made anew when anything did."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _backends import FakeBackend, count, small_problem
from _backends import fresh_chain as fresh_chain
from _platforms import PLATFORMS

from pagedattn import chain, register_backend, verdicts, verify_command
from pagedattn.backends.errors import VerificationError
from pagedattn.backends.facts import Facts
from pagedattn.cli import main
from pagedattn.probe import facts as probe_facts
from pagedattn.probe import probe
from pagedattn.report import capability_report

pytestmark = pytest.mark.usefixtures("fresh_chain")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def _next_process(backend: FakeBackend) -> None:
    """Forget what this process knows; the disk stays."""
    verdicts._memory.clear()
    register_backend(backend)


def test_a_kept_verdict_is_not_proved_again(journal: Path) -> None:
    backend = FakeBackend("acme", journal=str(journal))
    for _ in range(2):
        _next_process(backend)
        assert chain.binding_for(small_problem(), "acme").candidates[0].verified
    assert count(journal, "run") == 1
    chain.binding_for(small_problem(window=True), "acme")  # another class of problems
    assert count(journal, "run") == 2


def _with(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, **changes)


CHANGES: dict[str, Callable[[Facts], Facts]] = {
    "driver": lambda f: _with(f, driver="999.1"),
    "torch": lambda f: _with(f, torch=replace(f.torch, installed_version="9.9")),
    "triton": lambda f: _with(f, triton=replace(f.triton, version="9.9")),
    "interpreter": lambda f: _with(f, triton=replace(f.triton, interpret=True)),
    "compiler": lambda f: _with(f, compiler=replace(f.compiler, path="/opt/other/nvcc")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_case_34_a_changed_fingerprint_is_proved_anew(
    change: str, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend("acme", journal=str(journal))
    _next_process(backend)
    chain.binding_for(small_problem(), "acme")
    facts = CHANGES[change](probe_facts())
    monkeypatch.setattr(chain, "probe_facts", lambda: facts)
    _next_process(backend)
    chain.binding_for(small_problem(), "acme")
    assert count(journal, "run") == 2


@pytest.mark.parametrize("what", ["_source_hash", "_judge_hash"])
def test_case_34_changed_source_is_proved_anew(
    what: str, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend("acme", journal=str(journal))
    _next_process(backend)
    chain.binding_for(small_problem(), "acme")
    monkeypatch.setattr(verdicts, what, lambda *a: "changed")
    _next_process(backend)
    chain.binding_for(small_problem(), "acme")
    assert count(journal, "run") == 2


def test_source_hash_follows_the_files(tmp_path: Path) -> None:
    def made(*, kernel: str) -> str:
        (tmp_path / "kernel.py").write_text(kernel)
        return verdicts._hash(verdicts._files(tmp_path))

    assert made(kernel="a") == made(kernel="a") != made(kernel="b")


def test_a_device_is_known_by_its_name_without_touching_it(tmp_path: Path) -> None:
    facts = probe(PLATFORMS["bi_v100"]().sources(tmp_path))
    mark = verdicts.fingerprint(FakeBackend("acme"), small_problem(device="cuda:0"), facts)
    assert mark["device"] == ["Iluvatar BI-V100", "7.0"]


def test_a_kept_failure_is_not_retried_until_verify_again(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_command, "problems", lambda device: iter([small_problem()]))
    _next_process(FakeBackend("acme", run_fails="wrong", journal=str(journal)))
    with pytest.raises(VerificationError, match="wrong numbers"):
        chain.binding_for(small_problem(), "acme")
    cured = FakeBackend("acme", journal=str(journal))
    _next_process(cured)
    with pytest.raises(VerificationError, match=r"wrong numbers .*`pagedattn verify --again`"):
        chain.binding_for(small_problem(), "acme")
    assert (count(journal, "load"), count(journal, "run")) == (1, 1)
    _next_process(cured)
    main(["verify", "--again", "--backend", "acme", "--device", "cpu"])
    _next_process(cured)
    assert chain.binding_for(small_problem(), "acme").backend == "acme"


def test_an_exception_is_not_held_against_a_backend(journal: Path) -> None:
    _next_process(FakeBackend("acme", run_fails="raises", journal=str(journal)))
    with pytest.raises(VerificationError, match="RuntimeError: too many resources"):
        chain.binding_for(small_problem(), "acme")
    _next_process(FakeBackend("acme", journal=str(journal)))
    assert chain.binding_for(small_problem(), "acme").backend == "acme"


def test_a_cache_folder_that_cannot_be_written_works_and_is_told(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", str(tmp_path / "file" / "folder"))
    register_backend(FakeBackend("acme", journal=str(journal)))
    with caplog.at_level(logging.INFO, "pagedattn"):
        chain.binding_for(small_problem(), "acme")
    assert "verdicts are not kept, so each process proves anew" in caplog.text
    assert any("verdicts are not kept" in note for note in capability_report()["notes"])
    chain.reset()
    chain.binding_for(small_problem(), "acme")
    assert count(journal, "run") == 1  # this process remembers


def test_no_home_folder_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", "~nobody-of-this-name/cache")
    register_backend(FakeBackend("acme"))
    assert chain.binding_for(small_problem(), "acme").backend == "acme"
    assert verdicts.not_kept is not None
    assert "set PAGEDATTN_CACHE_DIR" in verdicts.not_kept


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"fingerprint": 1}', "\0"])
def test_a_damaged_file_is_made_again(text: str, tmp_path: Path, journal: Path) -> None:
    backend = FakeBackend("acme", journal=str(journal))
    _next_process(backend)
    chain.binding_for(small_problem(), "acme")
    (path,) = (tmp_path / "cache" / "verdicts").iterdir()
    path.write_text(text)
    _next_process(backend)
    chain.binding_for(small_problem(), "acme")
    assert count(journal, "run") == 2
    assert json.loads(path.read_text())["outcome"] == "ok"
