"""The walk of some tiles over the keys that they see, all tiles at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.device_window import BlockGather
from pagedattn.backends.python_v2.products import grouped_product
from pagedattn.backends.python_v2.running import State, StateStack
from pagedattn.backends.python_v2.tiles import Tiles

# states kept before they are merged: a merge is some launches, a state some memory
KEEP_STATES = 64
KEEP_BYTES = 32 << 20
# from so many keys on, those of a single tile are summed in pieces
LONG_TOKENS = 4096


@dataclass(frozen=True)
class Rows:
    """The rows of some tiles, and the blocks that hold their keys."""

    query: Tensor  # [kv_heads, tiles, rows × group, head_dim]
    position: Tensor  # int64 [tiles, rows]: of each row's token; below 0 it sees nothing
    length: Tensor  # int64 [tiles]
    tables: Tensor  # int64 [tiles, width]
    first_block: Tensor  # int64 [tiles]: the first of which a row sees a key


class DeviceWalk:
    """What is the same for all tiles of a call.

    Parameters
    ----------
    window_blocks : in one window
    span_blocks : in how many blocks, at most, lie the keys that a tile sees
    """

    def __init__(self, call: Call, shape: CacheShape, window_blocks: int, span_blocks: int) -> None:
        self._call = call
        self._shape = shape
        self._window_blocks = window_blocks
        self._span_blocks = span_blocks
        self._keys = BlockGather(call.key_cache, "key", call.kv_layout, shape)
        self._values = BlockGather(call.value_cache, "value", call.kv_layout, shape)
        self._device = call.query.device

    def run(self, tiles: Tiles, lengths: Tensor, tables: Tensor) -> State:
        """The state of each row of `tiles`, float32.

        Parameters
        ----------
        lengths : int64 ``[tiles]``
        tables : int64 ``[tiles, width]``, every entry in the cache
        """
        rows = self._rows(tiles, lengths, tables)
        if self._shape.num_blocks == 0 or tables.shape[1] == 0:  # nothing can be gathered
            out = torch.zeros(rows.query.shape, dtype=torch.float32, device=self._device)
            return out, torch.full_like(out[..., 0], -torch.inf)
        pairwise = self._call.batch_invariant  # a longer batch must not regroup the sum
        state = StateStack(2 if pairwise else KEEP_STATES, KEEP_BYTES)
        state.add(*self._last_block(rows))
        for start in range(0, self._span_blocks, self._window_blocks):
            stop = start + self._window_blocks
            if not self._call.batch_invariant:
                stop = min(stop, self._span_blocks)
            state.add(*self._full_blocks(rows, start, stop))
        out, lse = state.total()
        return out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse

    def _rows(self, tiles: Tiles, lengths: Tensor, tables: Tensor) -> Rows:
        tokens = tiles.token.clamp(max=self._call.query.shape[0] - 1)
        query = self._call.query[tokens]  # [tiles, rows, H, D]
        query = torch.unflatten(query, 2, (self._shape.num_kv_heads, -1)).permute(2, 0, 1, 3, 4)
        first = torch.zeros_like(lengths)
        if self._call.window is not None:
            # rows ascend, and a row that does not exist stands at −1: take the first one
            oldest = tiles.position[:, 0] - self._call.window + 1
            first = oldest.clamp(min=0).div(self._shape.block_size, rounding_mode="floor")
        return Rows(query.flatten(2, 3), tiles.position, lengths, tables, first)

    def _full_blocks(self, rows: Rows, start: int, stop: int) -> State:
        """The state over the full blocks among `start` to `stop`, from each first block on."""
        size = self._shape.block_size
        slots = torch.arange(start, stop, device=self._device) + rows.first_block.unsqueeze(1)
        full = rows.length.div(size, rounding_mode="floor").unsqueeze(1)
        # what lies beyond must be finite memory, which only full blocks surely are. Where a
        # sequence has none, the whole state is empty and its output means nothing
        slots = torch.minimum(slots, full - 1).clamp_(min=0)
        within = torch.arange(start * size, stop * size, device=self._device)
        positions = within + rows.first_block.unsqueeze(1) * size
        hidden = positions >= full * size
        blocks = rows.tables.gather(1, slots)
        return self._attend(
            rows, self._keys.gather(blocks), self._values.gather(blocks), positions, hidden
        )

    def _last_block(self, rows: Rows) -> State:
        """The state over the last block, where that is not full."""
        size = self._shape.block_size
        last = rows.length.div(size, rounding_mode="floor").unsqueeze(1)
        blocks = rows.tables.gather(1, last.clamp(max=rows.tables.shape[1] - 1))
        positions = last * size + torch.arange(size, device=self._device)
        hidden = positions >= rows.length.unsqueeze(1)
        values = self._values.gather(blocks).to(rows.query.dtype)
        values = values.masked_fill(hidden[None, :, :, None], 0)
        return self._attend(rows, self._keys.gather(blocks), values, positions, hidden)

    def _attend(
        self, rows: Rows, keys: Tensor, values: Tensor, positions: Tensor, hidden: Tensor
    ) -> State:
        """The state of all rows over one window.

        Parameters
        ----------
        keys, values : ``[kv_heads, tiles, tokens, head_dim]`` in the cache's dtype
        positions : int64 ``[tiles, tokens]``, of the keys
        hidden : bool ``[tiles, tokens]``, keys that no row sees
        """
        query = rows.query
        scores = grouped_product(query, keys.to(query.dtype).transpose(2, 3))
        self._finish_scores(scores, rows, positions, hidden)
        # a finite stand-in for the maximum of a row that sees nothing: −inf − −inf is NaN
        highest = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        out = weighted_sum(weights.to(query.dtype), values.to(query.dtype)).div_(total)
        v_scale = self._call.v_scale
        if v_scale is not None:
            out.mul_(by_kv_head(v_scale))
        return out, total.log_().add_(highest).squeeze(-1)

    def _finish_scores(self, scores: Tensor, rows: Rows, positions: Tensor, hidden: Tensor) -> None:
        """Products to logits, in place: scale, soft cap, ALiBi, and −inf where nothing is seen."""
        call = self._call
        scores.mul_(call.scale)
        if call.k_scale is not None:
            scores.mul_(by_kv_head(call.k_scale))
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        distance = positions.unsqueeze(1) - rows.position.unsqueeze(2)  # [tiles, rows, tokens]
        by_row = torch.unflatten(
            scores, 2, (rows.position.shape[1], -1)
        )  # [KV, tiles, rows, G, tokens]
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes.view(self._shape.num_kv_heads, 1, 1, -1, 1)
            by_row.add_(slopes * distance.unsqueeze(2))
        unseen = hidden.unsqueeze(1) | (distance > 0)
        if call.window is not None:
            unseen = unseen | (distance <= -call.window)
        by_row.masked_fill_(unseen.unsqueeze(2), -torch.inf)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` in fp32, ``[kv_heads, tiles, rows, head_dim]``.

    The products' libraries give an entry of the batch to few multiprocessors, however many keys
    it sums over. So the keys of a single tile are cut into pieces that are entries of their own.
    """
    heads, tiles, rows, tokens = weights.shape
    pieces = next((n for n in (16, 8, 4, 2) if tokens % (8 * n) == 0), 1)
    if tiles > 1 or pieces == 1 or tokens < LONG_TOKENS:
        return grouped_product(weights, values)
    weights = weights.view(heads, rows, pieces, -1).transpose(1, 2)
    values = torch.unflatten(values.squeeze(1), 1, (pieces, -1))
    return grouped_product(weights, values).sum(1, True)


def by_kv_head(scale: float | Tensor) -> float | Tensor:
    """A KV scale, shaped to multiply ``[kv_heads, tiles, rows, n]``."""
    return scale.view(-1, 1, 1, 1) if isinstance(scale, Tensor) else scale
