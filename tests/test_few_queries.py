"""A backend that steps back for calls of many query tokens, and serves those of few."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    registry,
    report_text,
    use_backend,
    verify,
)
from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import SHORT_QUERIES, Call, Problem, QueryPart
from pagedattn.backends.reference import attend
from pagedattn.binding import bind
from pagedattn.request import Request

pytestmark = pytest.mark.usefixtures("fresh_chain")
VARLEN = small_problem(kv_layout="NHD", varlen_query=True, return_lse=True)
AUTOMATIC = Request(None, "the automatic chain")
LIMIT = 4


@dataclass
class Listed(FakeBackend):
    """A backend that lists the calls that it was given: their part and most query tokens."""

    asked: list[tuple[str, int]] = field(default_factory=list)

    def run(self, call: Call) -> None:
        self.asked.append((call.query_part, call.max_query_len))
        super().run(call)


@dataclass
class Quick(Listed):
    """One that steps back for problems with `query_start_loc` but for calls of few query tokens."""

    limit: int = LIMIT
    steps_back: bool = True
    limits_asked: int = 0

    def step_back_reason(self, problem: Problem, facts: Facts) -> str | None:
        return "a test" if self.steps_back and problem.varlen_query else None

    def few_queries(self, problem: Problem, facts: Facts) -> int:
        self.limits_asked += 1
        return self.limit


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Listed:
    """The second of an automatic chain of quick, steady and torch."""
    entries = (policy.Entry("quick", "a test"), policy.Entry("steady", "a test"), policy.FLOOR)
    monkeypatch.setitem(policy.ORDER, "cpu", entries)
    register_backend(backend := Listed("steady"))
    return backend


@pytest.fixture
def quick(steady: Listed) -> Quick:
    """The first of the automatic chain."""
    register_backend(backend := Quick("quick"))
    return backend


def _call(queries: list[int], **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 40, 16, 2, 32, generator=generator)
    tables = torch.arange(10 * len(queries), dtype=torch.int32).view(len(queries), 10)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]) + 1, 4, 32, generator=generator)  # one of no sequence
    lengths = torch.arange(40, 40 + len(queries), dtype=torch.int32)
    return pagedattn.paged_attention(
        query, keys, values, tables, lengths, kv_layout="NHD", query_start_loc=starts,
        return_lse=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("queries", "by"),
    [
        ([1, 1], "quick"), ([1, LIMIT], "quick"), ([LIMIT] * 3, "quick"),
        ([LIMIT + 1], "steady"), ([1, LIMIT + 1, LIMIT], "steady"), ([1, 20], "steady"),
    ],
)  # fmt: skip
def test_a_call_goes_whole_by_its_most_query_tokens(
    queries: list[int], by: str, quick: Quick, steady: Listed
) -> None:
    binding = bind("cpu", **_fields(VARLEN))
    assert binding.backend == "quick+steady"
    quick.asked.clear()
    steady.asked.clear()
    out, lse = _call(queries)
    want, want_lse = _call(queries, backend="reference")
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    once = [("all", max(queries))]
    assert (quick.asked, steady.asked) == ((once, []) if by == "quick" else ([], once))
    assert binding.calls == 1


def _fields(problem: Problem) -> dict[str, Any]:
    names = ("dtype", "num_heads", "num_kv_heads", "head_dim", "block_size", "kv_layout",
             "varlen_query", "return_lse", "batch_invariant")  # fmt: skip
    return {name: getattr(problem, name) for name in names}


def test_the_binding_says_who_serves_what(quick: Quick, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedattn"):
        binding = chain.binding_for(VARLEN)
        chain.binding_for(replace(VARLEN, head_dim=64))
        quick.limit = 8
        chain.binding_for(replace(VARLEN, num_heads=2))
    assert binding.parts == {"few": "quick", "more": "steady"}
    assert binding.few_queries == LIMIT
    told = [(c.name, c.few_queries, c.selected, c.verified) for c in binding.candidates]
    assert told == [
        ("quick", LIMIT, True, True), ("steady", 0, True, True), ("torch", 0, False, None),
    ]  # fmt: skip
    assert [r.getMessage() for r in caplog.records] == [
        "quick+steady serves cpu (the automatic chain): quick in calls of up to "
        f"{limit} query tokens a sequence, steady in the others"
        for limit in (LIMIT, 8)  # what another class has otherwise is told again
    ]


@pytest.mark.usefixtures("quick")
def test_the_report_says_who_serves_what(capsys: pytest.CaptureFixture[str]) -> None:
    _call([1, LIMIT])
    _call([1, 1], backend="steady")
    found = capability_report()
    assert json.loads(json.dumps(found)) == found
    shared, alone = found["chain"]["bindings"]
    assert shared["backend"] == "quick+steady"
    assert shared["parts"] == {"few": "quick", "more": "steady"}
    assert shared["few_queries"] == LIMIT
    assert shared["passed_over"] == {"torch": []}
    assert (alone["parts"], alone["few_queries"]) == ({}, 0)
    report_text.show(found)
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "bound quick+steady (1 call): cpu, float32, NHD, 4/2/32, blocks of 16, varlen_query, "
        "return_lse; quick in calls of up to 4 query tokens a sequence, steady in the others"
    ) in text


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "absent": ({"absent": ("no card",)}, "no card"),
    "unsupported": ({"unsupported": ("no sinks",)}, "no sinks"),
    "not built": ({"load_fails": "unavailable"}, "libacme.so is too old"),
    "its build fails": ({"load_fails": "build"}, "expected a ;"),
    "it fails to load": ({"load_fails": "import"}, "ImportError"),
    "wrong": ({"run_fails": "wrong"}, "wrong numbers"),
    "it raises": ({"run_fails": "raises"}, "too many resources"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_that_fails_changes_nothing_but_is_told(failure: str, steady: Listed) -> None:
    how, told = FAILURES[failure]
    register_backend(quick := Quick("quick", **how))
    binding = chain.binding_for(VARLEN)
    assert (binding.backend, binding.parts) == ("steady", {"all": "steady"})
    assert [c.name for c in binding.candidates] == ["steady", "quick", "torch"]
    assert told in binding.candidates[1].reasons[0]
    quick.asked.clear()
    _call([1, 1])
    assert (quick.asked, steady.asked[-1]) == ([], ("all", 1))
    (bound,) = capability_report()["chain"]["bindings"]
    assert told in bound["passed_over"]["quick"][0]


@pytest.mark.parametrize("order", ["quick,steady", "steady,quick", "quick", "steady"])
@pytest.mark.parametrize("how", ["argument", "use_backend", "variable"])
def test_an_order_that_was_asked_for_is_kept(
    order: str, how: str, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("PAGEDATTN_BACKEND", order)
    with use_backend(order) if how == "use_backend" else contextlib.nullcontext():
        binding = chain.binding_for(VARLEN, order if how == "argument" else None)
    assert binding.parts == {"all": order.split(",")[0]}
    assert quick.limits_asked == 0


def test_a_batch_invariant_sequence_does_not_change_hands(quick: Quick, steady: Listed) -> None:
    binding = chain.binding_for(replace(VARLEN, batch_invariant=True))
    assert (binding.backend, binding.few_queries) == ("steady", 0)
    assert (quick.limits_asked, quick.asked) == (0, [])
    _call([1, 1], batch_invariant=True)
    assert (quick.asked, steady.asked[-1]) == ([], ("all", 1))


def test_without_a_limit_it_is_not_tried(quick: Quick) -> None:
    quick.limit = 0
    binding = chain.binding_for(VARLEN)
    assert binding.parts == {"all": "steady"}
    assert quick.asked == []
    assert [(c.name, c.loadable) for c in binding.candidates[1:]] == [
        ("quick", None), ("torch", None),
    ]  # fmt: skip


@pytest.mark.usefixtures("steady")
def test_one_that_names_no_limit_steps_back_whole() -> None:
    class Plain(Listed):
        def step_back_reason(self, problem: Problem, facts: Facts) -> str | None:
            return "a test"

    register_backend(plain := Plain("quick"))
    assert chain.binding_for(VARLEN).parts == {"all": "steady"}
    assert plain.asked == []


def test_one_that_does_not_step_back_serves_all(quick: Quick) -> None:
    quick.steps_back = False
    assert chain.binding_for(VARLEN).parts == {"all": "quick"}
    assert chain.binding_for(replace(VARLEN, varlen_query=False)).parts == {"all": "quick"}
    assert quick.limits_asked == 0


@pytest.mark.usefixtures("steady")
def test_calls_of_one_query_token_each_are_not_told_apart() -> None:
    class Always(Quick):
        def step_back_reason(self, problem: Problem, facts: Facts) -> str | None:
            return "a test"

    register_backend(quick := Always("quick"))
    assert chain.binding_for(replace(VARLEN, varlen_query=False)).parts == {"all": "steady"}
    assert quick.limits_asked == 0


def test_without_the_other_it_serves_all(quick: Quick, steady: Listed) -> None:
    steady.run_fails = "wrong"
    binding = chain.binding_for(VARLEN)
    assert binding.parts == {"all": "quick"}
    assert (quick.limits_asked, len(binding.candidates)) == (0, 3)


@pytest.mark.usefixtures("steady")
def test_one_that_cannot_be_imported_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    get = registry.get

    def broken(name: str) -> Any:
        if name == "quick":
            raise BackendUnavailable("its module cannot be imported")
        return get(name)

    monkeypatch.setattr(registry, "get", broken)
    binding = chain.binding_for(VARLEN)
    assert binding.backend == "steady"
    assert binding.candidates[0].reasons == ("its module cannot be imported",)


# --- what it is proved for


@pytest.mark.parametrize("few", [1, 2, 3, LIMIT, 24])
def test_every_size_of_call_is_proved(few: int) -> None:
    problem = replace(VARLEN, few_queries=few)
    calls = list(hard_problems.make_calls(problem))
    assert [c.query_part for c in calls] == ["all"] * len(calls)
    sizes = [count for count in (1, 2, 4, 8, 16) if count < few]
    assert [c.max_query_len for c in calls] == [few, few, *sizes]
    for call in calls:
        assert call.query_start_loc is not None
        starts = call.query_start_loc
        assert int(starts.diff().max()) == call.max_query_len
        assert call.host_query_start == starts.tolist()
    assert [len(c.seq_lens) for c in calls[:2]] == [6, 1]
    assert verify.judge(attend, problem).outcome == "ok"


@pytest.mark.parametrize(
    ("part", "heads", "most"),
    [
        ("all", 4, [5, 1]),
        ("all", 2, [5, 1, SHORT_QUERIES]),  # one head a KV head: five tokens are few rows
        ("short", 4, [SHORT_QUERIES, 1]),
        ("short", 2, [SHORT_QUERIES, 1, SHORT_QUERIES]),
        ("long", 4, [40]),
    ],
)
def test_calls_of_few_rows_and_of_many_are_proved(
    part: QueryPart, heads: int, most: list[int]
) -> None:
    """They may be other kernels', whether or not somebody else serves the others."""
    problem = replace(VARLEN, query_part=part, num_heads=heads)
    calls = list(hard_problems.make_calls(problem))
    assert [c.max_query_len for c in calls] == most
    assert [c.query_part for c in calls] == [part, *["all"] * (len(calls) - 1)]
    assert verify.judge(attend, problem).outcome == "ok"


def test_on_a_gpu_decode_is_proved_with_bounds_of_short_contexts_and_of_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(VARLEN, varlen_query=False)
    assert len(list(hard_problems.make_calls(problem))) == 2
    problem = replace(problem, device="cuda:0")
    monkeypatch.setattr(hard_problems, "on_device", lambda call, _: call)
    calls = list(hard_problems.make_calls(problem))
    assert [len(c.seq_lens) for c in calls] == [6, 1, 6, 1]  # the last two once more
    assert [c.max_seq_len > 16_000 for c in calls] == [False, False, True, True]
    for call in calls:
        assert call.max_seq_len == call.block_tables.shape[1] * problem.block_size
    assert all(bool(c.out.isnan().all()) for c in calls)
    for few in (0, 4):
        calls = list(hard_problems.make_calls(replace(problem, varlen_query=True, few_queries=few)))
        bounds = [c.max_query_len for c in calls if c.max_seq_len > 16_000]
        assert bounds == ([4, 4, 1] if few else [1])


MISTAKES: dict[str, Callable[[Call], bool]] = {
    "one query token": lambda call: call.max_query_len == 1,
    "two": lambda call: call.max_query_len == 2,
    "the limit": lambda call: call.max_query_len == LIMIT,
    "one sequence": lambda call: call.seq_lens.numel() == 1,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_for_some_of_its_calls_alone_is_found(mistake: str, steady: Listed) -> None:
    class Wrong(Quick):
        def run(self, call: Call) -> None:
            super().run(call)
            if MISTAKES[mistake](call):
                call.out.mul_(1.01)

    register_backend(Wrong("quick"))
    binding = chain.binding_for(VARLEN)
    assert binding.backend == "steady"
    assert "wrong numbers" in binding.candidates[1].reasons[0]


def test_bind_takes_no_number_of_few_queries() -> None:
    with use_backend("torch"), pytest.raises(TypeError, match="no field of a problem"):
        bind("cpu", few_queries=LIMIT)
