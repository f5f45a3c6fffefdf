"""Calls built by hand for the torch path's runner, and the judge of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagedattn.backends.layouts import packing_factor
from pagedattn.backends.protocol import Call, KVLayout
from pagedattn.backends.python_v2.backend import run
from pagedattn.backends.reference import attend

INT_MAX = 2**31 - 1
Road = Callable[[Call], Call]


def by_host_road(call: Call) -> Call:
    """The torch path's road where lengths are host data."""
    run(call)
    return call


def by_device_road(call: Call) -> Call:
    """Its road where they are not, which a CPU can take too."""
    run(replace(call, host_seq_lens=None, host_query_start=None))
    return call


every_road = pytest.mark.parametrize("road", [by_host_road, by_device_road], ids=["host", "device"])


def make_call(
    lengths: Sequence[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: KVLayout = "packed",
    query_lens: Sequence[int] | None = None,
    nobodys_tokens: int = 0,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call over shuffled blocks; results, tails and blocks of nobody hold NaN, pads bad ids."""
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator)  # block 0 is poison
    tables = torch.full((len(lengths), max(counts, default=0) + 2), -1, dtype=torch.int32)
    tables[:, 1::2] = INT_MAX
    poison = 127.0 if kv_dtype == torch.int8 else torch.nan
    pool = torch.full((2, num_blocks, block_size, kv_heads, head_dim), poison)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[row, :count] = mine.int()
        tokens = torch.full((2, count * block_size, kv_heads, head_dim), poison)
        made = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        tokens[:, :length] = (24 * made).round().clamp(-127, 127) if poison == 127 else made
        pool[:, mine] = tokens.view(2, count, block_size, kv_heads, head_dim)
    key_cache, value_cache = arrange(pool.to(kv_dtype), layout)
    starts = None if query_lens is None else [sum(query_lens[:i]) for i in range(len(lengths) + 1)]
    num_tokens = len(lengths) if starts is None else starts[-1] + nobodys_tokens
    query = 2 * torch.randn(num_tokens, heads, head_dim, generator=generator)
    call = Call(
        query=query.to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        out=torch.full((num_tokens, heads, head_dim), torch.nan, dtype=dtype),
        lse=torch.full((num_tokens, heads), torch.nan),
        kv_layout=layout,
        scale=head_dim**-0.5,
        max_seq_len=max(lengths, default=0),
        max_query_len=max(query_lens or [1]),
        query_start_loc=None if starts is None else torch.tensor(starts, dtype=torch.int32),
        host_seq_lens=list(lengths),
        host_query_start=starts,
    )
    return replace(call, **options)


def arrange(pool: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Keys and values ``[2, num_blocks, block, kv_heads, head_dim]`` as caches in `layout`."""
    dtype, moved = pool.dtype, pool.view(torch.uint8) if pool.element_size() == 1 else pool
    keys, values = moved
    if layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    elif layout == "packed":
        x = packing_factor(dtype)
        keys = keys.reshape(*keys.shape[:3], -1, x).permute(0, 2, 3, 1, 4)
        values = values.permute(0, 2, 3, 1)
    return keys.contiguous().view(dtype), values.contiguous().view(dtype)


def truth(call: Call) -> tuple[Tensor, Tensor]:
    """What is right, fp64."""
    out = torch.empty(call.out.shape, dtype=torch.float64)
    lse = torch.empty(call.out.shape[:2], dtype=torch.float64)
    attend(replace(call, out=out, lse=lse))
    return out, lse


def relative_error(found: Tensor, right: Tensor) -> float:
    """The norm of the error over the norm of what is right."""
    return float((found.double() - right).norm() / right.norm().clamp(min=1e-300))


@functools.cache
def limit(dtype: torch.dtype) -> float:
    """Twice the error of torch's own attention over contiguous memory, and one rounding."""
    generator = torch.Generator().manual_seed(1)
    query = (2 * torch.randn(1, 2, 16, 64, generator=generator)).to(dtype)
    keys, values = torch.randn(2, 1, 2, 300, 64, generator=generator).to(dtype)
    right = F.scaled_dot_product_attention(query.double(), keys.double(), values.double())
    if dtype == torch.float16:  # not every torch has it on a CPU; the result's rounding is
        found = F.scaled_dot_product_attention(query.float(), keys.float(), values.float())
    else:
        found = F.scaled_dot_product_attention(query, keys, values)
    return 2 * relative_error(found.to(dtype), right) + torch.finfo(dtype).eps


def assert_right(call: Call, tolerance: float | None = None) -> None:
    """Judge a call's results by the oracle: where NaN and −inf stand exactly, numbers closely."""
    right, right_lse = truth(call)
    assert torch.equal(call.out.isnan(), right.isnan()), "NaN is not where it must be"
    empty = right_lse == -torch.inf
    assert bool((call.out[empty] == 0).all()), "a row that sees no key is not zero"
    known = ~right.isnan()
    error = relative_error(call.out[known], right[known])
    allowed = limit(call.out.dtype) if tolerance is None else tolerance
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"
    if call.lse is not None:
        assert torch.equal(call.lse.isnan(), right_lse.isnan())
        assert torch.equal(call.lse == -torch.inf, empty)
        finite = right_lse.isfinite()
        off = (call.lse.double() - right_lse)[finite].abs() / right_lse[finite].abs().clamp(min=1)
        # torch's 16-bit attention takes a quicker exponential
        close = 2e-6 if call.out.dtype == torch.float32 else 1e-4
        assert not off.numel() or float(off.max()) <= close, f"log-sum-exp off by {off.max():.2e}"
