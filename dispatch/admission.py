"""From a caller's arguments to a backend's `Call`.

The first time that a combination of shapes and types is seen it is validated and bound; what
was learned is kept under those shapes, so that a warm call costs a few microseconds.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn import arguments, chain, contents, given, request, shortcut
from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import Call
from pagedattn.given import Arguments, Reach
from pagedattn.record import Binding
from pagedattn.settings import reader, switch

_read_backend = reader("PAGEDATTN_BACKEND")
_read_check = reader("PAGEDATTN_CHECK")


class Admitted(NamedTuple):
    """What is remembered of arguments that passed."""

    binding: Binding
    scale: float
    num_tokens: int
    capacity: int  # tokens that a row of block_tables can hold
    block_size: int
    num_blocks: int
    on_host: bool  # lengths and tables can be read without synchronising
    convert: bool  # some argument must be converted before a backend sees it
    reach: Reach | None  # of the tensors that `out` must not overlap; None without an `out`
    plans: dict[Any, Any]  # what backends keep for calls like this one
    slow: shortcut.Slow


# Emptied when full, so that a server whose batch and table sizes wander cannot grow it for ever.
# Replaced by a reset, so that what another thread found before it is not kept after it.
_admitted: dict[Any, Admitted] = {}
_MAX_ADMITTED = 4096


def _forget() -> None:
    global _admitted
    _admitted = {}
    shortcut.forget()  # in this order: what it is told of is found there


chain.on_reset(_forget)


def attend(a: tuple[Any, ...]) -> Tensor | tuple[Tensor, Tensor]:
    """Validate, bind and run; the body of `paged_attention`.

    Parameters
    ----------
    a : the fields of `Arguments`; a plain tuple will do, which is made sooner
    """
    spec = a[-1]
    if spec is None:
        spec = request.forced.get()
    if spec is None:
        spec = _read_backend()
    admitted = shortcut.find(a, spec)
    if admitted is None:
        admitted = _find(Arguments(*a), spec)
    call = _prepare(a, admitted)
    if admitted.num_tokens:
        admitted.binding.run(call)
    return call.out if call.lse is None else (call.out, call.lse)


def _find(a: Arguments, spec: str | Sequence[str] | None) -> Admitted:
    """What is remembered under the arguments' key; what is not yet is admitted."""
    recent, known = shortcut.recent(), _admitted
    try:
        key = _key(a, spec)
        admitted = known.get(key)
    except (AttributeError, TypeError):  # not a tensor, or not hashable: validation says which
        return admit(a)
    if admitted is None:
        admitted = admit(a)
        if len(known) >= _MAX_ADMITTED:
            known.clear()
        known[key] = admitted
    shortcut.remember(recent, a, spec, admitted.slow, admitted)
    return admitted


def _signature(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


def _key(a: Arguments, spec: str | Sequence[str] | None) -> tuple[Any, ...]:
    """All that validation looks at, and the backend asked for."""
    (
        q, k, v, tables, lens, scale, out, return_lse, kv_layout, starts, window, softcap, alibi,
        sinks, k_scale, v_scale, _, _, num_splits, batch_invariant, _,
    ) = a  # fmt: skip
    grad = torch.is_grad_enabled()
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        grad, grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        tables.shape, tables.stride(), tables.dtype, tables.device,
        lens.shape, lens.stride(), lens.dtype, lens.device,
        None if out is None else _signature(out),
        None if starts is None else _signature(starts),
        None if alibi is None else _signature(alibi),
        None if sinks is None else _signature(sinks),
        k_scale if k_scale is None or k_scale.__class__ is float else _of_scale(k_scale),
        v_scale if v_scale is None or v_scale.__class__ is float else _of_scale(v_scale),
        scale, return_lse, kv_layout, window, softcap, num_splits, batch_invariant,
        spec,
        # 1, 1.0 and True are one key, but not one argument
        scale.__class__, return_lse.__class__, window.__class__, softcap.__class__,
        num_splits.__class__, batch_invariant.__class__,
    )  # fmt: skip


def _of_scale(scale: Any) -> tuple[Any, ...]:
    return _signature(scale) if isinstance(scale, Tensor) else (scale.__class__, scale)


def admit(a: Arguments) -> Admitted:
    """Check everything that shapes and types tell, and bind a backend."""
    shape = _check(a)
    problem = arguments.describe(
        a.query,
        a.key_cache,
        shape,
        a.kv_layout,
        varlen_query=a.query_start_loc is not None,
        window=a.window is not None,
        softcap=a.softcap is not None,
        alibi=a.alibi_slopes is not None,
        sinks=a.sinks is not None,
        kv_scales=arguments.kind_of_scales(a.k_scale, a.v_scale),
        return_lse=a.return_lse,
        batch_invariant=a.batch_invariant,
    )
    return Admitted(
        binding=chain.binding_for(problem, a.backend),
        scale=shape.head_dim**-0.5 if a.scale is None else float(a.scale),
        num_tokens=a.query.shape[0],
        capacity=a.block_tables.shape[1] * shape.block_size,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        on_host=a.query.device.type == "cpu",
        convert=_needs_conversion(a),
        reach=given.reach_of(a),
        plans={},
        slow=shortcut.Slow(),
    )


def _check(a: Arguments) -> CacheShape:
    tensors = {"query": a.query, "key_cache": a.key_cache, "value_cache": a.value_cache,
               "block_tables": a.block_tables, "seq_lens": a.seq_lens}  # fmt: skip
    optional = {"query_start_loc": a.query_start_loc, "alibi_slopes": a.alibi_slopes,
                "sinks": a.sinks, "out": a.out}  # fmt: skip
    tensors |= {name: t for name, t in optional.items() if t is not None}
    for name, value in tensors.items():
        arguments.require_tensor(name, value)
    scales = {"k_scale": a.k_scale, "v_scale": a.v_scale}
    tensors |= {name: t for name, t in scales.items() if isinstance(t, Tensor)}
    arguments.require_no_grad(**tensors)
    arguments.require_same_device(a.query.device, **tensors)
    arguments.require_layout(a.kv_layout)
    arguments.check_query(a.query)
    shape = arguments.check_caches(
        a.key_cache, a.value_cache, a.kv_layout, a.query.shape[2], a.query.dtype
    )
    num_heads = a.query.shape[1]
    arguments.check_head_counts(num_heads, shape.num_kv_heads)
    arguments.check_tables(a.block_tables, a.seq_lens, a.query_start_loc, a.query.shape[0])
    arguments.check_per_head("alibi_slopes", a.alibi_slopes, num_heads)
    arguments.check_per_head("sinks", a.sinks, num_heads)
    arguments.check_kv_scale("k_scale", a.k_scale, shape.num_kv_heads)
    arguments.check_kv_scale("v_scale", a.v_scale, shape.num_kv_heads)
    if a.out is not None:
        arguments.check_out(a.out, a.query)
    _check_numbers(a)
    return shape


def _check_numbers(a: Arguments) -> None:
    if a.scale is not None:
        arguments.check_number("scale", a.scale)
    if a.softcap is not None:
        arguments.check_number("softcap", a.softcap, above=0)
    if a.window is not None:
        arguments.check_number("window", a.window, above=0, kind=numbers.Integral)
    if a.num_splits is not None:
        arguments.check_number("num_splits", a.num_splits, above=0, kind=numbers.Integral)
    for name in ("return_lse", "batch_invariant"):
        if not isinstance(getattr(a, name), bool):
            raise TypeError(f"{name} must be a bool, not {type(getattr(a, name)).__name__}")


def _needs_conversion(a: Arguments) -> bool:
    ints = (a.block_tables, a.seq_lens, a.query_start_loc)
    floats = (a.alibi_slopes, a.sinks, a.k_scale, a.v_scale)
    scalars = (a.softcap, a.k_scale, a.v_scale)
    return (
        any(not (s is None or isinstance(s, (float, Tensor))) for s in scalars)
        or any(not (n is None or isinstance(n, int)) for n in (a.window, a.num_splits))
        or any(t is not None and t.dtype != torch.int32 for t in ints)
        or any(t is not None and not t.is_contiguous() for t in ints[1:])
        or any(isinstance(t, Tensor) and t.dtype != torch.float32 for t in floats)
        or any(isinstance(t, Tensor) and not t.is_contiguous() for t in floats)
    )


def _prepare(a: tuple[Any, ...], admitted: Admitted) -> Call:
    """What depends on addresses and contents: checked each time, then made into a `Call`."""
    (
        query, key_cache, value_cache, tables, seq_lens, _, out, return_lse, kv_layout, start_loc,
        window, softcap, alibi, sinks, k_scale, v_scale, max_seq_len, longest, num_splits,
        batch_invariant, _,
    ) = a  # fmt: skip
    _, scale, num_tokens, limit, _, num_blocks, on_host, convert, reach, plans, _ = admitted
    addresses = None if reach is None else given.addresses(a, reach)
    if max_seq_len is not None:
        if max_seq_len.__class__ is not int or max_seq_len < 0:
            arguments.check_number("max_seq_len", max_seq_len, above=-1, kind=numbers.Integral)
            max_seq_len = int(max_seq_len)
        if max_seq_len < limit:
            limit = max_seq_len
    lengths = contents.host_lengths(seq_lens, limit) if on_host else None
    starts = None
    max_query_len = 1
    if start_loc is not None:
        starts = contents.host_starts(start_loc, num_tokens) if on_host else None
        max_query_len = contents.max_query_len(longest, starts, num_tokens)
    elif longest is not None and (longest.__class__ is not int or longest < 1):
        arguments.check_number("max_query_len", longest, above=0, kind=numbers.Integral)
    if _read_check() and switch("PAGEDATTN_CHECK"):
        _check_contents(Arguments(*a), limit, admitted)
    if convert:
        (
            _, _, _, tables, seq_lens, _, _, _, _, start_loc, window, softcap, alibi, sinks,
            k_scale, v_scale, _, _, num_splits, _, _,
        ) = _convert(Arguments(*a), num_blocks)  # fmt: skip
        addresses = None
    if out is None:
        out = torch.empty_like(query)
    lse = None
    if return_lse:
        lse = torch.empty(num_tokens, query.shape[1], dtype=torch.float32, device=query.device)
        addresses = None
    call = Call(
        query, key_cache, value_cache, tables, seq_lens, out, lse, kv_layout, scale, limit,
        max_query_len, start_loc, window, softcap, alibi, sinks, k_scale, v_scale, num_splits,
        batch_invariant, lengths, starts, "all", plans,
    )  # fmt: skip
    call.known_addresses = addresses
    return call


def _check_contents(a: Arguments, limit: int, admitted: Admitted) -> None:
    """What ``PAGEDATTN_CHECK=1`` asks for; reads device data, so it synchronises."""
    lengths = contents.host_lengths(a.seq_lens, limit)
    query_lens = [1] * len(lengths)
    if a.query_start_loc is not None:
        starts = contents.host_starts(a.query_start_loc, a.query.shape[0])
        contents.max_query_len(a.max_query_len, starts, a.query.shape[0])
        query_lens = [end - start for start, end in pairwise(starts)]
    window = None if a.window is None else int(a.window)
    contents.check_tables(
        a.block_tables, lengths, query_lens, window, admitted.block_size, admitted.num_blocks
    )


def _convert(a: Arguments, num_blocks: int) -> Arguments:
    """The same arguments in the types that backends are promised."""
    top = torch.iinfo(torch.int32).max
    starts = a.query_start_loc
    return a._replace(
        block_tables=contents.clamped_int32(a.block_tables, num_blocks),
        seq_lens=contents.clamped_int32(a.seq_lens, top),
        query_start_loc=None if starts is None else contents.clamped_int32(starts, top),
        alibi_slopes=_float32(a.alibi_slopes),
        sinks=_float32(a.sinks),
        window=None if a.window is None else int(a.window),
        softcap=None if a.softcap is None else float(a.softcap),
        k_scale=_scale(a.k_scale),
        v_scale=_scale(a.v_scale),
        num_splits=None if a.num_splits is None else int(a.num_splits),
    )


def _float32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(torch.float32).reshape(-1).contiguous()


def _scale(scale: float | Tensor | None) -> float | Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return _float32(scale)
    return float(scale)
