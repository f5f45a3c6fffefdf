"""Attention sinks: one more logit in a row's denominator, with no value."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add one more logit to each row's denominator; a row that sees no key stays empty.

    Parameters
    ----------
    out : float32 ``[..., num_heads, head_dim]``
    lse : float32 ``[..., num_heads]``
    sinks : float32 ``[num_heads]``
    """
    with_sink = torch.logaddexp(lse, sinks)
    out = out * torch.exp(lse - with_sink).unsqueeze(-1)
    empty = lse == -torch.inf
    return out.masked_fill(empty.unsqueeze(-1), 0.0), with_sink.masked_fill(empty, -torch.inf)
