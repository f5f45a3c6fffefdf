"""How many query tokens the sequences of a call have, on the tuned kernels: which form serves them,
and what the host was told, must not show."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from _emulated_calls import (
    assert_told_by_its_sequences,
    judge_orders,
    same_bits,
    with_bound_of_queries,
)
from _emulation import TUNED_ALONE, Libraries, tuned

from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, Problem
from pagedattn.hard_problems import UNTOUCHED, make_call

BASE = Problem("cpu", torch.float16, torch.float16, 6, 2, 64, 16, return_lse=True)
either_arch = pytest.mark.parametrize("arch", [80, 90])


def _judged(libraries: Libraries, problem: Problem, call: Call, arch: int = 90) -> Call:
    library = libraries.of(problem, *tuned(arch), "-O1", source=TUNED_ALONE)
    runner = CudaRunner(library, problem)

    def run(call: Call) -> None:
        assert runner.tuned(call) == 0

    return judge_orders(problem, call, library, run, (32, 32), 1e-4)


def _run(libraries: Libraries, problem: Problem, call: Call) -> None:
    """Once, without a judge."""
    library = libraries.of(problem, *tuned(90), "-O1", source=TUNED_ALONE)
    library.emulation_configure(32, 0)
    assert CudaRunner(library, problem).tuned(call) == 0
    assert library.emulation_fault() is None


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_wrong_bound_of_query_tokens_is_told_by_its_sequences_alone(
    libraries: Libraries, most: int, splits: int
) -> None:
    problem = replace(BASE, varlen_query=True)
    call = replace(make_call(problem), num_splits=splits)
    right = _judged(libraries, problem, call)
    wrong = with_bound_of_queries(call, most)
    _run(libraries, problem, wrong)
    assert_told_by_its_sequences(wrong, right, 2e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_tokens_before_the_first_sequence_are_of_none(libraries: Libraries, splits: int) -> None:
    problem = replace(BASE, varlen_query=True)
    call = replace(make_call(problem), num_splits=splits)
    right = _judged(libraries, problem, call)
    assert call.query_start_loc is not None
    query = torch.cat([call.query[:1], call.query])
    later = replace(
        call, query=query, out=torch.full_like(query, UNTOUCHED),
        lse=torch.full(query.shape[:2], UNTOUCHED), query_start_loc=call.query_start_loc + 1,
    )  # fmt: skip
    _run(libraries, problem, later)
    assert torch.equal(later.out[1:].nan_to_num(6e4), right.out.nan_to_num(6e4))
    assert not bool(later.out[0].any())


@either_arch
def test_batch_invariant_bits_do_not_follow_the_others_query_tokens(
    libraries: Libraries, arch: int
) -> None:
    """Alone a sequence may have so few rows that another form would serve them."""
    problem = replace(BASE, varlen_query=True, batch_invariant=True)
    batch = make_call(problem)
    together = _judged(libraries, problem, batch, arch)
    assert together.lse is not None
    assert batch.host_query_start is not None
    assert batch.query_start_loc is not None
    for row, (first, end) in enumerate(pairwise(batch.host_query_start)):
        one, rows = slice(row, row + 1), slice(first, end)
        alone = replace(
            batch, query=batch.query[rows], out=batch.out[rows], seq_lens=batch.seq_lens[one],
            block_tables=batch.block_tables[one], max_query_len=end - first,
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
        )  # fmt: skip
        result = _judged(libraries, problem, alone, arch)
        assert same_bits(result, replace(together, out=together.out[rows], lse=together.lse[rows]))
