"""The function as operators that `torch.compile` can hold in a graph without looking inside.

Each writes its results into arguments and returns nothing, so that nothing it returns can alias
an input. Only traced code goes through them: eager calls would pay for the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedattn import admission, cache
from pagedattn.backends.protocol import Write
from pagedattn.given import Arguments

is_compiling: Callable[[], bool] = (
    getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
)  # torch 2.1 and 2.2 have it there

_library = torch.library.Library("pagedattn", "DEF")
_library.define(
    "attend(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor seq_lens, float? scale, Tensor(a!) out, Tensor(b!)? lse, str kv_layout, "
    "Tensor? query_start_loc, int? window, float? softcap, Tensor? alibi_slopes, Tensor? sinks, "
    "float? k_scale, Tensor? k_scales, float? v_scale, Tensor? v_scales, SymInt? max_seq_len, "
    "SymInt? max_query_len, int? num_splits, bool batch_invariant, str? backend) -> ()"
)
_library.define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_layout, float? k_scale, Tensor? k_scales, float? v_scale, "
    "Tensor? v_scales) -> ()"
)


def traced_attention(a: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` as it appears in a traced graph."""
    out = a.query.new_empty(a.query.shape) if a.out is None else a.out
    lse = a.query.new_empty(a.query.shape[:2], dtype=torch.float32) if a.return_lse else None
    k_scale, k_scales = _split(a.k_scale)
    v_scale, v_scales = _split(a.v_scale)
    backend = a.backend if a.backend is None or isinstance(a.backend, str) else ",".join(a.backend)
    torch.ops.pagedattn.attend(
        a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens, a.scale, out, lse,
        a.kv_layout, a.query_start_loc, a.window, a.softcap, a.alibi_slopes, a.sinks,
        k_scale, k_scales, v_scale, v_scales, a.max_seq_len, a.max_query_len, a.num_splits,
        a.batch_invariant, backend,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def traced_write(w: Write) -> None:
    """`write_kv` as it appears in a traced graph."""
    k_scale, k_scales = _split(w.k_scale)
    v_scale, v_scales = _split(w.v_scale)
    torch.ops.pagedattn.write_kv(
        w.key, w.value, w.key_cache, w.value_cache, w.slot_mapping, w.kv_layout,
        k_scale, k_scales, v_scale, v_scales,
    )  # fmt: skip


def _split(scale: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    return (None, scale) if isinstance(scale, Tensor) else (scale, None)


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor,
    seq_lens: Tensor, scale: float | None, out: Tensor, lse: Tensor | None, kv_layout: Any,
    query_start_loc: Tensor | None, window: int | None, softcap: float | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, k_scale: float | None,
    k_scales: Tensor | None, v_scale: float | None, v_scales: Tensor | None,
    max_seq_len: int | None, max_query_len: int | None, num_splits: int | None,
    batch_invariant: bool, backend: str | None,
) -> None:  # fmt: skip
    given = Arguments(
        query, key_cache, value_cache, block_tables, seq_lens, scale, out, lse is not None,
        kv_layout, query_start_loc, window, softcap, alibi_slopes, sinks,
        k_scales if k_scale is None else k_scale, v_scales if v_scale is None else v_scale,
        max_seq_len, max_query_len, num_splits, batch_invariant, backend,
    )  # fmt: skip
    result = admission.attend(given)
    if lse is not None:
        lse.copy_(result[1])


def _write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_layout: Any, k_scale: float | None, k_scales: Tensor | None, v_scale: float | None,
    v_scales: Tensor | None,
) -> None:  # fmt: skip
    given = Write(
        key, value, key_cache, value_cache, slot_mapping, kv_layout,
        k_scales if k_scale is None else k_scale, v_scales if v_scale is None else v_scale,
    )  # fmt: skip
    cache.write(given)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a trace sees: results written in place, nothing returned."""


for _key in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _key)
    _library.impl("write_kv", _write, _key)
_library.impl("attend", _nothing, "Meta")
_library.impl("write_kv", _nothing, "Meta")
