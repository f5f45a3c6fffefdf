"""The query tokens of a call as tiles of equal size, computed where the lengths lie.

A tile is up to `rows` consecutive query tokens of one sequence. How many tiles there are is only
bounded on the host (there is no synchronisation); those beyond the last are dead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import SHORT_QUERIES, Call

# query tokens a tile: what shares one gather of the keys
TILE_TOKENS = 64
# with batch_invariant a tile's size must not follow the longest of the other requests
INVARIANT_TILE_TOKENS = 16


@dataclass(frozen=True)
class Tiles:
    """Where each tile's query tokens are; all int64, on the call's device."""

    sequence: Tensor  # [tiles]: the row of the block tables
    token: Tensor  # [tiles, rows]: into the call's query; num_tokens where there is none
    position: Tensor  # [tiles, rows]: in the sequence; −1 where there is no token
    rows: int
    start: int = 0  # of these tiles among the call's

    def chunk(self, start: int, stop: int) -> Tiles:
        part = slice(start, stop)
        return Tiles(self.sequence[part], self.token[part], self.position[part], self.rows, start)

    def __len__(self) -> int:
        return self.sequence.shape[0]


def served(call: Call, starts: Tensor) -> Tensor:
    """Of each sequence, whether this backend is to serve it; bool ``[num_seqs]``."""
    return (starts.diff() <= SHORT_QUERIES) == (call.query_part == "short")


def make_tiles(call: Call, lengths: Tensor) -> Tiles:
    """Cut a call's query into tiles.

    Parameters
    ----------
    lengths : int64 ``[num_seqs]``, sanitised
    """
    num_seqs, device = lengths.shape[0], lengths.device
    if call.query_start_loc is None:  # a token a sequence
        each = torch.arange(num_seqs, device=device)
        return Tiles(each, each.unsqueeze(1), lengths.unsqueeze(1) - 1, 1)
    num_tokens = call.query.shape[0]
    rows = min(TILE_TOKENS, max(1, call.max_query_len))
    if call.batch_invariant:
        rows = INVARIANT_TILE_TOKENS
    most = min(num_seqs * -(-call.max_query_len // rows), num_tokens // rows + num_seqs)
    starts = call.query_start_loc.long()
    # a sequence with more than the call says is bad, and must not take the others' tiles
    counts = starts.diff().clamp_(min=0, max=call.max_query_len)
    if call.query_part != "all":
        counts = counts.where(served(call, starts), torch.zeros_like(counts))
    tiles_of = (counts + rows - 1).div(rows, rounding_mode="floor")
    ends = tiles_of.cumsum(0)
    tile = torch.arange(most, device=device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=num_seqs - 1)
    first = (tile - (ends - tiles_of)[sequence]) * rows
    offset = first.unsqueeze(1) + torch.arange(rows, device=device)  # in the sequence's tokens
    token = starts[sequence].unsqueeze(1) + offset
    count = counts[sequence].unsqueeze(1)
    absent = (offset >= count) | (token < 0) | (token >= num_tokens)
    position = lengths[sequence].unsqueeze(1) - count + offset
    return Tiles(
        sequence, token.masked_fill(absent, num_tokens), position.masked_fill(absent, -1), rows
    )


@dataclass(frozen=True)
class Lengths:
    """The lengths and tables of a call made safe, on its device."""

    tokens: Tensor  # int64 [num_seqs]; 0 where the given one is negative or wrong
    bad: Tensor  # bool [num_seqs]: longer than the call says, or a block is not in the cache
    tables: Tensor  # int64 [num_seqs, width]: every entry in the cache


def sanitise(call: Call, shape: CacheShape) -> Lengths:
    """Make lengths and tables safe to follow; nothing outside the cache is named afterwards."""
    width = call.block_tables.shape[1]
    lengths = call.seq_lens.long().clamp(min=0)
    too_long = lengths > min(call.max_seq_len, width * shape.block_size)
    tables = call.block_tables.long()
    outside = (tables < 0) | (tables >= shape.num_blocks)
    slot_start = torch.arange(width, device=tables.device) * shape.block_size
    followed = slot_start < lengths.unsqueeze(1)
    if call.window is not None:  # what lies wholly behind it may have been freed
        counts = 1 if call.query_start_loc is None else call.query_start_loc.long().diff()
        oldest = (lengths - counts).clamp(min=0) + 1 - call.window
        followed &= slot_start + shape.block_size > oldest.unsqueeze(1)
    bad = (outside & followed).any(dim=1) | too_long
    if call.query_start_loc is not None:
        bad |= call.query_start_loc.long().diff() > call.max_query_len
    # block 0 stands in for whatever must not be followed
    return Lengths(lengths.masked_fill(bad, 0), bad, tables.masked_fill(outside, 0))
