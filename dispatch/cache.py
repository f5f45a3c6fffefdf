"""Writing new keys and values into a paged cache: validation, and the plain-torch write."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn import arguments, contents
from pagedattn.backends import kv_write
from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import KVLayout
from pagedattn.settings import switch


class Writing(NamedTuple):
    """The arguments of `write_kv`, as given."""

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    kv_layout: KVLayout
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None


def write(w: Writing) -> None:
    """Validate and write; the body of `write_kv`."""
    shape = _check(w)
    slots = w.slot_mapping
    if slots.numel() == 0:
        return
    if slots.device.type == "cpu" or switch("PAGEDATTN_CHECK"):
        contents.check_slots(slots, shape.num_blocks * shape.block_size)
    # caches that were made in inference mode can be written in no other, and serve after it
    made_there = w.key_cache.is_inference() or w.value_cache.is_inference()
    with torch.inference_mode() if made_there else contextlib.nullcontext():
        kv_write.write(
            w.key, w.value, w.key_cache, w.value_cache, slots.long(), w.kv_layout, shape,
            w.k_scale, w.v_scale,
        )  # fmt: skip


def _check(w: Writing) -> CacheShape:
    tensors = {"key": w.key, "value": w.value, "key_cache": w.key_cache,
               "value_cache": w.value_cache, "slot_mapping": w.slot_mapping}  # fmt: skip
    for name, value in tensors.items():
        arguments.require_tensor(name, value)
    scales = {"k_scale": w.k_scale, "v_scale": w.v_scale}
    tensors |= {name: t for name, t in scales.items() if isinstance(t, Tensor)}
    arguments.require_no_grad(**tensors)
    arguments.require_same_device(w.key.device, **tensors)
    arguments.require_layout(w.kv_layout)
    for name in ("key", "value"):
        t = tensors[name]
        if t.dim() != 3:
            raise ValueError(
                f"{name} must be [num_tokens, kv_heads, head_dim], not {tuple(t.shape)}"
            )
        if t.dtype not in arguments.QUERY_DTYPES or t.dtype != w.key.dtype:
            raise TypeError(
                "key and value must both be float16, bfloat16 or float32, "
                f"not {w.key.dtype} and {w.value.dtype}"
            )
    shape = arguments.check_caches(
        w.key_cache, w.value_cache, w.kv_layout, w.key.shape[2], w.key.dtype
    )
    expected = (w.slot_mapping.shape[0] if w.slot_mapping.dim() else 0, shape.num_kv_heads,
                shape.head_dim)  # fmt: skip
    if w.slot_mapping.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"slot_mapping must be int64 or int32, not {w.slot_mapping.dtype}")
    if w.slot_mapping.dim() != 1 or not tuple(w.key.shape) == tuple(w.value.shape) == expected:
        raise ValueError(
            "key and value must be [num_tokens, kv_heads, head_dim] and slot_mapping "
            f"[num_tokens] beside caches of {shape.num_kv_heads} KV heads: got key "
            f"{tuple(w.key.shape)}, value {tuple(w.value.shape)}, "
            f"slot_mapping {tuple(w.slot_mapping.shape)}"
        )
    arguments.require_no_self_overlap(key_cache=w.key_cache, value_cache=w.value_cache)
    arguments.check_kv_scale("k_scale", w.k_scale, shape.num_kv_heads)
    arguments.check_kv_scale("v_scale", w.v_scale, shape.num_kv_heads)
    return shape
