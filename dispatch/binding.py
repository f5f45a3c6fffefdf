"""`bind`: resolve now what the first call would."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from pagedattn import chain, writers
from pagedattn.arguments import (
    check_dtypes,
    check_head_counts,
    check_number,
    check_packing,
    require_layout,
)
from pagedattn.backends.errors import PagedAttnError
from pagedattn.backends.protocol import KV_SCALES, KVLayout, Problem
from pagedattn.record import Binding
from pagedattn.settings import nearest


def bind(
    device: str | torch.device | None = None,
    *,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    num_heads: int = 24,
    num_kv_heads: int = 4,
    head_dim: int = 256,
    block_size: int = 16,
    kv_layout: KVLayout = "packed",
    backend: str | Sequence[str] | None = None,
    **features: Any,
) -> Binding:
    """Choose, load, compile and verify now what the first call of a class would, and the first
    write into its caches.

    A server calls it at its start, once for each class of calls that it will make, so that it
    pays and fails there and not in a request.

    Parameters
    ----------
    device : str or torch.device, optional
        Default: the current CUDA device where there is one, else the CPU.
    dtype, kv_dtype : torch.dtype, optional
        Of the query and of the caches. Default: float16 on a GPU, float32 on a CPU, both alike.
    num_heads, num_kv_heads, head_dim, block_size : int
        The model's sizes (head_dim in elements, block_size in tokens).
    kv_layout : {"packed", "NHD", "HND"}
    backend : str or sequence of str, optional
        As in `paged_attention`.
    **features
        The other fields of `pagedattn.backends.protocol.Problem`: ``varlen_query``, ``window``,
        ``softcap``, ``alibi``, ``sinks``, ``return_lse``, ``batch_invariant`` (bool) and
        ``kv_scales``.

    Returns
    -------
    Binding
        The record: ``.backend``, ``.candidates`` with the reasons of those passed over.

    Raises
    ------
    ValueError, TypeError
        For a device that cannot be used, or sizes or fields that mean nothing.
    BackendUnavailable, BuildError, VerificationError, DeviceError
        As `paged_attention` would.
    """
    where = default_device() if device is None else usable_device(device)
    dtype = dtype or (torch.float32 if where.type == "cpu" else torch.float16)
    check_dtypes(dtype, kv_dtype or dtype)
    for name, size in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads),
                       ("head_dim", head_dim), ("block_size", block_size)):  # fmt: skip
        check_number(name, size, above=0, kind=numbers.Integral)
    check_head_counts(num_heads, num_kv_heads)
    if require_layout(kv_layout) == "packed":
        check_packing(head_dim, kv_dtype or dtype)
    _check_features(features)
    problem = Problem(
        device=str(where),
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_layout=kv_layout,
        **features,
    )
    binding = chain.binding_for(problem, backend)
    writers.prepare(problem)
    return binding


def _check_features(features: dict[str, Any]) -> None:
    known = [f.name for f in fields(Problem) if f.name not in _NAMED]
    for name, value in features.items():
        if name not in known:
            raise TypeError(
                f"{name} is no field of a problem{nearest(name, known)}; valid are "
                f"{', '.join(known)}"
            )
        if name == "kv_scales":
            if value not in KV_SCALES:
                raise ValueError(
                    f"kv_scales={value!r} is unknown; valid are {', '.join(KV_SCALES)}"
                )
        elif not isinstance(value, bool):
            # a window of 128 is no other class of calls than one of 64, and no call would find it
            raise TypeError(f"{name} must be a bool, whether calls have it, not {value!r}")


_NAMED = ("device", "dtype", "kv_dtype", "num_heads", "num_kv_heads", "head_dim", "block_size",
          "kv_layout", "query_part", "few_queries")  # fmt: skip


def bind_at_import() -> None:
    """What ``PAGEDATTN_EAGER=1`` asks for: `bind` the reference sizes on the default device.

    Raises
    ------
    PagedAttnError
        Of the kind that `bind` raised, saying that the variable asked for it.
    """
    try:
        bind()
    except PagedAttnError as error:
        told = f"PAGEDATTN_EAGER=1 asks for a binding at import, and there is none: {error}"
        raise type(error)(told, error.record) from error


def default_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU. Initialises CUDA."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def usable_device(device: str | torch.device) -> torch.device:
    """`device` as tensors on it will name it: a CPU without an index, a GPU with one.

    Raises
    ------
    ValueError
        If it is neither a CPU nor a CUDA device that torch can use now.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{device!r} is no device; give cpu, cuda or cuda:0") from error
    if where.type == "cpu":
        return torch.device("cpu")
    if where.type != "cuda":
        raise ValueError(f"{device} is neither a CPU nor a CUDA device; pagedattn serves those")
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ValueError(
            f"{device} cannot be used: torch {torch.__version__} ({build}) finds no usable CUDA "
            "device; `pagedattn report` says what is here"
        )
    count = torch.cuda.device_count()
    if where.index is not None and where.index >= count:
        raise ValueError(f"{device} does not exist: there are {count}, counted from cuda:0")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
