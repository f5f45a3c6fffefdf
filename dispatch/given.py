"""The arguments of `paged_attention` as they were given, and where their tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from pagedattn import arguments
from pagedattn.backends.protocol import KVLayout


class Arguments(NamedTuple):
    """The arguments of `paged_attention`, as given."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float | None
    out: Tensor | None
    return_lse: bool
    kv_layout: KVLayout
    query_start_loc: Tensor | None
    window: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    max_seq_len: int | None
    max_query_len: int | None
    num_splits: int | None
    batch_invariant: bool
    backend: str | Sequence[str] | None


class Reach(NamedTuple):
    """Where `out` and the other tensors of a call are to be found, and how far they reach."""

    tensors: Callable[[Sequence[Any]], tuple[Tensor, ...]]  # of the arguments, in their order
    out: int  # its place among those
    out_span: int  # bytes from its first element to the end of its last
    spans: tuple[int, ...]  # those of each tensor, but 0 of `out`: it may lie where it lies
    # from the addresses of all of those, with a 0 behind them, to `Call.addresses` without an lse
    arrange: Callable[[Sequence[int]], tuple[int, ...]]


# the places among the arguments of what `Call.addresses` names; the lse is none
_ORDER = [
    Arguments._fields.index(name) if name in Arguments._fields else None
    for name in (
        "query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc", "out",
        "lse", "alibi_slopes", "sinks", "k_scale", "v_scale",
    )
]  # fmt: skip
_OUT = Arguments._fields.index("out")
# Of all arguments those that may be tensors: another one that is a tensor is a mistake, which is
# told when its turn comes.
_TENSORS = sorted(place for place in _ORDER if place is not None)


def tensor_places(a: Sequence[Any]) -> list[int]:
    """Where the tensors stand among the arguments."""
    return [place for place in _TENSORS if isinstance(a[place], Tensor)]


_data_ptr = Tensor.data_ptr


def reach_of(a: Arguments) -> Reach | None:
    """What `addresses` is to be told of arguments like these."""
    if a.out is None:
        return None
    values: tuple[Any, ...] = a
    places = tensor_places(a)
    arranged = [places.index(i) if i in places else len(places) for i in _ORDER]
    return Reach(
        tensors=itemgetter(*places),
        out=places.index(_OUT),
        out_span=arguments.span(a.out),
        spans=tuple(0 if i == _OUT else arguments.span(values[i]) for i in places),
        arrange=itemgetter(*arranged),
    )


def addresses(a: tuple[Any, ...], reach: Reach) -> tuple[int, ...]:
    """What `Call.addresses` is to give, once `out` is known to overlap no input.

    Raises
    ------
    ValueError
        If it does.
    """
    tensors, out, out_span, spans, arrange = reach
    found = [*map(_data_ptr, tensors(a))]
    start = found[out]
    end = start + out_span
    for address, span in zip(found, spans):  # noqa: B905 (of one length; asking costs)
        if address < end and start < address + span:
            _check_overlap(a)
            break
    found.append(0)
    return arrange(found)


def _check_overlap(a: tuple[Any, ...]) -> None:
    """Look closer where ranges of addresses meet: two slices of one buffer may interleave without
    touching."""
    out = a[_OUT]
    start = out.data_ptr()
    end = start + arguments.span(out)
    for place in tensor_places(a):
        other = a[place]
        first = other.data_ptr()
        meets = start < first + arguments.span(other) and first < end
        if place != _OUT and meets and arguments.overlap(out, other):
            raise ValueError(
                f"out overlaps {Arguments._fields[place]} in memory; the inputs are read while out "
                "is written, so give it memory of its own"
            )
