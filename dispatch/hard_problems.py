"""Small problems that are hard to get right, made for a class of problems.

Odd lengths (0, 1, one past a block, whole blocks), a shuffled table, every unused slot and
block poisoned with NaN, padding entries that point nowhere, a sequence whose table is corrupt,
and outputs that hold NaN until they are written.

Every tensor says its device and its type: an engine may have set torch's defaults to others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagedattn.backends.layouts import from_hnd
from pagedattn.backends.protocol import SHORT_QUERIES, Call, Problem

#: what the results of a part hold beforehand: it must stay in the rows of the other part
UNTOUCHED = 7.0
_PADS = (-1, 2**31 - 1)
_LONG = 641  # tokens: on a GPU enough for several partitions
_CAPTURED = 16384  # tokens: as a captured graph is told, however short the sequences are


def make_call(problem: Problem, seed: int = 0) -> Call:
    """A `Call` of the class `problem`, on its device, with results filled with NaN.

    The last sequence names a block that does not exist, so its rows must come out NaN.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    bs = problem.block_size
    on_host = problem.device_type == "cpu"
    lengths = [1, 0, bs + 1, 2 * bs, max(3 * bs + 2, 301 if on_host else _LONG), bs + 2]
    queries = _queries(problem) if problem.varlen_query else [1] * len(lengths)
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    tables, num_blocks = _tables(lengths, bs, generator)
    keys, values = _caches(problem, lengths, tables, num_blocks, generator)
    tables[-1, 1] = num_blocks  # the corrupt one
    padding = 1 if problem.varlen_query else 0  # a token that belongs to no sequence
    query = 2 * _normal((starts[-1] + padding, problem.num_heads, problem.head_dim), generator)
    held = math.nan if problem.query_part == "all" else UNTOUCHED
    call = Call(
        query=query.to(problem.dtype),
        key_cache=keys,
        value_cache=values,
        block_tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cpu"),
        out=torch.full_like(query, held, dtype=problem.dtype),
        lse=torch.full_like(query[..., 0], held) if problem.return_lse else None,
        kv_layout=problem.kv_layout,
        scale=problem.head_dim**-0.5,
        max_seq_len=tables.shape[1] * bs,
        max_query_len=SHORT_QUERIES if problem.query_part == "short" else max(queries),
        batch_invariant=problem.batch_invariant,
        host_seq_lens=lengths if on_host else None,
        query_part=problem.query_part,
        **_features(problem, generator),
    )
    if problem.varlen_query:
        call.query_start_loc = torch.tensor(starts, dtype=torch.int32, device="cpu")
        call.host_query_start = starts if on_host else None
    return on_device(call, problem.device)


def make_calls(problem: Problem) -> Iterator[Call]:
    """Every call that a backend has to answer right to be bound for `problem`."""
    call = make_call(problem)
    yield call
    if problem.few_queries or not problem.varlen_query:
        yield longest_alone(call)
    # fewer rows, or more, may be another kernel's, or another form's
    counts = _other_counts(problem)
    for count in counts:
        yield _of_count(problem, count)
    if problem.device_type == "cpu":
        return
    # on a GPU the bound decides how keys are split, and what merges them
    if problem.few_queries or not problem.varlen_query:
        yield with_long_bound(call)
        yield with_long_bound(longest_alone(call))
    if counts:
        yield with_long_bound(_of_count(problem, counts[0]))


def _of_count(problem: Problem, count: int) -> Call:
    """A call with up to so many query tokens of a sequence."""
    return make_call(replace(problem, few_queries=count, query_part="all"))


def _other_counts(problem: Problem) -> list[int]:
    """Of how many query tokens a sequence there are further calls."""
    if few := problem.few_queries:
        return [1 << i for i in range(few.bit_length()) if 1 << i < few]
    if not problem.varlen_query or problem.query_part == "long":
        return []
    # with one head a KV head the most that the other call has are few rows
    return [1, SHORT_QUERIES] if problem.group == 1 else [1]


def with_long_bound(call: Call) -> Call:
    """The call as an engine captures it for whatever may come: its table is wide, and mostly
    padding."""
    rows, given = call.block_tables.shape
    per_block = call.max_seq_len // given
    tables = call.block_tables.new_full((rows, -(-_CAPTURED // per_block)), _PADS[1])
    tables[:, :given] = call.block_tables
    return replace(
        call,
        block_tables=tables,
        max_seq_len=tables.shape[1] * per_block,
        out=torch.full_like(call.out, math.nan),
        lse=None if call.lse is None else torch.full_like(call.lse, math.nan),
    )


def longest_alone(call: Call) -> Call:
    """The longest sequence of a call by itself: there are fewer rows, and more partitions of
    each."""
    row = int(call.seq_lens.argmax())
    one, rows = slice(row, row + 1), slice(row, row + 1)
    starts = call.query_start_loc
    if starts is not None:
        rows = slice(*starts[row : row + 2].tolist())
        starts = starts[row : row + 2] - starts[row]
    return replace(
        call,
        query=call.query[rows],
        block_tables=call.block_tables[one],
        seq_lens=call.seq_lens[one],
        out=torch.full_like(call.out[rows], math.nan),
        lse=None if call.lse is None else torch.full_like(call.lse[rows], math.nan),
        query_start_loc=starts,
        host_seq_lens=None if call.host_seq_lens is None else call.host_seq_lens[one],
        host_query_start=None if call.host_query_start is None else [0, rows.stop - rows.start],
    )


def _queries(problem: Problem) -> list[int]:
    """Query tokens of each sequence; where long ones are another's, or these alone are asked for,
    there are both, and some of both sides' last."""
    if few := problem.few_queries:  # the most of them in the shortest and in the longest
        return [few, min(2, few), 1, max(1, few - 1), few, min(2, few)]
    if problem.query_part == "all":
        return [1, 2, 3, 5, 1, 2]
    return [1, SHORT_QUERIES, SHORT_QUERIES + 1, 5, 40, 2 if problem.query_part == "short" else 18]


def on_device(call: Call, device: str | torch.device) -> Call:
    """The same call with every tensor on `device`."""
    moved: dict[str, Any] = {
        k: v.to(device) for k, v in vars(call).items() if isinstance(v, Tensor)
    }
    return replace(call, **moved)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _tables(lengths: list[int], block_size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3  # block 0 and two more stay unused
    ids = torch.randperm(num_blocks - 1, generator=generator, device="cpu").to(torch.int32) + 1
    tables = torch.empty(len(lengths), max(counts) + 2, dtype=torch.int32, device="cpu")
    tables[:, 0::2], tables[:, 1::2] = _PADS
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = ids[first : first + count]
        first += count
    return tables, num_blocks


def _caches(
    problem: Problem,
    lengths: list[int],
    tables: Tensor,
    num_blocks: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    shape = (2, num_blocks, problem.num_kv_heads, problem.block_size, problem.head_dim)
    dense = _normal(shape, generator)
    if problem.kv_dtype == torch.int8:
        # no NaN to poison with; without a scale to undo it, larger values would make every
        # softmax a pick of one key
        dense = (dense * (32 if problem.kv_scales != "none" else 2)).round().clamp(-127, 127)
    else:
        used = torch.zeros(num_blocks, problem.block_size, dtype=torch.bool, device="cpu")
        for row, length in enumerate(lengths):
            for position in range(length):
                used[tables[row, position // problem.block_size], position % used.shape[1]] = True
        dense.masked_fill_(~used[None, :, None, :, None], math.nan)
    keys, values = dense.to(problem.kv_dtype)
    return from_hnd(keys, values, problem.kv_layout)


def _features(problem: Problem, generator: torch.Generator) -> dict[str, Any]:
    features: dict[str, Any] = {}
    heads = problem.num_heads
    if problem.window:
        features["window"] = problem.block_size + 1
    if problem.softcap:
        features["softcap"] = 2.0
    if problem.alibi:
        exponents = torch.linspace(1, 8, heads, dtype=torch.float32, device="cpu")
        features["alibi_slopes"] = 0.5**exponents
    if problem.sinks:
        features["sinks"] = _normal((heads,), generator)
    quantum = 1 / 32 if problem.kv_dtype == torch.int8 else 1.0
    if problem.kv_scales == "float":
        features |= {"k_scale": 0.5 * quantum, "v_scale": 2 * quantum}
    elif problem.kv_scales != "none":
        count = problem.num_kv_heads if problem.kv_scales == "per_head" else 1
        for name in ("k_scale", "v_scale"):
            uniform = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
            features[name] = (0.5 + uniform) * quantum
    return features
