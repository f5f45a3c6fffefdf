"""From a `Call` to kernel launches: which kernels, how many splits, what goes where."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.backends.protocol import SHORT_QUERIES, Call, Problem, keep_plan
from pagedattn.backends.triton import overlap, tuning
from pagedattn.backends.triton.fast_launch import Launch, Pointers
from pagedattn.backends.triton.kernel_cache import KernelCache

#: tokens of a split in the batch-invariant mode: fixed, so that a row's splits are its own
INVARIANT_TOKENS = 2048
MAX_SPLITS = 65535  # of a grid's second dimension


class Splits(NamedTuple):
    number: int
    min_tokens: int  # the fewest that a split walks


class Plan(NamedTuple):
    """What a call launches, for all calls of the same shapes, options and alignment."""

    decode: Launch | None = None
    partial: int = 0  # floats of the splits' states, which the merge reads; 0 without a merge
    merge: Launch | None = None
    prefill: Launch | None = None


class TritonRunner:
    """Runs calls of one class of problems."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._short = tuning.decode_queries(problem.group)
        on_gpu = problem.device_type == "cuda"
        self._device = torch.device(problem.device).index if on_gpu else None
        self._overlap = on_gpu and overlap.usable(problem.device)
        self._kernels = KernelCache(problem, self._overlap)

    def __call__(self, call: Call) -> None:
        # of torch.cuda.current_device() the part that asks: with tensors there it is initialised
        if self._device is None or self._device == torch._C._cuda_getDevice():
            self._run(call)
            return
        with torch.cuda.device(self._device):
            self._run(call)

    def _run(self, call: Call) -> None:
        addresses = call.addresses()
        misaligned = (addresses[0] | addresses[1] | addresses[2] | addresses[6]) % 16
        plans = call.plans
        key = (self, call.max_seq_len, call.max_query_len, call.query_part)
        plan: Plan | None = None if plans is None or misaligned else plans.get(key)
        if plan is None:
            if call.seq_lens.shape[0] == 0:
                _no_sequences(call)
                return
            plan = self._plan(call)
            # where the host knows the queries' lengths the plan is these lengths'
            if not misaligned and call.host_query_start is None:
                keep_plan(call, key, plan)
        device = self._device
        # the interpreter has none, and takes no addresses
        stream = 0 if device is None else torch._C._cuda_getCurrentRawStream(device)
        _launch(plan, call, addresses, stream)

    def _plan(self, call: Call) -> Plan:
        plan = Plan()
        if call.query_part == "long":
            return plan._replace(prefill=self._prefill(call, SHORT_QUERIES))
        if call.query_start_loc is None:
            return self._decode(plan, call, 1)
        if self._may_decode(call):
            plan = self._decode(plan, call, min(self._short, call.max_query_len))
        if call.max_query_len > self._short:
            plan = plan._replace(prefill=self._prefill(call, self._short))
        return plan

    def _may_decode(self, call: Call) -> bool:
        """Whether a sequence may have few query tokens, or a token no sequence at all."""
        starts = call.host_query_start
        if starts is None or starts[-1] < call.query.shape[0]:
            return True
        return any(0 < end - start <= self._short for start, end in pairwise(starts))

    def _decode(self, plan: Plan, call: Call, queries: int) -> Plan:
        num_seqs = call.seq_lens.shape[0]
        work = num_seqs * self._problem.num_kv_heads * call.max_seq_len
        if call.batch_invariant:  # the same kernels whatever the batch
            work = sys.maxsize
            queries = self._short if call.query_start_loc is not None else 1
        num_rows = tuning.rows(self._problem.group, queries)
        tiling = tuning.decode_tiling(self._problem, num_rows, work)
        splits = self._splits(call, tiling, num_seqs)
        # tokens of no sequence are the merge's to write, so with those there has to be one
        merged = splits.number > 1 or call.query_start_loc is not None or call.batch_invariant
        decode = Launch(
            self._kernels.decode(call, tiling, num_rows, queries, merged),
            (self._problem.num_kv_heads, splits.number, num_seqs),
            (*_numbers(call), *splits, self._short),
        )
        if not merged:
            return plan._replace(decode=decode)
        num_tokens, num_heads, head_dim = call.query.shape
        partial = splits.number * num_tokens * num_heads * (head_dim + 1)
        merge = self._merge(call, splits, tiling.tile)
        return plan._replace(decode=decode, partial=partial, merge=merge)

    def _merge(self, call: Call, splits: Splits, tile: int) -> Launch:
        num_tokens, num_heads, head_dim = call.query.shape
        out = call.out
        lanes, dims = tuning.merge_tile(splits.number, head_dim, call.batch_invariant)
        return Launch(
            self._kernels.merge(lanes, dims, tile, call.query_start_loc is not None),
            (num_tokens, num_heads, -(-head_dim // dims)),
            (
                call.seq_lens.shape[0], num_tokens, call.max_seq_len, _window(call),
                out.stride(0), out.stride(1), *splits, self._short, call.max_query_len,
            ),
        )  # fmt: skip

    def _prefill(self, call: Call, short: int) -> Launch:
        """Sequences of more than `short` query tokens."""
        queries = tuning.prefill_queries(self._problem)
        num_seqs = call.seq_lens.shape[0]
        tiles = call.query.shape[0] // queries + num_seqs + 1
        return Launch(
            self._kernels.prefill(call, tuning.prefill_tiling(self._problem), queries),
            (self._problem.num_kv_heads, tiles, 1),
            (*_numbers(call), num_seqs, short, call.max_query_len),
        )

    def _splits(self, call: Call, tiling: tuning.Tiling, num_seqs: int) -> Splits:
        """From bounds that the host knows: no length is read."""
        tokens = call.max_seq_len
        if call.batch_invariant:
            return Splits(max(1, -(-tokens // INVARIANT_TOKENS)), INVARIANT_TOKENS)
        if call.window is not None:
            tokens = min(tokens, call.window + call.max_query_len)
        if call.num_splits is not None:
            most = max(1, -(-tokens // tiling.tile))
            return Splits(min(call.num_splits, most, MAX_SPLITS), tiling.tile)
        groups = num_seqs * self._problem.num_kv_heads
        count = tuning.split_count(groups, tokens, self._problem.device, tiling)
        return Splits(count, tiling.min_tokens)


def _no_sequences(call: Call) -> None:
    """Every token is one of no sequence, and those are not a long part's."""
    if call.query_part == "long":
        return
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(-math.inf)


def _launch(plan: Plan, call: Call, addresses: tuple[int, ...], stream: int) -> None:
    decode, prefill = plan.decode, plan.prefill
    if plan.merge is not None:
        _launch_merged(plan, call, addresses, stream)
    elif decode is not None and not decode.again(stream, addresses):
        decode(_pointers(call, call.out))
    if prefill is not None and not prefill.again(stream, addresses):
        prefill(_pointers(call, call.out))


def _launch_merged(plan: Plan, call: Call, addresses: tuple[int, ...], stream: int) -> None:
    decode, partial, merge, _ = plan
    assert decode is not None
    assert merge is not None
    # of this call, as the allocator keeps streams apart
    states = torch.empty(partial, dtype=torch.float32, device=call.query.device)
    first = states.data_ptr()
    if not decode.again(stream, (*addresses[:6], first, *addresses[7:])):
        decode(_pointers(call, states))
    _, _, _, _, lengths, starts, out, lse, _, sinks, _, _ = addresses
    if not merge.again(stream, (first, lengths, starts, out, lse, sinks)):
        merge((states, call.seq_lens, call.query_start_loc, call.out, call.lse, call.sinks))


def _pointers(call: Call, out: Tensor) -> Pointers:
    """What the decode and the prefill kernel take first."""
    k_scale, v_scale = call.k_scale, call.v_scale
    return (
        call.query,
        call.key_cache,
        call.value_cache,
        call.block_tables,
        call.seq_lens,
        call.query_start_loc,
        out,
        call.lse,
        call.alibi_slopes,
        call.sinks,
        k_scale if isinstance(k_scale, Tensor) else None,
        v_scale if isinstance(v_scale, Tensor) else None,
    )


def _numbers(call: Call) -> tuple[float, ...]:
    """What the two take next."""
    query_strides, out_strides = call.query.stride(), call.out.stride()
    return (
        call.scale * call.k_scale if isinstance(call.k_scale, float) else call.scale,
        1.0 if call.softcap is None else call.softcap,
        call.v_scale if isinstance(call.v_scale, float) else 1.0,
        call.query.shape[0],
        call.key_cache.shape[0],
        call.max_seq_len,
        _window(call),
        call.block_tables.stride(0),
        *query_strides[:2],
        *out_strides[:2],
    )


def _window(call: Call) -> int:
    """0 for none; the kernels' numbers are of 32 bits, and no sequence is as long."""
    return 0 if call.window is None else min(call.window, 2**31 - 1)
