"""Attention over one window of keys: the state (output, log-sum-exp) of its rows.

Two ways to it. torch's fused CPU operation keeps the scores in the cores' caches and gives the
log-sum-exp; what it cannot do (a soft cap), and where torch has no such operation, is done by
matrix products in fp32.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("pagedattn")


def _fused_operation() -> Any:
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


@functools.cache
def fused_works(dtype: torch.dtype) -> bool:
    """Whether torch's fused CPU operation exists, takes a mask and returns what we expect."""
    operation = _fused_operation()
    if operation is None:
        return False
    query = torch.ones(1, 1, 2, 8, dtype=dtype, device="cpu")
    keys = torch.ones(1, 1, 3, 8, dtype=dtype, device="cpu")
    bias = query.new_tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]).float()
    try:
        out, lse = operation(query, keys, keys, attn_mask=bias[None, None], scale=0.25)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        log.debug("torch's fused attention is not used for %s: %r", dtype, error)
        return False
    # each score is 8 × 0.25 = 2; the first row sees two keys and the second one
    expected = bias.new_tensor([[[2.0 + math.log(2.0), 2.0]]])
    return (
        out.shape == query.shape
        and lse.dtype == torch.float32
        and lse.shape == expected.shape
        and torch.allclose(lse, expected, atol=1e-3)
    )


def fused_partial(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state of `query` ``[1, kv_heads, rows, head_dim]`` over a window, by one operation.

    Parameters
    ----------
    keys, values : ``[1, kv_heads, tokens, head_dim]``, of the query's dtype, head_dim dense
    scale : of the scores
    bias : float32 ``[1, kv_heads or 1, rows, tokens]``, added to the scaled scores

    Returns
    -------
    ``[1, kv_heads, rows, head_dim]`` of the query's dtype, and float32 ``[1, kv_heads, rows]``;
    of a row whose bias is −inf throughout neither means anything.
    """
    result: tuple[Tensor, Tensor] = _fused_operation()(
        query, keys, values, attn_mask=bias, scale=scale
    )
    return result


def matmul_partial(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    bias: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """As `fused_partial`, by matrix products in fp32, and with a soft cap."""
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores = scores.add_(bias)
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights, values.float()), lse


def score_bias(
    query_positions: Tensor, key_positions: Tensor, window: int | None, slopes: Tensor | None
) -> Tensor:
    """What is added to the scores: the ALiBi term, and −inf for a key that is not seen.

    Parameters
    ----------
    query_positions : int64 ``[rows]``
    key_positions : int64 ``[tokens]``
    window : how many keys a query sees, itself included
    slopes : float32 ``[kv_heads, rows]``

    Returns
    -------
    float32 ``[1, kv_heads or 1, rows, tokens]``
    """
    distance = key_positions - query_positions.unsqueeze(-1)  # [rows, tokens]
    hidden = distance > 0
    if window is not None:
        hidden = hidden | (distance <= -window)
    if slopes is None:
        bias = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)[None, None]
    return (slopes.unsqueeze(-1) * distance).masked_fill_(hidden, -torch.inf).unsqueeze(0)
