"""The judge: how wrong may a result be?

What is right is computed here in fp64 from dense sequences. A result may be twice as far from
it as what plain torch makes of the same inputs in the same precision (matmul, fp32 softmax,
matmul, each rounding to the inputs' dtype), plus one rounding of the output and one fp32 rounding
of the largest score or log-sum-exp, by which partial results are weighed. Rows that see no key,
and rows that must be NaN, are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from _scene import Result, Scene
from torch import Tensor


def truth(scene: Scene) -> Result:
    """Output and log-sum-exp in fp64."""
    return _dense(scene, torch.float64, lambda t: t)


def plain_torch(scene: Scene) -> Result:
    """What plain torch makes of it in the query's dtype, over contiguous keys and values.

    16-bit products are computed in fp32 and rounded once, which is what a 16-bit matmul does,
    because torch 2.1 has no fp16 matmul on a CPU.
    """
    dtype = scene.query.dtype
    result = _dense(scene, torch.float32, lambda t: t.to(dtype).float())
    if not bool(result.out.isfinite().all()):  # q·k overflowed: one would scale the query first
        scale = scene.features.get("scale", scene.query.shape[-1] ** -0.5)
        scaled = replace(
            scene, query=scene.query * scale, features={**scene.features, "scale": 1.0}
        )
        result = _dense(scaled, torch.float32, lambda t: t.to(dtype).float())
    return result


def _dense(scene: Scene, work: torch.dtype, store: Callable[[Tensor], Tensor]) -> Result:
    query = scene.query.cpu()
    out = torch.zeros(query.shape, dtype=work)
    lse = torch.full(query.shape[:2], -math.inf, dtype=work)
    for sequence, (keys, values) in enumerate(zip(scene.keys, scene.values, strict=True)):
        first, end = scene.starts[sequence], scene.starts[sequence + 1]
        if end > first and keys.shape[0]:
            rows = slice(first, end)
            out[rows], lse[rows] = _one_sequence(
                query[rows].to(work), keys.to(work), values.to(work), scene.features, store
            )
    return Result(out, lse)


def _one_sequence(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    features: dict[str, Any],
    store: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """``[T, H, D]`` and ``[T, H]`` of T query tokens over ``[L, KV, D]``."""
    work, (tokens, heads, head_dim), length = query.dtype, query.shape, keys.shape[0]
    kv_heads = keys.shape[1]
    keys = store(keys * _per_head(features.get("k_scale"), work))
    values = store(values * _per_head(features.get("v_scale"), work))
    # the group's heads as more rows: head h reads KV head h // (H / KV)
    rows = query.transpose(0, 1).reshape(kv_heads, -1, head_dim)  # [KV, G * T, D]
    scores = store(rows @ keys.permute(1, 2, 0)).view(heads, tokens, length)
    scores = scores * (head_dim**-0.5 if (s := features.get("scale")) is None else s)
    if (cap := features.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(length - tokens, length).view(-1, 1)
    key = torch.arange(length).view(1, -1)
    if (slopes := features.get("alibi_slopes")) is not None:
        scores = scores + slopes.cpu().to(work).view(-1, 1, 1) * (key - position).to(work)
    hidden = key > position
    if (window := features.get("window")) is not None:
        hidden = hidden | (key <= position - window)
    scores = scores.masked_fill(hidden, -math.inf)
    logits = scores
    if (sinks := features.get("sinks")) is not None:
        column = sinks.cpu().to(work).view(-1, 1, 1).expand(-1, tokens, 1)
        logits = torch.cat([scores, column], dim=2)
    blind = hidden.all(dim=1)  # [T]: these see no key, and so no sink either
    weights = torch.softmax(logits, dim=2)[..., :length].masked_fill(blind[:, None], 0.0)
    lse = torch.logsumexp(logits, dim=2).masked_fill(blind, -math.inf)
    weights = store(weights).reshape(kv_heads, -1, length)
    out = store(weights @ values.transpose(0, 1)).view(heads, tokens, head_dim)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _per_head(scale: float | Tensor | None, work: torch.dtype) -> Tensor:
    if scale is None:
        scale = 1.0
    given = scale.cpu() if isinstance(scale, Tensor) else torch.tensor(scale)
    return given.to(work).reshape(-1, 1)  # broadcasts over [L, KV, D]


def assert_right(
    result: Result,
    scene: Scene,
    *,
    nan_sequences: Sequence[int] = (),
    sequences: Sequence[int] | None = None,
    merges: int = 1,
) -> None:
    """Judge every row of a result (or those of `sequences`); see the module.

    `nan_sequences` must be NaN throughout. `merges` partial results one after the other round
    as often. Tokens beyond the last sequence see no key.
    """
    right, plain = truth(scene), plain_torch(scene)
    want_nan = torch.zeros(scene.query.shape[0], dtype=torch.bool)
    chosen = torch.full_like(want_nan, sequences is None)
    for sequence in nan_sequences:
        want_nan[scene.starts[sequence] : scene.starts[sequence + 1]] = True
    for sequence in sequences or ():
        chosen[scene.starts[sequence] : scene.starts[sequence + 1]] = True
    assert bool(result.out[want_nan].isnan().all()), "a row that must be NaN is not"
    assert bool(result.lse[want_nan].isnan().all()), "a log-sum-exp that must be NaN is not"
    rows = chosen & ~want_nan
    result, right, plain = (Result(r.out[rows], r.lse[rows]) for r in (result, right, plain))
    _compare(result, right, plain, merges * _largest_score(scene))


def _largest_score(scene: Scene) -> float:
    """What no score can exceed, by the norms of query and keys."""
    features = scene.features
    scale: float = abs(features.get("scale", scene.query.shape[-1] ** -0.5))
    k_scale = float(_per_head(features.get("k_scale"), torch.float32).max())
    keys = max((_largest(keys.norm(dim=-1)) for keys in scene.keys), default=0.0)
    largest = scale * k_scale * keys * _largest(scene.query.float().norm(dim=-1))
    return max(1.0, min(largest, features.get("softcap") or math.inf))


def _compare(result: Result, right: Result, plain: Result, largest_score: float) -> None:
    dtype = result.out.dtype
    assert not bool(result.out.isnan().any()), "NaN in a row that must have a value"
    blind = right.lse == -math.inf
    assert bool((result.out[blind] == 0).all()), "a row that sees no key is not zero"
    assert torch.equal(result.lse == -math.inf, blind), "−inf is not where no key is seen"
    error, allowed = _relative(result.out, right.out), _relative(plain.out, right.out)
    rounding = _EPS * max(largest_score, _largest(right.lse[~blind].abs()))
    limit = 2 * allowed + torch.finfo(dtype).eps + rounding
    assert error <= limit, f"relative error {error:.2e}, but plain torch has {allowed:.2e}"
    lse_error = (result.lse.double() - right.lse)[~blind].abs()
    lse_limit = 2 * _largest((plain.lse.double() - right.lse)[~blind].abs()) + rounding
    assert _largest(lse_error) <= lse_limit, (
        f"log-sum-exp off by {_largest(lse_error):.2e}, at most {lse_limit:.2e} is right"
    )


_EPS = torch.finfo(torch.float32).eps


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _relative(out: Tensor, right: Tensor) -> float:
    """The largest error of a row relative to that row's norm."""
    error = (out.double() - right).norm(dim=-1)
    size = right.norm(dim=-1)
    return _largest(torch.where(error == 0, 0.0, error / size).nan_to_num(nan=math.inf))
