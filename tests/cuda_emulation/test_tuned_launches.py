"""What the tuned kernels' entry makes of a call: which merge, and what the cache is to keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from _emulated_calls import long_call
from _emulation import TUNED_ALONE, Libraries, tuned

from pagedattn.backends.cuda import partition
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.hard_problems import make_call

HALF = torch.float16
BASE = Problem("cpu", HALF, HALF, 6, 2, 64, 16, return_lse=True)
SMALL = replace(BASE, head_dim=16, kv_layout="NHD")
LIGHT, NARROW, WIDE = 128, 256, 512  # threads of the merges' blocks


def _threads_of_merge(libraries: Libraries, problem: Problem, call: Call) -> int:
    library = libraries.of(problem, *tuned(90), "-O1", source=TUNED_ALONE)
    library.emulation_configure(32, 0)
    assert CudaRunner(library, problem).tuned(call) == 0
    assert library.emulation_fault() is None
    threads: int = library.emulation_threads_of_last_launch()
    return threads


@pytest.mark.parametrize(
    ("lengths", "splits", "threads"),
    [
        ([1000], 8, LIGHT),
        ([1000], 9, NARROW),
        ([1000, 3, 70], 8, LIGHT),
        ([1000, 3, 70], 9, WIDE),
    ],
)
def test_the_merge_by_partitions_and_rows(
    libraries: Libraries, lengths: list[int], splits: int, threads: int
) -> None:
    call = replace(long_call(SMALL, lengths), num_splits=splits)
    assert _threads_of_merge(libraries, SMALL, call) == threads


def test_a_fixed_partition_has_one_merge(libraries: Libraries) -> None:
    """The order of its sum must not follow the batch."""
    problem = replace(SMALL, batch_invariant=True)
    for lengths in ([2049], [2049, 3, 70, 18000]):
        call = replace(long_call(problem, lengths), batch_invariant=True)
        assert _threads_of_merge(libraries, problem, call) == WIDE


def _copies(libraries: Libraries, problem: Problem, call: Call) -> tuple[bool, bool]:
    """Whether there were copies that the cache is to keep, and copies that it is not."""
    library = libraries.of(problem, *tuned(90), "-O1", source=TUNED_ALONE)
    for policy in (0, 1):
        library.emulation_bulk_copies(policy)
    library.emulation_configure(32, 0)
    assert CudaRunner(library, problem).tuned(call) == 0
    return library.emulation_bulk_copies(0) > 0, library.emulation_bulk_copies(1) > 0


# 160 MB in tokens of each of six sequences with two KV heads, keys and values
MEASURE = (160 << 20) // (2 * 64 * 2) // (6 * 2)


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize(
    ("bound", "window", "keeps"),
    [
        (400, None, False),
        (MEASURE, None, False),
        (MEASURE + 1, None, True),
        (10**7, 17, False),
        (10**7, 2**31 - 1, True),
    ],
)
def test_what_leaves_the_cache_first(
    libraries: Libraries, layout: KVLayout, bound: int, window: int | None, keeps: bool
) -> None:
    problem = replace(BASE, kv_layout=layout, window=window is not None)
    call = replace(make_call(problem), max_seq_len=bound, window=window)
    assert _copies(libraries, problem, call) == (keeps, not keeps)


@pytest.mark.parametrize("queries", [8, 9])
def test_what_is_read_again_stays(libraries: Libraries, queries: int) -> None:
    """24 rows share what is read; what more rows read is read for them again."""
    problem = replace(BASE, varlen_query=True)
    call = replace(make_call(problem), max_query_len=queries)
    again = queries * BASE.group > partition.SHARING_ROWS
    assert _copies(libraries, problem, call) == (again, not again)
