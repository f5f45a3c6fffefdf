"""One core's walk over the key windows of the parts that fall to it."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.partial import (
    fused_partial,
    fused_works,
    matmul_partial,
    score_bias,
)
from pagedattn.backends.python_v2.plan import Chunk, Part, window_tokens
from pagedattn.backends.python_v2.running import RunningState, State
from pagedattn.backends.python_v2.sinks import add_sinks
from pagedattn.backends.python_v2.window import WindowReader, as_bytes, key_blocks, value_blocks


class Walk:
    """The scratch memory and the constants of one core's work on one call."""

    def __init__(self, call: Call, shape: CacheShape) -> None:
        self._call = call
        self._shape = shape
        k_factor, k_heads = _split_scale(call.k_scale)
        self._v_factor, v_heads = _split_scale(call.v_scale)
        self._scale = call.scale * k_factor
        narrow = call.key_cache.dtype == call.query.dtype and k_heads is None and v_heads is None
        dtype = call.query.dtype if narrow else torch.float32
        self._fused = call.softcap is None and fused_works(dtype)
        if not self._fused:
            dtype = torch.float32
        self._dtype = dtype
        tokens = window_tokens(call, shape, call.max_seq_len)
        keys, values = as_bytes(call.key_cache), as_bytes(call.value_cache)
        self._keys = WindowReader(
            call.key_cache, key_blocks(keys, call.kv_layout), shape, tokens, dtype, k_heads
        )
        self._values = WindowReader(
            call.value_cache, value_blocks(values, call.kv_layout), shape, tokens, dtype, v_heads
        )

    def run(self, part: Part) -> None:
        """Walk one part, and write the rows of its chunk if it was the last of them."""
        chunk = part.chunk
        query = self._rows(chunk)
        ids = self._call.block_tables[chunk.sequence]
        state = RunningState()
        for start, stop in part.windows:
            state.add(*self._partial(chunk, query, ids, start, stop))
        whole = chunk.deliver(part.index, state.total())
        if whole is not None:
            self._write(chunk, whole)

    def _rows(self, chunk: Chunk) -> Tensor:
        """The chunk's queries as ``[1, kv_heads, tokens × group, head_dim]``."""
        tokens = self._call.query[chunk.tokens].to(self._dtype)
        by_head = torch.unflatten(tokens, 1, (self._shape.num_kv_heads, -1)).transpose(0, 1)
        return by_head.flatten(1, 2).unsqueeze(0)  # no copy if there is one token

    def _partial(self, chunk: Chunk, query: Tensor, ids: Tensor, start: int, stop: int) -> State:
        bias = self._bias(chunk, query.shape[2], start, stop)
        first = start // self._shape.block_size
        ids = ids[first : -(-stop // self._shape.block_size)]
        skip = start - first * self._shape.block_size
        keys = self._keys.read(ids, skip, stop - start)
        values = self._values.read(ids, skip, stop - start)
        if self._fused:
            out, lse = fused_partial(query, keys, values, self._scale, bias)
        else:
            out, lse = matmul_partial(query, keys, values, self._scale, bias, self._call.softcap)
        if bias is not None:  # a row that sees none of these keys
            unseen = (bias == -torch.inf).all(dim=-1)
            lse = lse.masked_fill(unseen, -torch.inf)
            out = out.masked_fill(unseen.unsqueeze(-1), 0.0)
        return out, lse

    def _bias(self, chunk: Chunk, rows: int, start: int, stop: int) -> Tensor | None:
        """What is added to the scores of a window; None where every row sees all of it."""
        call = self._call
        last = chunk.position + chunk.tokens.stop - chunk.tokens.start - 1
        all_seen = stop - 1 <= chunk.position
        if call.window is not None:
            all_seen = all_seen and start > last - call.window
        if all_seen and call.alibi_slopes is None:
            return None
        group = call.query.shape[1] // self._shape.num_kv_heads
        positions = torch.arange(chunk.position, last + 1, device="cpu").repeat_interleave(group)
        slopes = None
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes.view(-1, group).repeat(1, rows // group)
        keys = torch.arange(start, stop, device="cpu")
        return score_bias(positions, keys, call.window, slopes)

    def _write(self, chunk: Chunk, state: State) -> None:
        """Write a chunk's state to the call's results."""
        out, lse = state[0].squeeze(0), state[1].squeeze(0)
        tokens = chunk.tokens.stop - chunk.tokens.start
        out = torch.unflatten(out, 1, (tokens, -1)).transpose(0, 1).flatten(1, 2)  # [tokens, H, D]
        lse = torch.unflatten(lse, 1, (tokens, -1)).transpose(0, 1).flatten(1, 2)  # [tokens, H]
        if self._v_factor != 1.0:
            out = out.float() * self._v_factor
        if self._call.sinks is not None:
            out, lse = add_sinks(out.float(), lse, self._call.sinks)
        self._call.out[chunk.tokens] = out.to(self._call.out.dtype)
        if self._call.lse is not None:
            self._call.lse[chunk.tokens] = lse


def _split_scale(scale: float | Tensor | None) -> tuple[float, Tensor | None]:
    """A KV scale as the factor that all heads share, and the factors that they do not."""
    if scale is None:
        return 1.0, None
    if isinstance(scale, Tensor):
        return (1.0, scale) if scale.numel() > 1 else (float(scale), None)
    return scale, None
