"""Writing new keys and values into a paged cache: validation, remembered as that of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn import arguments, chain, contents, device_loss, request, writers
from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import Write, Writer
from pagedattn.settings import reader, switch

_read_backend = reader("PAGEDATTN_BACKEND")
_read_check = reader("PAGEDATTN_CHECK")


class Admitted(NamedTuple):
    """What is remembered of arguments that passed."""

    writer: Writer
    slot_count: int
    on_host: bool  # slots can be read without synchronising


# Emptied when full, so that a server whose batch sizes wander cannot grow it for ever.
# Replaced, not emptied, where bindings change: what was found before must not be kept after.
_admitted: dict[Any, Admitted] = {}
_MAX_ADMITTED = 4096


def _forget() -> None:
    global _admitted
    _admitted = {}


chain.on_reset(_forget)
chain.on_bound(_forget)  # then another implementation may be ready to write


def write(w: Write) -> None:
    """Validate and write; the body of `write_kv`."""
    spec = request.forced.get()
    if spec is None:
        spec = _read_backend()
    known = _admitted
    key: tuple[Any, ...] | None
    try:
        key = _key(w, spec)
        admitted = known.get(key)
    except (AttributeError, TypeError):  # not a tensor, or not hashable: validation says which
        key, admitted = None, None
    if admitted is None:
        admitted = _admit(w)
        if key is not None:
            if len(known) >= _MAX_ADMITTED:
                known.clear()
            known[key] = admitted
    if w.slot_mapping.shape[0] == 0:
        return
    if admitted.on_host or (_read_check() and switch("PAGEDATTN_CHECK")):
        contents.check_slots(w.slot_mapping, admitted.slot_count)
    if device_loss.lost:
        device_loss.refuse_if_lost(str(w.key.device))
    try:
        _run(admitted.writer, w)
    except RuntimeError as error:
        device_loss.raise_if_sticky(error, "the cache write", str(w.key.device))
        raise


def _run(writer: Writer, w: Write) -> None:
    # caches that were made in inference mode can be written in no other, and serve after it
    made_there = w.key_cache.is_inference() or w.value_cache.is_inference()
    if made_there and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            writer(w)
    else:
        writer(w)


def _key(w: Write, spec: str | tuple[str, ...] | None) -> tuple[Any, ...]:
    """All that validation looks at, and the backend asked for."""
    k, v, k_cache, v_cache, slots, layout, k_scale, v_scale = w
    return (
        k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
        v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
        k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device, k_cache.requires_grad,
        v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device, v_cache.requires_grad,
        slots.shape, slots.stride(), slots.dtype, slots.device, layout, torch.is_grad_enabled(),
        _scale_key(k_scale), _scale_key(v_scale), spec,
    )  # fmt: skip


def _scale_key(scale: float | Tensor | None) -> Any:
    if isinstance(scale, Tensor):
        return scale.shape, scale.stride(), scale.dtype, scale.device, scale.requires_grad
    return scale, scale.__class__  # 1, 1.0 and True are one key, but not one argument


def _admit(w: Write) -> Admitted:
    """Check everything that shapes and types tell, and choose what writes."""
    shape = _check(w)
    problem = arguments.describe(
        w.key, w.key_cache, shape, w.kv_layout,
        kv_scales=arguments.kind_of_scales(w.k_scale, w.v_scale),
    )  # fmt: skip
    slot_count = shape.num_blocks * shape.block_size
    return Admitted(writers.writer_for(problem), slot_count, w.key.device.type == "cpu")


def _check(w: Write) -> CacheShape:
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
