"""The cache write in plain torch: no synchronisation, nothing written outside the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.layouts import packing_factor, read_shape
from pagedattn.backends.protocol import KVLayout, Write


def write(w: Write) -> None:
    """Write the tokens to their slots.

    The caches' views of single tokens, ``[.., kv_heads, head_dim]``, are indexed by (block,
    offset), whatever the strides.
    """
    shape, slots, layout = (
        read_shape(w.value_cache, w.kv_layout),
        w.slot_mapping.long(),
        w.kv_layout,
    )
    key = quantise(w.key, w.key_cache.dtype, w.k_scale)
    value = quantise(w.value, w.value_cache.dtype, w.v_scale)
    if layout == "packed":
        key = key.unflatten(-1, (-1, packing_factor(w.key_cache.dtype)))  # [T, kv, D/x, x]
    # Skipping without a synchronisation: a skipped token writes what another token writes to
    # that token's slot, so that equal values meet there.
    slot_count = shape.num_blocks * shape.block_size
    valid = (slots >= 0) & (slots < slot_count)
    stand_in = valid.to(torch.uint8).argmax()  # the first valid token, or 0 if there is none
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), stand_in)
    target = slots[source].clamp(0, slot_count - 1)
    block, offset = target // shape.block_size, target % shape.block_size
    any_valid = valid.any()
    for cache, new in (
        (_by_token(w.key_cache, layout), key),
        (_by_token(w.value_cache, layout), value),
    ):
        old = cache[block, offset]
        # with no valid token at all, slot 0 gets what it already holds
        cache[block, offset] = torch.where(any_valid, _bytes(new)[source], old)


def _by_token(cache: Tensor, layout: KVLayout) -> Tensor:
    """A view indexed by (block, offset) that gives ``[kv_heads, ...]`` of one token."""
    if layout == "packed":
        return _bytes(cache).movedim(3, 1)  # keys [n, bs, kv, D/x, x], values [n, bs, kv, D]
    return _bytes(cache) if layout == "NHD" else _bytes(cache).transpose(1, 2)


def _bytes(t: Tensor) -> Tensor:
    """fp8 cannot be indexed everywhere; its bytes can."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def quantise(t: Tensor, dtype: torch.dtype, scale: float | Tensor | None) -> Tensor:
    """``t / scale`` in `dtype`, saturated where the type has less range than `t`."""
    if scale is None and t.dtype == dtype:
        return t
    scaled = t.float()
    if isinstance(scale, Tensor):
        scaled = scaled / scale.float().reshape(-1, 1)
    elif scale is not None:
        scaled = scaled / scale
    if dtype == torch.int8:
        return scaled.round().clamp(-127, 127).to(dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        scaled = scaled.clamp(-limit, limit)
    return scaled.to(dtype)
