"""How a paged cache is laid out, and views of it that all layouts share.

============ ================================================== ================================
Layout       Key                                                Value
============ ================================================== ================================
``packed``   ``[num_blocks, kv_heads, head_dim/x, block, x]``,  ``[num_blocks, kv_heads,
             x = 16 / itemsize                                  head_dim, block]``
``NHD``      ``[num_blocks, block, kv_heads, head_dim]``        same
``HND``      ``[num_blocks, kv_heads, block, head_dim]``        same
============ ================================================== ================================
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.backends.protocol import KVLayout

LAYOUTS: tuple[KVLayout, ...] = ("packed", "NHD", "HND")


class CacheShape(NamedTuple):
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int


def packing_factor(dtype: torch.dtype) -> int:
    """x: how many elements of one key lie side by side in the packed layout (16 bytes)."""
    return 16 // dtype.itemsize


def cache_shapes(
    shape: CacheShape, dtype: torch.dtype, layout: KVLayout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the key and the value cache in `layout`."""
    blocks, heads, size, dim = shape
    if layout == "NHD":
        return (blocks, size, heads, dim), (blocks, size, heads, dim)
    if layout == "HND":
        return (blocks, heads, size, dim), (blocks, heads, size, dim)
    x = packing_factor(dtype)
    return (blocks, heads, dim // x, size, x), (blocks, heads, dim, size)


def read_shape(value_cache: Tensor, layout: KVLayout) -> CacheShape:
    """The four sizes, from a value cache of the right rank."""
    n, a, b, c = value_cache.shape
    if layout == "NHD":
        return CacheShape(n, b, a, c)
    if layout == "HND":
        return CacheShape(n, a, b, c)
    return CacheShape(n, a, c, b)


def key_as_hnd(key_cache: Tensor, layout: KVLayout) -> Tensor:
    """A view of the keys as ``[num_blocks, kv_heads, block, head_dim]``.

    Packed keys have no such view with four dimensions; they become
    ``[num_blocks, kv_heads, block, head_dim/x, x]``.
    """
    if layout == "NHD":
        return key_cache.transpose(1, 2)
    if layout == "HND":
        return key_cache
    return key_cache.transpose(2, 3)


def value_as_hnd(value_cache: Tensor, layout: KVLayout) -> Tensor:
    """A view of the values as ``[num_blocks, kv_heads, block, head_dim]``."""
    if layout == "NHD":
        return value_cache.transpose(1, 2)
    if layout == "HND":
        return value_cache
    return value_cache.transpose(2, 3)


def from_hnd(keys: Tensor, values: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Dense caches ``[num_blocks, kv_heads, block, head_dim]`` rearranged into `layout`."""
    if layout == "HND":
        return keys, values
    if layout == "NHD":
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    groups = keys.unflatten(-1, (-1, packing_factor(keys.dtype)))  # [n, kv, bs, D/x, x]
    return groups.transpose(2, 3).contiguous(), values.transpose(2, 3).contiguous()
