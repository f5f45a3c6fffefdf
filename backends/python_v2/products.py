"""Batched products that keep the precision of their sums."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _has_wide_result(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies `dtype` there into an fp32 result, with no copy in fp32."""
    one = torch.ones(1, 16, 16, dtype=dtype, device=device_type)
    try:
        result = torch.bmm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # not on this device; not in this torch
        return False
    return result.dtype == torch.float32


def _wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if _has_wide_result(a.device.type, a.dtype):
        return torch.bmm(a, b, out_dtype=torch.float32)
    # a 16-bit result overflows where only its scaled form fits, and loses bits everywhere
    return torch.bmm(a.float(), b.float())


def grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in fp32, batched over the two leading dimensions; no operand is rearranged.

    Parameters
    ----------
    a : ``[kv_heads, sequences, m, k]``
    b : ``[kv_heads, sequences, k, n]``, with k or n dense

    Returns
    -------
    float32 ``[kv_heads, sequences, m, n]``
    """
    heads, sequences = b.shape[:2]
    if heads == 1 or sequences == 1 or b.stride(0) == sequences * b.stride(1):
        flat = _wide_bmm(a.flatten(0, 1), b.flatten(0, 1))
        return torch.unflatten(flat, 0, (heads, sequences))
    # a batch of two dimensions has two strides: one product for each entry of the smaller
    along = 0 if heads <= sequences else 1
    pairs = zip(a.unbind(along), b.unbind(along), strict=True)
    return torch.stack([_wide_bmm(left, right) for left, right in pairs], dim=along)
