"""Sequences of many query tokens in Triton's interpreter: keys loaded ahead, and ids followed
unlooked at."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn import verify
from pagedattn.backends.layouts import from_hnd
from pagedattn.backends.protocol import Call, KVLayout, Problem

pytest.importorskip("triton")
pytest.importorskip("triton.runtime.interpreter", reason="this Triton has no interpreter")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from pagedattn.backends.triton import tuning  # after the checks: it imports Triton
from pagedattn.backends.triton.backend import TritonBackend

HALF = torch.float16
FAR = 2**31 - 1  # as a block's id: what follows it ends the process
BASE = Problem("cpu", HALF, HALF, 3, 1, 64, 16, varlen_query=True, return_lse=True)
# those of every way to load keys: ahead, in parts, as they lie, as words
PROBLEMS = {
    "packed ahead": BASE,
    "packed fp32": replace(BASE, dtype=torch.float32, kv_dtype=torch.float32),
    "packed int8": replace(BASE, kv_dtype=torch.int8),
    "NHD": replace(BASE, kv_layout="NHD"),
    "HND": replace(BASE, kv_layout="HND"),
    "NHD words": replace(BASE, kv_layout="NHD", kv_dtype=torch.int8),
}
every_road = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
# Tokens to be masked, and 0, 1, 2 and 4 whole tiles of 64 before them; in between a decode row, a
# sequence of no length, and one of no query token.
LENGTHS, QUERIES = (20, 84, 5, 150, 0, 300, 17), (20, 20, 1, 22, 18, 37, 0)


def _call(
    problem: Problem, lengths: Sequence[int], queries: Sequence[int], around: float, **features: Any
) -> Call:
    """A call whose cache lies between two blocks that hold `around`, as does all unused in it."""
    size, kv_heads, dim = problem.block_size, problem.num_kv_heads, problem.head_dim
    counts = [-(-length // size) for length in lengths]
    num_blocks = sum(counts)
    if problem.kv_dtype == torch.int8:
        around = 127.0 if math.isnan(around) else around
        dense = torch.randint(-60, 61, (2, num_blocks + 2, kv_heads, size, dim)).float()
    else:
        dense = torch.randn(2, num_blocks + 2, kv_heads, size, dim)
    dense[:, [0, -1]] = around
    tables = torch.full((len(lengths), max(counts) + 2), FAR).int()
    ids = torch.randperm(num_blocks)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[row, :count] = mine
        if length % size:
            dense[:, 1 + mine[-1], :, length % size :] = around
    stored = dense.to(problem.kv_dtype)
    keys, values = from_hnd(stored[0], stored[1], problem.kv_layout)
    starts = torch.tensor([0, *queries]).cumsum(0)
    query = torch.randn(int(starts[-1]), problem.num_heads, dim).to(problem.dtype)
    return Call(
        query=query, key_cache=keys[1:-1], value_cache=values[1:-1], block_tables=tables,
        seq_lens=torch.tensor(lengths).int(), out=torch.full_like(query, 7.0),
        lse=torch.full(query.shape[:2], 7.0), kv_layout=problem.kv_layout, scale=dim**-0.5,
        max_seq_len=max(counts) * size, max_query_len=max(queries), query_start_loc=starts.int(),
        **features,
    )  # fmt: skip


def _check(problem: Problem, call: Call) -> None:
    TritonBackend().load(problem)(call)
    error, lse_error = verify.errors(call, verify.oracle(call, problem))
    assert error <= verify.TOLERANCE[problem.dtype]
    assert lse_error <= verify.LSE_TOLERANCE[problem.dtype]


def _features(**wanted: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "window": 200, "softcap": 2.0, "alibi": torch.rand(3) / 8, "sinks": torch.randn(3),
    }  # fmt: skip
    return {"alibi_slopes" if n == "alibi" else n: values[n] for n in wanted}


@every_road
def test_long_and_short_sequences_together(problem: Problem) -> None:
    problem = replace(problem, num_heads=6, num_kv_heads=2)
    _check(problem, _call(problem, LENGTHS, QUERIES, math.nan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_keys_ahead_of_every_head_size(head_dim: int, dtype: torch.dtype) -> None:
    problem = replace(BASE, head_dim=head_dim, dtype=dtype, kv_dtype=dtype)
    assert tuning.prefill_tiling(problem).chunks == 2
    _check(problem, _call(problem, LENGTHS[:4], QUERIES[:4], math.nan))


@pytest.mark.parametrize("block_size", [1, 8, 32, 64, 96, 128])
def test_keys_ahead_in_blocks_of_any_size(block_size: int) -> None:
    problem = replace(BASE, block_size=block_size)
    # where blocks and tiles do not begin together a token's place differs from tile to tile
    assert (tuning.prefill_tiling(problem).chunks == 2) == (block_size <= 64)
    _check(problem, _call(problem, LENGTHS, QUERIES, math.nan))


@pytest.mark.parametrize("group", [1, 4, 12])
def test_keys_ahead_for_groups(group: int) -> None:
    problem = replace(BASE, num_heads=group, num_kv_heads=1)
    queries = [max(n, 65) for n in QUERIES]  # more than are decode rows of a group of one
    _check(problem, _call(problem, [70, 140, 270], queries[:3], math.nan))


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize(
    "names",
    [["window"], ["softcap"], ["alibi"], ["sinks"], ["window", "softcap", "alibi", "sinks"]],
    ids="+".join,
)
def test_features(layout: KVLayout, names: list[str]) -> None:
    features = dict.fromkeys(names, True)
    problem = replace(BASE, kv_layout=layout, **features)  # type: ignore[arg-type]
    call = _call(problem, (*LENGTHS, 400), (*QUERIES, 45), math.nan, **_features(**features))
    _check(problem, call)


def test_where_keys_are_not_loaded_ahead() -> None:
    """What was found to spill in the loop, or has no keys of 16 bits that lie in chunks."""
    large = replace(BASE, head_dim=256)
    assert tuning.prefill_tiling(replace(large, softcap=True)).chunks == 0
    assert tuning.prefill_tiling(replace(large, window=True)).chunks == 0
    assert tuning.prefill_tiling(replace(large, block_size=4)).chunks == 0
    assert tuning.prefill_tiling(replace(BASE, head_dim=512)).chunks == 0
    assert [tuning.prefill_tiling(p).chunks for p in PROBLEMS.values()] == [2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("window", [1, 17, 150])
@every_road
def test_ids_behind_the_window_are_not_followed(problem: Problem, window: int) -> None:
    """An engine may have freed the blocks wholly behind the first query token's window."""
    problem = replace(problem, window=True)
    call = _call(problem, LENGTHS, QUERIES, math.nan, window=window)
    for row, (length, query) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        behind = max(length - query + 1 - window, 0) // problem.block_size
        call.block_tables[row, :behind] = (FAR, -1)[row % 2]
    _check(problem, call)
    assert not call.out.isnan().any()


@pytest.mark.parametrize(
    ("bad", "where", "window"),
    [(-1, 0, None), (None, 3, None), (None, -1, None), (FAR, 0, 100), (-FAR, -1, 100)],
)
@every_road
def test_a_bad_id_makes_nan_of_its_sequence_alone(
    problem: Problem, bad: int | None, where: int, window: int | None
) -> None:
    """Of all its rows, also of those that do not see the block, and where what the id leads to
    could be read."""
    problem = replace(problem, window=window is not None)
    call = _call(problem, (70, 200, 90), (20, 60, 30), 0.0, window=window)
    behind = 0 if window is None else (200 - 60 + 1 - window) // 16
    blocks = range(max(behind, 0), -(-200 // 16))
    call.block_tables[1, blocks[where]] = call.key_cache.shape[0] if bad is None else bad
    _check(problem, call)
    assert call.lse is not None
    assert call.out[20:80].isnan().all()
    assert call.lse[20:80].isnan().all()


@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
def test_a_bad_id_is_found_in_a_long_table(layout: KVLayout) -> None:
    """Of more entries than are looked at together."""
    problem = replace(BASE, kv_layout=layout, block_size=1)
    call = _call(problem, (300, 280), (20, 20), 0.0)
    call.block_tables[0, 299] = call.key_cache.shape[0]
    _check(problem, call)
    assert call.out[:20].isnan().all()


@pytest.mark.parametrize("columns", [8, 0])
@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
def test_a_cache_of_no_blocks(layout: KVLayout, columns: int) -> None:
    """Every id is a bad one, and nothing may be read, not even ahead; nor of a table of no
    columns."""
    problem = replace(BASE, kv_layout=layout)
    call = _call(problem, (0, 90, 0), (20, 40, 17), 0.0)
    call.key_cache, call.value_cache = call.key_cache[:0], call.value_cache[:0]
    call.block_tables = call.block_tables[:, :columns].zero_().contiguous()
    call.max_seq_len = columns * problem.block_size
    TritonBackend().load(problem)(call)
    assert call.lse is not None
    assert call.out[20:60].isnan().all()
    assert call.lse[20:60].isnan().all()
    for rows in (slice(0, 20), slice(60, None)):
        assert bool((call.out[rows] == 0).all())
        assert bool((call.lse[rows] == -math.inf).all())


@every_road
def test_a_length_beyond_the_table_makes_nan_of_its_sequence_alone(problem: Problem) -> None:
    call = _call(problem, (70, 200, 90), (20, 60, 30), math.nan)
    call.seq_lens[1] = call.max_seq_len + 1
    _check(problem, call)
    assert call.out[20:80].isnan().all()
