"""A window of the cache: some tokens of one sequence, gathered into scratch memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import KVLayout


def key_blocks(key_cache: Tensor, layout: KVLayout) -> Tensor:
    """The keys as ``[num_blocks, block, kv_heads, ...]``, a view, whatever the layout.

    Packed keys lie in groups of 16 bytes. Where the strides allow, such a group is seen as one
    complex128, so that a copy moves 16 bytes at a time: ``[..., head_dim/x]``, else
    ``[..., head_dim/x, x]``.
    """
    if layout == "NHD":
        return key_cache
    if layout == "HND":
        return key_cache.transpose(1, 2)
    x = key_cache.shape[-1]
    offsets = (key_cache.storage_offset(), *key_cache.stride()[:-1])
    if key_cache.data_ptr() % 16 == 0 and all(offset % x == 0 for offset in offsets):
        key_cache = key_cache.view(torch.complex128).squeeze(-1)
        return key_cache.permute(0, 3, 1, 2)
    return key_cache.permute(0, 3, 1, 2, 4)


def value_blocks(value_cache: Tensor, layout: KVLayout) -> Tensor:
    """The values as ``[num_blocks, block, kv_heads, head_dim]``, a view."""
    if layout == "NHD":
        return value_cache
    if layout == "HND":
        return value_cache.transpose(1, 2)
    return value_cache.permute(0, 3, 1, 2)


def as_bytes(cache: Tensor) -> Tensor:
    """A cache of one-byte elements as plain bytes: not every torch can index fp8."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


class WindowReader:
    """Gathers windows of one cache tensor into one scratch tensor, again and again.

    The copy from the cache changes the layout on its way and is the only one, unless the entries
    have to become another type or to be scaled.

    Parameters
    ----------
    cache : the key or the value cache
    blocks : `key_blocks` or `value_blocks` of its `as_bytes`
    tokens : of the largest window
    dtype : of the result
    scale : float32 ``[kv_heads]``, by which the entries are multiplied
    """

    def __init__(
        self,
        cache: Tensor,
        blocks: Tensor,
        shape: CacheShape,
        tokens: int,
        dtype: torch.dtype,
        scale: Tensor | None,
    ) -> None:
        self._cache_dtype = cache.dtype
        self._blocks = blocks
        size = (tokens, shape.num_kv_heads, shape.head_dim)
        self._scratch = torch.empty(size, dtype=as_bytes(cache[:0]).dtype, device=cache.device)
        self._scale = None if scale is None else scale.unsqueeze(-1)
        self._converted: Tensor | None = None
        if cache.dtype != dtype or scale is not None:
            self._converted = torch.empty(size, dtype=dtype, device=cache.device)

    def read(self, ids: Tensor, start: int, stop: int) -> Tensor:
        """Tokens ``start`` to ``stop`` of a sequence, ``[kv_heads, stop − start, head_dim]``.

        `ids` names the blocks of the whole sequence. The next call overwrites the result.
        """
        blocks, block_size = self._blocks, self._blocks.shape[1]
        first, last = start // block_size, (stop - 1) // block_size
        skip = start - first * block_size
        if first == last:  # no more of the block than is asked for
            blocks, skip = blocks.narrow(1, skip, stop - start), 0
        shape = (last - first + 1, blocks.shape[1])
        gathered = self._scratch[: shape[0] * shape[1]]
        target = _with_elements_of(blocks, torch.unflatten(gathered, 0, shape))
        torch.index_select(blocks, 0, ids[first : last + 1], out=target)
        gathered = gathered[skip : skip + stop - start].view(self._cache_dtype)
        if self._converted is not None:
            gathered = self._converted[: stop - start].copy_(gathered)
            if self._scale is not None:
                gathered.mul_(self._scale)
        return gathered.transpose(0, 1)


def _with_elements_of(blocks: Tensor, scratch: Tensor) -> Tensor:
    """View the scratch in the elements of `blocks`: of 16 bytes, or in groups."""
    if blocks.dtype != scratch.dtype:
        return scratch.view(blocks.dtype)
    return torch.unflatten(scratch, -1, blocks.shape[3:]) if blocks.dim() == 5 else scratch
