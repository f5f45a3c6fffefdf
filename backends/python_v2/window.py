"""A window of the cache: some tokens of one sequence, gathered into scratch memory."""

from __future__ import annotations

from typing import NamedTuple

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


class _Views(NamedTuple):
    """The views that one shape of window needs; making them costs as much as a small gather."""

    blocks: Tensor  # of the cache
    target: Tensor  # of the scratch, in the elements of `blocks`
    gathered: Tensor  # [tokens, kv_heads, head_dim]
    converted: Tensor | None  # likewise, in another dtype
    result: Tensor  # [1, kv_heads, tokens, head_dim]


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
        self._views: dict[tuple[int, int, int], _Views] = {}
        self._converted: Tensor | None = None
        if cache.dtype != dtype or scale is not None:
            self._converted = torch.empty(size, dtype=dtype, device=cache.device)

    def read(self, ids: Tensor, skip: int, tokens: int) -> Tensor:
        """Some tokens of a sequence, ``[1, kv_heads, tokens, head_dim]``.

        Parameters
        ----------
        ids : the blocks that hold them
        skip : how many tokens of the first block come before them

        The next call overwrites the result.
        """
        key = (ids.shape[0], skip, tokens)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._make_views(*key)
        torch.index_select(views.blocks, 0, ids, out=views.target)
        if views.converted is not None:
            views.converted.copy_(views.gathered)
            if self._scale is not None:
                views.converted.mul_(self._scale)
        return views.result

    def _make_views(self, count: int, skip: int, tokens: int) -> _Views:
        blocks = self._blocks
        if count == 1:  # no more of the block than is asked for
            blocks, skip = blocks.narrow(1, skip, tokens), 0
        shape = (count, blocks.shape[1])
        scratch = self._scratch[: count * blocks.shape[1]]
        target = _with_elements_of(blocks, torch.unflatten(scratch, 0, shape))
        gathered = scratch[skip : skip + tokens].view(self._cache_dtype)
        converted = None if self._converted is None else self._converted[:tokens]
        result = gathered if converted is None else converted
        result = result.transpose(0, 1).unsqueeze(0)
        return _Views(blocks, target, gathered, converted, result)


def _with_elements_of(blocks: Tensor, scratch: Tensor) -> Tensor:
    """View the scratch in the elements of `blocks`: of 16 bytes, or in groups."""
    if blocks.dtype != scratch.dtype:
        return scratch.view(blocks.dtype)
    return torch.unflatten(scratch, -1, blocks.shape[3:]) if blocks.dim() == 5 else scratch
