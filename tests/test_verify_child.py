"""Proofs in a child process: whatever happens there, this process lives and knows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from _backends import FakeBackend, count, run_python, small_problem
from _backends import fresh_chain as fresh_chain
from _platforms import PLATFORMS

from pagedattn import chain, register_backend, verify_child
from pagedattn.backends.errors import DeviceError, VerificationError
from pagedattn.probe import probe

pytestmark = pytest.mark.usefixtures("fresh_chain")


@pytest.fixture
def in_child(fresh_chain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "child")
    monkeypatch.setenv("PAGEDATTN_EAGER", "1")  # must not make the child bind in its turn


@pytest.mark.usefixtures("in_child")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"run_fails": "wrong"}, "wrong numbers on cpu: relative error 1.0e-02"),
        ({"run_fails": "raises"}, "RuntimeError: too many resources requested for launch"),
        ({"run_fails": "dies"}, "acme died of SIGSEGV"),
    ],
)
def test_a_failure_in_the_child_is_a_reason(
    fault: dict[str, Any], said: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", journal=str(journal), **fault))
    with pytest.raises(VerificationError) as caught:
        chain.binding_for(small_problem(), "acme")
    assert said in str(caught.value)
    assert (count(journal, "load"), count(journal, "run")) == (2, 1)  # here, and there


@pytest.mark.usefixtures("in_child")
def test_a_right_backend_is_bound_and_ran_only_in_the_child(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", journal=str(journal)))
    (candidate,) = chain.binding_for(small_problem(), "acme").candidates
    assert candidate.verified
    assert (count(journal, "load"), count(journal, "run")) == (2, 1)


@pytest.mark.usefixtures("in_child")
def test_a_hang_on_a_cpu_ends_at_the_deadline_and_the_next_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verify_child, "DEADLINE_S", 1.0)
    register_backend(FakeBackend("acme", run_fails="hang"))
    began = time.perf_counter()
    with pytest.raises(VerificationError, match="acme gave no answer within 1 s"):
        chain.binding_for(small_problem(), "acme")
    assert time.perf_counter() - began < 10
    # a busy host may be why, so it is not held against it
    assert list((tmp_path / "cache").glob("verdicts/*.json")) == []


def test_a_hang_on_a_card_loses_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = probe(PLATFORMS["bi_v100"]().sources(tmp_path))
    monkeypatch.setattr(chain, "probe_facts", lambda: facts)
    monkeypatch.setattr(verify_child, "DEADLINE_S", 1.0)
    journal = tmp_path / "journal"
    register_backend(FakeBackend("acme", load_fails="hang", journal=str(journal)))
    register_backend(FakeBackend("beta", journal=str(journal)))
    problem = small_problem(device="cuda:0")
    with pytest.raises(DeviceError, match=r"no answer within 1 s; cuda:0 is not touched again"):
        chain.binding_for(problem, "acme,beta")
    before = journal.read_text()
    with pytest.raises(DeviceError, match="no answer within 1 s"):
        chain.binding_for(problem, "beta")
    assert journal.read_text() == before
    # kept: the next process does not hang it again
    kept = list((tmp_path / "cache").glob("verdicts/*.json"))
    assert len(kept) == 1
    assert '"timeout"' in kept[0].read_text()


def test_a_backend_that_cannot_be_sent_says_so() -> None:
    class Local(FakeBackend):
        pass

    with pytest.raises(VerificationError, match=r"cannot be sent to the child .*Local"):
        verify_child.run(Local("acme"), small_problem())
    Local.__module__ = "__main__"
    with pytest.raises(VerificationError, match="defined in the script that is running"):
        verify_child.run(Local("acme"), small_problem())


def test_a_child_that_answers_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_child, "_START", "print('no such driver'); raise SystemExit(3)")
    outcome, detail = verify_child.run(FakeBackend("acme"), small_problem())
    assert outcome == "error"
    assert "ended with code 3; its last words: no such driver" in detail


def test_a_child_that_dies_after_its_answer_was_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "import sys, os; open(sys.argv[1], 'w').write('[\"ok\", \"\"]'); os.abort()"
    monkeypatch.setattr(verify_child, "_START", start)
    outcome, detail = verify_child.run(FakeBackend("acme"), small_problem())
    assert outcome == "signal"
    assert "SIGABRT" in detail


def test_case_29_a_verdict_is_kept_for_the_next_process(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    backend = FakeBackend("acme", journal=str(journal))
    register_backend(backend)
    chain.binding_for(small_problem(), "acme")
    assert (count(journal, "load"), count(journal, "run")) == (1, 1)
    code = f"""
from _backends import FakeBackend, small_problem
from pagedattn import chain, register_backend
register_backend(FakeBackend("acme", journal={str(journal)!r}))
assert chain.binding_for(small_problem(), "acme").candidates[0].verified
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert (count(journal, "load"), count(journal, "run")) == (2, 1)  # loaded, not proved again
