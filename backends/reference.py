"""The oracle: attention from its definition, in fp64 on the CPU, one query token at a time.

It is slow and meant to be obviously right. It shares no code with the backends that it judges,
is never in the automatic chain, and reads lengths and tables on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, Problem, Runner


class ReferenceBackend:
    """The fp64 oracle as a backend, to be asked for by name."""

    name = "reference"

    def not_present_reasons(self, facts: Facts) -> list[str]:
        return []

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return []

    def load(self, problem: Problem) -> Runner:
        return attend

    def remedy(self, facts: Facts) -> str | None:
        return None


def attend(call: Call) -> None:
    """Write ``call.out`` (any floating dtype, so that a test can have all of fp64) and
    ``call.lse``."""
    lengths = call.seq_lens.tolist()
    if call.query_start_loc is None:
        starts = list(range(len(lengths) + 1))
    else:
        starts = call.query_start_loc.tolist()
    if call.query_part != "long":
        _write_empty(call, starts[-1], call.query.shape[0])  # tokens of no sequence
    for sequence, length in enumerate(lengths):
        first, end = starts[sequence], starts[sequence + 1]
        if not call.serves(end - first):
            continue
        _write_empty(call, first, end)
        if end > first and length > 0:
            _attend_sequence(call, sequence, length, first, end)


def _write_empty(call: Call, first: int, end: int) -> None:
    call.out[first:end] = 0.0
    if call.lse is not None:
        call.lse[first:end] = -math.inf


def _attend_sequence(call: Call, sequence: int, length: int, first: int, end: int) -> None:
    blocks = _physical_blocks(call, sequence, length, end - first)
    if blocks is None:
        call.out[first:end] = math.nan
        if call.lse is not None:
            call.lse[first:end] = math.nan
        return
    num_kv_heads = call.key_cache.shape[2 if call.kv_layout == "NHD" else 1]
    group = call.query.shape[1] // num_kv_heads
    for kv_head in range(num_kv_heads):
        keys, values = _gather(call, blocks, kv_head, length)  # [L, D] each
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for token in range(first, end):
            position = length - (end - token)
            out, lse = _attend_row(call, token, heads, position, keys, values)
            call.out[token, heads] = out.to(call.out.device, call.out.dtype)
            if call.lse is not None:
                call.lse[token, heads] = lse.to(call.lse.device, call.lse.dtype)


def _physical_blocks(call: Call, sequence: int, length: int, num_queries: int) -> Tensor | None:
    """The ids that hold the sequence, or None if one that is needed names no block.

    What lies wholly behind the window of every query token is not needed: an engine may have
    freed it. Its ids are replaced by one that exists, and its keys are seen by nobody.
    """
    block_size = call.key_cache.shape[{"NHD": 1, "HND": 2, "packed": 3}[call.kv_layout]]
    count = -(-length // block_size)
    if length > call.max_seq_len or count > call.block_tables.shape[1]:
        return None
    ids = call.block_tables[sequence, :count].long().clone()
    first_position = max(0, length - num_queries)
    behind = 0 if call.window is None else max(0, first_position + 1 - call.window) // block_size
    ids[:behind] = ids[behind]
    if bool(((ids < 0) | (ids >= call.key_cache.shape[0])).any()):
        return None
    return ids


def _gather(call: Call, blocks: Tensor, kv_head: int, length: int) -> tuple[Tensor, Tensor]:
    """One KV head's keys and values, dequantised, fp64 ``[length, head_dim]`` on the CPU."""
    head_dim = call.query.shape[-1]
    if call.kv_layout == "NHD":
        keys = _indexable(call.key_cache)[:, :, kv_head][blocks]  # [n, bs, D]
        values = _indexable(call.value_cache)[:, :, kv_head][blocks]
    else:
        keys = _indexable(call.key_cache)[:, kv_head][blocks]
        values = _indexable(call.value_cache)[:, kv_head][blocks]
    if call.kv_layout == "packed":
        keys = keys.permute(0, 2, 1, 3)  # [n, D/x, bs, x] -> [n, bs, D/x, x]
        values = values.permute(0, 2, 1)  # [n, D, bs] -> [n, bs, D]
    keys = keys.reshape(-1, head_dim)[:length].view(call.key_cache.dtype)
    values = values.reshape(-1, head_dim)[:length].view(call.value_cache.dtype)
    return (
        keys.cpu().double() * _scale_of(call.k_scale, kv_head),
        values.cpu().double() * _scale_of(call.v_scale, kv_head),
    )


def _indexable(cache: Tensor) -> Tensor:
    """fp8 cannot be indexed everywhere; its bytes can."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _scale_of(scale: float | Tensor | None, kv_head: int) -> float:
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor):
        return float(scale.flatten()[kv_head if scale.numel() > 1 else 0])
    return scale


def _attend_row(
    call: Call, token: int, heads: slice, position: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Output ``[group, head_dim]`` and log-sum-exp ``[group]`` of one query token."""
    query = call.query[token, heads].cpu().double()
    first_key = 0 if call.window is None else max(0, position + 1 - call.window)
    seen = slice(first_key, position + 1)
    if position < first_key:
        return torch.zeros_like(query), torch.full_like(query[:, 0], -math.inf)
    scores = call.scale * (query @ keys[seen].T)  # [G, n]
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        positions = torch.arange(first_key, position + 1, dtype=torch.float64, device="cpu")
        distance = positions - position
        scores += call.alibi_slopes[heads].cpu().double().unsqueeze(1) * distance
    logits = scores
    if call.sinks is not None:  # one more logit in the denominator, with no value
        logits = torch.cat([scores, call.sinks[heads].cpu().double().unsqueeze(1)], dim=1)
    lse = torch.logsumexp(logits, dim=1)
    return torch.exp(scores - lse.unsqueeze(1)) @ values[seen], lse
