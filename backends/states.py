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
    # Weighed relative to the greatest and divided by their own sum: the rounding of a large
    # merged log-sum-exp would otherwise become an error of the output (4e-4 at 10,000).
    greatest = lses.amax(dim=0)
    greatest = torch.where(greatest == -torch.inf, 0.0, greatest)  # −inf − −inf is NaN
    weights = torch.exp(lses - greatest)
    total = weights.sum(dim=0)  # 0 where every state is empty, else at least 1
    # an empty state's output means nothing, so it must not be multiplied: 0 × NaN is NaN
    terms = torch.where(lses.unsqueeze(-1) == -torch.inf, 0.0, outputs.float())
    merged = (terms * weights.unsqueeze(-1)).sum(dim=0) / total.clamp(min=1).unsqueeze(-1)
    return merged, greatest + torch.log(total)
