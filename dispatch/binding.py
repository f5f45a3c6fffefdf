"""`bind`: resolve now what the first call would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagedattn import chain
from pagedattn.arguments import check_head_counts, require_layout
from pagedattn.backends.protocol import KVLayout, Problem


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
) -> chain.Binding:
    """Choose, load, compile and verify now what the first call of a class would.

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
    BackendUnavailable, BuildError, VerificationError, DeviceError
        As `paged_attention` would.
    """
    where = default_device() if device is None else torch.device(device)
    if str(where) == "cuda":  # no index: the current one
        where = torch.device("cuda", torch.cuda.current_device())
    dtype = dtype or (torch.float32 if where.type == "cpu" else torch.float16)
    require_layout(kv_layout)
    check_head_counts(num_heads, num_kv_heads)
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
    return chain.binding_for(problem, backend)


def default_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU. Initialises CUDA."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
