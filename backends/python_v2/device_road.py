"""The road without host lengths: nothing here waits for the device.

All shapes follow from `max_seq_len`, `max_query_len` and the tables' width, so that a call can be
captured in a CUDA graph and replayed with other lengths and tables. A tile's keys are walked in
windows of whole, full blocks; the keys of the last, partly filled block are a window of their
own, since only there the cache holds memory that was never written (0 × NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.backends.layouts import CacheShape, read_shape
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.device_walk import DeviceWalk
from pagedattn.backends.python_v2.results import Results
from pagedattn.backends.python_v2.tiles import make_tiles, sanitise

# of one window: gathered keys and values, and fp32 scores. Many small windows would cost
# launches, and a large one memory and the second-level cache
WINDOW_BYTES = {"cpu": 4 << 20}
WINDOW_BYTES_ON_DEVICE = 160 << 20
SCORE_BYTES_ON_DEVICE = 32 << 20


@dataclass(frozen=True)
class WindowShape:
    """How much one window holds."""

    tiles: int
    blocks: int


def window_shape(call: Call, shape: CacheShape, num_tiles: int, rows: int) -> WindowShape:
    """Tiles and blocks of a window, such that its keys, values and scores are bounded.

    With `batch_invariant` it depends on nothing but the problem and the number of splits.
    """
    device = call.query.device.type
    itemsize = call.query.dtype.itemsize
    block_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.block_size * itemsize
    score_bytes = 4 * call.query.shape[1] * rows * shape.block_size
    most = min(
        WINDOW_BYTES.get(device, WINDOW_BYTES_ON_DEVICE) // block_bytes,
        SCORE_BYTES_ON_DEVICE // score_bytes,
    )
    most = max(1, most)
    span = span_blocks(call, shape, rows)
    blocks = most if call.batch_invariant else min(most, max(1, span))
    if call.num_splits is not None:
        whole = most if call.batch_invariant else span
        blocks = max(1, min(blocks, whole // call.num_splits))
    if call.batch_invariant:
        return WindowShape(1, blocks)
    return WindowShape(max(1, min(num_tiles, most // blocks)), blocks)


def span_blocks(call: Call, shape: CacheShape, rows: int) -> int:
    """In how many blocks, at most, lie the keys that a tile sees."""
    tokens = call.max_seq_len
    if call.window is not None:
        # a window that starts at the last token of a block reaches into one block more
        tokens = min(tokens, call.window + rows - 1 + shape.block_size - 1)
    return min(-(-tokens // shape.block_size), call.block_tables.shape[1])


def run_without_host_lengths(call: Call) -> None:
    """Attention for a call whose lengths are device data."""
    shape = read_shape(call.value_cache, call.kv_layout)
    safe = sanitise(call, shape)
    tiles = make_tiles(call, safe.tokens)
    size = window_shape(call, shape, len(tiles), tiles.rows)
    walk = DeviceWalk(call, shape, size.blocks, span_blocks(call, shape, tiles.rows))
    results = Results(call)
    for start in range(0, len(tiles), size.tiles):
        chunk = tiles.chunk(start, start + size.tiles)
        out, lse = walk.run(chunk, safe.tokens[chunk.sequence], safe.tables[chunk.sequence])
        results.write(chunk, out, lse, safe.bad[chunk.sequence])
    results.finish()
