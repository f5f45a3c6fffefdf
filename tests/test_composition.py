"""One call by two backends: short sequences by the first, long ones by the next that can."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from _backends import FakeBackend, small_problem
from _backends import fresh_chain as fresh_chain

import pagedattn
from pagedattn import (
    capability_report,
    chain,
    hard_problems,
    policy,
    register_backend,
    report_text,
    use_backend,
    verify,
)
from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.protocol import SHORT_QUERIES, Call, Problem, Runner
from pagedattn.backends.python_v2.backend import TorchBackend
from pagedattn.backends.python_v2.device_road import run_without_host_lengths
from pagedattn.backends.reference import attend

pytestmark = pytest.mark.usefixtures("fresh_chain")
VARLEN = small_problem(varlen_query=True, return_lse=True)
either_part = pytest.mark.parametrize("part", ["short", "long"])


@dataclass
class Listed(FakeBackend):
    """A backend that lists the parts that it was given, and which parts it takes."""

    takes: tuple[str, ...] = ("all", "short", "long")
    asked: list[str] = field(default_factory=list)

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return [] if problem.query_part in self.takes else [f"no {problem.query_part} sequences"]

    def run(self, call: Call) -> None:
        self.asked.append(call.query_part)
        super().run(call)


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Listed:
    """A backend that is made for short sequences."""
    monkeypatch.setitem(policy.SHORT_FIRST, "first", "a test")
    backend = Listed("first")
    register_backend(backend)
    return backend


def _call(lengths: list[int], queries: list[int], **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 40, 16, 2, 32, generator=generator)
    tables = torch.arange(10 * len(lengths), dtype=torch.int32).view(len(lengths), 10)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]) + 1, 4, 32, generator=generator)  # one of no sequence
    return pagedattn.paged_attention(
        query, keys, values, tables, torch.tensor(lengths, dtype=torch.int32), kv_layout="NHD",
        query_start_loc=starts, return_lse=True, **options,
    )  # fmt: skip


def test_each_sequence_is_served_by_its_part(first: Listed) -> None:
    other = Listed("other")
    register_backend(other)
    lengths, queries = [50, 30, 70, 17], [1, SHORT_QUERIES, SHORT_QUERIES + 1, 17]
    out, lse = _call(lengths, queries, backend="first,other", out=torch.full((52, 4, 32), math.nan))
    want, want_lse = _call(lengths, queries, backend="reference")
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert (first.asked[-1], other.asked[-1]) == ("short", "long")
    (binding,) = [b for b in chain.bindings() if b.requested == ("first", "other")]
    assert binding.backend == "first+other"
    assert binding.parts == {"short": "first", "long": "other"}
    asked = len(other.asked)
    _call([50, 30], [1, SHORT_QUERIES], backend="first,other")
    assert len(other.asked) == asked  # no sequence can be long
    assert first.asked[-1] == "all"
    assert binding.calls == 2


def test_the_report_says_who_serves_what(first: Listed, capsys: pytest.CaptureFixture[str]) -> None:
    _call([50, 70], [1, 17], backend="first,torch")
    (bound,) = capability_report()["chain"]["bindings"]
    assert bound["backend"] == "first+torch"
    assert bound["parts"] == {"short": "first", "long": "torch"}
    report_text.show(capability_report())
    text = " ".join(capsys.readouterr().out.split())
    assert "first up to 16 query tokens of a sequence, torch beyond" in text


def test_the_rest_of_the_chain_is_asked_in_turn(first: Listed) -> None:
    register_backend(Listed("short", takes=("all", "short")))
    register_backend(FakeBackend("wrong", run_fails="wrong"))
    binding = chain.binding_for(VARLEN, "first,short,wrong,torch,reference")
    assert binding.backend == "first+torch"
    told = [(c.name, c.query_part, c.selected) for c in binding.candidates]
    assert told == [
        ("first", "short", True),
        ("short", "long", False),
        ("wrong", "long", False),
        ("torch", "long", True),
        ("reference", "all", False),
    ]
    assert binding.candidates[1].reasons == ("no long sequences",)
    assert "wrong numbers" in binding.candidates[2].reasons[0]


def test_alone_it_serves_all_of_it(first: Listed) -> None:
    assert chain.binding_for(VARLEN, "first").parts == {"all": "first"}
    register_backend(Listed("short", takes=("all", "short")))
    assert chain.binding_for(VARLEN, "first,short").parts == {"all": "first"}
    _call([50, 70], [1, 17], backend="first,short")
    assert first.asked[-1] == "all"


def test_without_its_part_the_next_serves_all_of_it(first: Listed) -> None:
    first.run_fails = "wrong"
    binding = chain.binding_for(VARLEN, "first,torch")
    assert binding.parts == {"all": "torch"}
    assert "wrong numbers" in binding.candidates[0].reasons[0]
    first.takes = ()
    chain.reset()
    with pytest.raises(BackendUnavailable, match="no short sequences"):
        chain.binding_for(VARLEN, "first,triton")


def test_a_decode_call_is_never_shared(first: Listed) -> None:
    assert chain.binding_for(small_problem(), "first,torch").parts == {"all": "first"}


def _device_road(call: Call) -> None:
    run_without_host_lengths(replace(call, host_seq_lens=None, host_query_start=None))


class OnDevice(Listed):
    """torch, as it is where it must not read the lengths."""

    def run(self, call: Call) -> None:
        _device_road(call)


@pytest.mark.parametrize("hint", [2, 16, 17, 30, 40])
def test_a_wrong_hint_harms_its_own_sequence_alone(
    hint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(policy.SHORT_FIRST, "one", "a test")
    for name in ("one", "two"):
        register_backend(OnDevice(name))
    binding = chain.binding_for(VARLEN, "one,two")
    assert binding.backend == "one+two"
    problem = replace(VARLEN, query_part="long")  # has sequences of 1 to 40 query tokens
    call = replace(hard_problems.make_call(problem), query_part="all", max_query_len=hint)
    right = replace(call, out=call.out.clone(), lse=torch.empty(call.query.shape[:2]))
    attend(right)
    assert call.host_query_start is not None
    starts = call.host_query_start
    binding.run(call)
    for first, end in pairwise(starts):
        rows = slice(first, end)
        if end - first > hint:
            assert bool(call.out[rows].isnan().all())
        else:
            torch.testing.assert_close(call.out[rows], right.out[rows], equal_nan=True)
    assert bool((call.out[starts[-1] :] == 0).all())


ROADS: dict[str, Runner] = {
    "reference": attend,
    "torch": TorchBackend().load(VARLEN),
    "torch, lengths on a device": _device_road,
}


@either_part
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch_invariant"])
def test_a_backend_leaves_the_others_rows_alone(road: str, part: Any, invariant: bool) -> None:
    problem = replace(VARLEN, query_part=part, sinks=True, batch_invariant=invariant)
    verdict = verify.judge(ROADS[road], problem)
    assert verdict.outcome == "ok", verdict.detail


MISTAKES: dict[str, Callable[[Call], None]] = {
    "it serves all of it": lambda call: attend(replace(call, query_part="all")),
    "it serves the other part": lambda call: attend(
        replace(call, query_part="long" if call.query_part == "short" else "short")
    ),
    "it serves nothing": lambda call: None,
}


@either_part
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_proof_sees_what_was_not_left_alone(part: Any, mistake: str) -> None:
    problem = replace(VARLEN, query_part=part)
    assert verify.judge(MISTAKES[mistake], problem).outcome == "wrong"


def test_bind_takes_no_part() -> None:
    with use_backend("torch"), pytest.raises(TypeError, match="no field of a problem"):
        pagedattn.bind("cpu", query_part="short")
