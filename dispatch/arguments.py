"""Validation of the arguments of `paged_attention`, on shapes and types alone.

Everything here is known to the host without reading a tensor's contents. What passed once is
remembered by the caller under the arguments' shapes, so this module may be plain and slow.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pagedattn.backends.layouts import (
    LAYOUTS,
    CacheShape,
    cache_shapes,
    packing_factor,
    read_shape,
)
from pagedattn.backends.protocol import QUANTISED_KV_DTYPES, KVLayout, KVScales, Problem
from pagedattn.settings import nearest

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    return value


def require_layout(layout: object) -> KVLayout:
    if not isinstance(layout, str):
        raise TypeError(f"kv_layout must be a string, not {type(layout).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(
            f"kv_layout={layout!r} is unknown{nearest(layout, LAYOUTS)}; "
            f"valid are {', '.join(LAYOUTS)}"
        )
    return layout


def require_same_device(device: torch.device, **tensors: Tensor | None) -> None:
    if device.type == "meta":
        raise ValueError("tensors on the meta device hold no data to compute with")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, but the query is on {device}; "
                "all tensors of a call must be on one device"
            )


def require_dense_innermost(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"the innermost dimension of {name} must be dense, but its stride is "
                f"{tensor.stride(-1)} (strides {tuple(tensor.stride())}); "
                f"pass {name}.contiguous() or a view that keeps it dense"
            )


def check_query(query: Tensor) -> None:
    if query.dim() != 3:
        raise ValueError(
            "query must be [num_tokens, num_heads, head_dim], "
            f"but has {query.dim()} dimensions: {tuple(query.shape)}"
        )
    _require_query_dtype(query.dtype)
    if query.shape[1] == 0 or query.shape[2] == 0:
        raise ValueError(f"query has no heads or no head_dim: {tuple(query.shape)}")
    require_dense_innermost(query=query)


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Of the query and of the caches."""
    _require_query_dtype(dtype)
    _require_kv_dtype(kv_dtype, dtype)


def _require_query_dtype(dtype: torch.dtype) -> None:
    if dtype not in QUERY_DTYPES:
        raise TypeError(f"query must be float16, bfloat16 or float32, not {dtype}")


def _require_kv_dtype(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    if kv_dtype != dtype and kv_dtype not in QUANTISED_KV_DTYPES:
        raise TypeError(
            f"the caches are {kv_dtype}, but the query {dtype}; they must be of the "
            "query's dtype or of float8_e4m3fn, float8_e5m2 or int8"
        )


def check_packing(head_dim: int, kv_dtype: torch.dtype) -> None:
    """Packed keys hold whole groups of 16 bytes."""
    x = packing_factor(kv_dtype)
    if head_dim % x:
        raise ValueError(
            f"head_dim {head_dim} is no multiple of the packing factor x = {x}; "
            "use the NHD or HND layout"
        )


def check_caches(
    key_cache: Tensor, value_cache: Tensor, layout: KVLayout, head_dim: int, dtype: torch.dtype
) -> CacheShape:
    """The caches' sizes, once both are known to be of `layout` and to hold `head_dim`."""
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(
            f"key_cache is {key_cache.dtype} and value_cache {value_cache.dtype}; "
            "they must be the same"
        )
    _require_kv_dtype(key_cache.dtype, dtype)
    shape = _check_cache_shapes(key_cache, value_cache, layout)
    if shape.head_dim != head_dim:
        raise ValueError(
            f"the {layout} caches hold head_dim {shape.head_dim}, but the query has {head_dim} "
            f"(key_cache {tuple(key_cache.shape)}, value_cache {tuple(value_cache.shape)})"
        )
    if min(shape) == 0:
        raise ValueError(f"the caches are empty: {shape}")
    if shape.num_blocks >= 2**31:
        raise ValueError(f"block ids are int32, but the cache has {shape.num_blocks} blocks")
    require_dense_innermost(key_cache=key_cache, value_cache=value_cache)
    return shape


def _check_cache_shapes(key_cache: Tensor, value_cache: Tensor, layout: KVLayout) -> CacheShape:
    key_rank = 5 if layout == "packed" else 4
    forms = {
        "packed": "[num_blocks, kv_heads, head_dim/x, block_size, x] with x = 16/itemsize, and "
        "the values [num_blocks, kv_heads, head_dim, block_size]",
        "NHD": "[num_blocks, block_size, kv_heads, head_dim], and the values the same",
        "HND": "[num_blocks, kv_heads, block_size, head_dim], and the values the same",
    }
    given = f"got key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)}"
    if key_cache.dim() != key_rank or value_cache.dim() != 4:
        raise ValueError(f"in the {layout} layout the keys are {forms[layout]}; {given}")
    shape = read_shape(value_cache, layout)
    x = packing_factor(key_cache.dtype)
    if layout == "packed" and key_cache.shape[-1] != x:
        raise ValueError(
            f"the packing factor of packed {key_cache.dtype} keys is x = 16/itemsize = {x}, "
            f"not {key_cache.shape[-1]}; {given}"
        )
    if layout == "packed":
        check_packing(shape.head_dim, key_cache.dtype)
    expected, _ = cache_shapes(shape, key_cache.dtype, layout)
    if tuple(key_cache.shape) != expected:
        raise ValueError(
            f"in the {layout} layout the keys are {forms[layout]}; beside these values the keys "
            f"must be {expected}; {given}"
        )
    return shape


def check_head_counts(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"the query's {num_heads} heads cannot be shared out over {num_kv_heads} KV heads: "
            "the first must be a multiple of the second"
        )


def check_tables(
    block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor | None, num_tokens: int
) -> None:
    for name, tensor, rank in (
        ("block_tables", block_tables, 2),
        ("seq_lens", seq_lens, 1),
        ("query_start_loc", query_start_loc, 1),
    ):
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 (int64 is converted), not {tensor.dtype}")
        if tensor.dim() != rank:
            raise ValueError(
                f"{name} must have {rank} dimension{'s'[: rank - 1]}, but is {tuple(tensor.shape)}"
            )
    require_dense_innermost(block_tables=block_tables)
    num_seqs = seq_lens.shape[0]
    if block_tables.shape[0] != num_seqs or block_tables.shape[1] == 0:
        raise ValueError(
            f"block_tables must be [num_seqs, max_blocks] with num_seqs = {num_seqs} (from "
            f"seq_lens) and at least one column, but is {tuple(block_tables.shape)}"
        )
    if query_start_loc is None and num_tokens != num_seqs:
        raise ValueError(
            f"without query_start_loc there is one query token per sequence, but the query has "
            f"{num_tokens} tokens and seq_lens {num_seqs} sequences"
        )
    if query_start_loc is not None and query_start_loc.shape[0] != num_seqs + 1:
        raise ValueError(
            f"query_start_loc must be [num_seqs + 1] = [{num_seqs + 1}], "
            f"but is {tuple(query_start_loc.shape)}"
        )


def check_number(
    name: str, value: Any, *, above: float = -math.inf, kind: type = numbers.Real
) -> None:
    word = "an integer" if kind is numbers.Integral else "a number"
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {word}, not {type(value).__name__}")
    if not (math.isfinite(cast(float, value)) and cast(float, value) > above):
        bound = "finite" if above == -math.inf else f"finite and greater than {above:g}"
        raise ValueError(f"{name} must be {bound}, not {value}")


def check_per_head(name: str, value: Tensor | None, num_heads: int) -> None:
    if value is None:
        return
    require_tensor(name, value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, not {value.dtype}")
    if tuple(value.shape) != (num_heads,):
        raise ValueError(f"{name} must be [num_heads] = [{num_heads}], not {tuple(value.shape)}")


def check_kv_scale(name: str, value: Any, num_kv_heads: int) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        check_number(name, value, above=0)
        return
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point, not {value.dtype}")
    if value.numel() not in (1, num_kv_heads) or value.dim() > 1:
        raise ValueError(
            f"{name} must be a number, or hold 1 or num_kv_heads = {num_kv_heads} elements, "
            f"but is {tuple(value.shape)}"
        )


def kind_of_scales(*scales: float | Tensor | None) -> KVScales:
    """The most demanding form among the scales given."""
    given = [s for s in scales if s is not None]
    if not given:
        return "none"
    tensors = [s for s in given if isinstance(s, Tensor)]
    if not tensors:
        return "float"
    return "per_head" if any(t.numel() > 1 for t in tensors) else "tensor"


def require_no_grad(**tensors: Tensor) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ValueError(
                f"{name} requires grad, but paged attention has no backward; "
                "call it under torch.no_grad() or torch.inference_mode(), or detach"
            )


def check_out(out: Tensor, query: Tensor) -> None:
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(
            f"out must be like the query, {tuple(query.shape)} and {query.dtype}, "
            f"but is {tuple(out.shape)} and {out.dtype}"
        )
    require_dense_innermost(out=out)
    require_no_self_overlap(out=out)


def require_no_self_overlap(**tensors: Tensor) -> None:
    """Each element of what is written has memory of its own, as in every view but an expanded
    one and the stranger ones of ``as_strided``."""
    for name, t in tensors.items():
        reach = 0  # from the first to the last element of the dimensions so far
        for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
            if size > 1 and stride <= reach and t.numel():
                raise ValueError(
                    f"{name} overlaps itself (shape {tuple(t.shape)}, strides {t.stride()}); what "
                    "is written to must not be expanded"
                )
            reach += (size - 1) * stride


def span(t: Tensor) -> int:
    """Bytes from the first element of a strided tensor to the end of its last one."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose ranges of addresses meet may share a byte.

    Two slices beside each other in the rows of one buffer interleave without touching: the
    same row pitch, and apart within a row. Anything else is taken to overlap.
    """
    pitch = a.stride(0) * a.element_size()
    if a.dim() < 2 or b.dim() < 2 or pitch == 0 or pitch != b.stride(0) * b.element_size():
        return True
    shift = (b.data_ptr() - a.data_ptr()) % pitch
    return not (span(a[0]) <= shift and shift + span(b[0]) <= pitch)


def describe(
    query: Tensor, key_cache: Tensor, shape: CacheShape, layout: KVLayout, **features: Any
) -> Problem:
    """The class of calls that these arguments belong to."""
    return Problem(
        device=str(query.device),
        dtype=query.dtype,
        kv_dtype=key_cache.dtype,
        num_heads=query.shape[1],
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        kv_layout=layout,
        **features,
    )


def stack_states(name: str, states: Tensor | Sequence[Tensor]) -> Tensor:
    """States as one tensor, from a tensor or from a sequence of tensors that are alike."""
    if isinstance(states, Tensor):
        return states
    if not isinstance(states, Sequence):
        raise TypeError(f"{name} must be a Tensor or a sequence of them, not {_kind(states)}")
    for i, state in enumerate(states):
        require_tensor(f"{name}[{i}]", state)
        if (state.shape, state.dtype, state.device) != (
            states[0].shape, states[0].dtype, states[0].device
        ):  # fmt: skip
            raise ValueError(
                f"{name} must all be alike, but the first is {_form(states[0])} and "
                f"{name}[{i}] is {_form(state)}"
            )
    if not states:
        raise ValueError(f"{name} is empty: there must be at least one state")
    return torch.stack(list(states))


def _kind(value: object) -> str:
    return type(value).__name__


def _form(t: Tensor) -> str:
    return f"{tuple(t.shape)} of {t.dtype} on {t.device}"


def check_states(outputs: Tensor, lses: Tensor) -> None:
    if not (outputs.dtype.is_floating_point and lses.dtype.is_floating_point):
        raise TypeError(f"states must be floating point, not {outputs.dtype} and {lses.dtype}")
    if outputs.dim() < 2 or outputs.shape[0] == 0 or outputs.shape[:-1] != lses.shape:
        raise ValueError(
            "states are outputs [num_states, ..., head_dim] and log-sum-exps [num_states, ...] "
            f"with at least one state, not {tuple(outputs.shape)} and {tuple(lses.shape)}"
        )
    require_same_device(outputs.device, lses=lses)
