"""The road for host data: lengths are known, so no key is gathered that no query sees.

`plan` cuts the call into parts; here each part's windows are walked by one core with its own
scratch, and the parts' states are merged when a chunk's last one is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from pagedattn.backends.layouts import CacheShape, read_shape
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.cpu_threads import on_one_core, run_on_cores
from pagedattn.backends.python_v2.plan import Part, plan_sequence
from pagedattn.backends.python_v2.precision import without_gradients
from pagedattn.backends.python_v2.walk import Walk

# below this many keys' bytes the threads cost more than they bring
THREADS_FROM_BYTES = 4 << 20


def run_with_host_lengths(call: Call, lengths: list[int]) -> None:
    """Attention for a call on a CPU.

    Parameters
    ----------
    lengths : what `call.seq_lens` holds
    """
    shape = read_shape(call.value_cache, call.kv_layout)
    starts = call.host_query_start
    if starts is None:
        starts = list(range(len(lengths) + 1))
    if call.query_part != "long":
        _fill(call, slice(starts[-1], None), 0.0, -torch.inf)
    bad = _cannot_be_read(call, shape, lengths)
    parts: list[Part] = []
    for sequence, length in enumerate(lengths):
        tokens = slice(starts[sequence], starts[sequence + 1])
        if not call.serves(tokens.stop - tokens.start):
            continue
        if bad[sequence]:
            _fill(call, tokens, torch.nan, torch.nan)
            continue
        # tokens at positions below 0 see nothing
        first = min(tokens.stop, max(tokens.start, tokens.stop - length))
        _fill(call, slice(tokens.start, first), 0.0, -torch.inf)
        parts += plan_sequence(call, shape, sequence, slice(first, tokens.stop), length)

    def work(parts: Iterator[Part]) -> None:
        with without_gradients(call.out):  # a property of the thread, and this may be a new one
            walk = Walk(call, shape)
            for part in parts:
                walk.run(part)

    key_bytes = 2 * shape.num_kv_heads * shape.head_dim * call.key_cache.dtype.itemsize
    if key_bytes * sum(part.num_keys for part in parts) >= THREADS_FROM_BYTES:
        run_on_cores(work, parts, one_each=call.batch_invariant)
    elif call.batch_invariant:  # as it would be done in a larger batch
        with on_one_core():
            work(iter(parts))
    else:
        work(iter(parts))


def _fill(call: Call, tokens: slice, out: float, lse: float) -> None:
    if tokens.start == tokens.stop:
        return
    call.out[tokens] = out
    if call.lse is not None:
        call.lse[tokens] = lse


def _cannot_be_read(call: Call, shape: CacheShape, lengths: list[int]) -> list[bool]:
    """Of each sequence: is it too long, or does it name a block that is not in the cache?"""
    blocks = [-(-length // shape.block_size) for length in lengths]
    tables = call.block_tables[:, : max(blocks, default=0)]
    outside = (tables < 0) | (tables >= shape.num_blocks)
    slots = torch.arange(tables.shape[1], device="cpu")
    used = slots < torch.tensor(blocks, dtype=torch.int64, device="cpu").unsqueeze(-1)
    if call.window is not None:  # what lies behind it may have been freed
        behind = _blocks_behind(call, shape, lengths, call.window)
        used &= slots >= torch.tensor(behind, dtype=torch.int64, device="cpu").unsqueeze(-1)
    missing = (outside & used).any(dim=1).tolist()
    return [
        bad or count > tables.shape[1] or length > call.max_seq_len
        for bad, count, length in zip(missing, blocks, lengths, strict=True)
    ]


def _blocks_behind(call: Call, shape: CacheShape, lengths: list[int], window: int) -> list[int]:
    """Of each sequence, how many blocks lie behind the window of its first query token."""
    starts = call.host_query_start
    counts = [1] * len(lengths) if starts is None else [b - a for a, b in pairwise(starts)]
    firsts = [max(0, n - count) for n, count in zip(lengths, counts, strict=True)]
    return [max(0, first + 1 - window) // shape.block_size for first in firsts]
