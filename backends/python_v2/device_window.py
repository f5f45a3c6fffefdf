"""Windows of whole blocks of many sequences at once, gathered for batched products."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import KVLayout
from pagedattn.backends.python_v2.window import as_bytes


def in_sixteens(tensor: Tensor) -> Tensor:
    """View 16 bytes of the last dimension as one complex128, where size and strides allow.

    A gather then moves 16 bytes for each index that it computes.
    """
    itemsize = tensor.dtype.itemsize
    offsets = (tensor.storage_offset(), *tensor.stride()[:-1], tensor.shape[-1])
    fits = all(offset * itemsize % 16 == 0 for offset in offsets)
    if tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and fits:
        return tensor.view(torch.complex128)
    return tensor


class BlockGather:
    """Gathers blocks of one cache tensor; the gather changes the layout on its way.

    The packed values have tokens innermost, and so has what is gathered from them: a transposed
    operand costs a product nothing, turning it round would cost another pass.
    """

    def __init__(self, cache: Tensor, part: str, layout: KVLayout, shape: CacheShape) -> None:
        self._dtype = cache.dtype
        self._shape = shape
        source = in_sixteens(as_bytes(cache))
        self._tokens_inside = layout == "packed" and part == "value"
        if self._tokens_inside:
            source = source.permute(1, 2, 0, 3)  # [KV, D, blocks, bs]
        elif layout == "packed":
            source = source.permute(1, 0, 3, 2, 4)  # [KV, blocks, bs, D/x, x]
        elif layout == "NHD":
            source = source.permute(2, 0, 1, 3)  # [KV, blocks, bs, D]
        else:
            source = source.permute(1, 0, 2, 3)
        self._source = source

    def gather(self, blocks: Tensor) -> Tensor:
        """The tokens of `blocks` (int64 ``[sequences, count]``, all of them in the cache).

        Returns
        -------
        ``[kv_heads, sequences, count × block_size, head_dim]``, in the cache's dtype
        """
        along = 2 if self._tokens_inside else 1
        size = list(self._source.shape)
        size[along] = blocks.numel()
        found = torch.empty(size, dtype=self._source.dtype, device=blocks.device)
        if blocks.device.type == "cpu":  # there, index_select may copy the whole cache first
            found.copy_(self._source[(slice(None),) * along + (blocks.flatten(),)])
        else:
            torch.index_select(self._source, along, blocks.flatten(), out=found)
        heads, sequences = size[0], blocks.shape[0]
        dim = self._shape.head_dim
        if self._tokens_inside:
            flat = found.flatten(2).view(self._dtype)  # [KV, D, sequences × tokens]
            return flat.view(heads, dim, sequences, -1).permute(0, 2, 3, 1)
        flat = found.flatten(1).view(self._dtype)
        return flat.view(heads, sequences, -1, dim)
