"""The one merge: attention states over disjoint sets of keys, combined.

A state is (output, log-sum-exp): the softmax-weighted mean of the values and the natural log of
the weights' sum. `merge` is associative and commutative, with the identity (0, −inf).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge states stacked along the first dimension.

    Parameters
    ----------
    outputs : Tensor, ``[num_states, ..., head_dim]``
    lses : Tensor, float32 ``[num_states, ...]``

    Returns
    -------
    tuple of float32 Tensor ``[..., head_dim]`` and float32 Tensor ``[...]``
        All states empty: zeros and −inf.
    """
    lse = torch.logsumexp(lses, dim=0)  # −inf where every state is empty
    # −inf − −inf is NaN; an empty whole weighs each of its (empty) parts 0
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    # an empty state's output means nothing, so it must not be multiplied: 0 × NaN is NaN
    terms = torch.where(lses.unsqueeze(-1) == -torch.inf, 0.0, outputs.float())
    return (terms * weights.unsqueeze(-1)).sum(dim=0), lse
