"""The parts of an inference engine that meet pagedattn: a paged cache, attention, batching.

Written to be read and copied. It works with any transformers model whose attention goes through
`AttentionInterface`, but imports nothing of transformers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import pagedattn
from pagedattn.backends.protocol import KVLayout


@dataclass
class Request:
    """A prompt, the answer so far and where its keys and values lie."""

    index: int
    pending: list[int]  # tokens that the model has not seen yet
    cached: int = 0  # tokens whose keys and values are in the cache
    produced: int = 0
    blocks: list[int] = field(default_factory=list)  # physical blocks, in logical order

    @property
    def length(self) -> int:
        return self.cached + len(self.pending)


@dataclass
class Step:
    """One forward pass over a batch, as `attend` needs it: the same tensors for every layer."""

    cache: PagedCache
    query_start_loc: Tensor  # int32 [num_seqs + 1]: whose tokens are where
    seq_lens: Tensor  # int32 [num_seqs], this step's tokens included
    block_tables: Tensor  # int32 [num_seqs, max_blocks], rows padded with -1
    slot_mapping: Tensor  # int64 [num_tokens]: where each token's key and value go
    position_ids: Tensor  # int64 [num_tokens]


class PagedCache:
    """The keys and values of all layers, in blocks that are lent to requests as they grow."""

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        *,
        layout: KVLayout = "packed",
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
    ) -> None:
        self.layout, self.block_size = layout, block_size
        heads, dim = config.num_key_value_heads, config.head_dim
        x = 16 // dtype.itemsize  # the packed layout keeps 16 bytes of a key together
        key_shape, value_shape = {
            "packed": ((heads, dim // x, block_size, x), (heads, dim, block_size)),
            "NHD": ((block_size, heads, dim), (block_size, heads, dim)),
            "HND": ((heads, block_size, dim), (heads, block_size, dim)),
        }[layout]
        self.layers = [
            tuple(torch.empty(num_blocks, *s, dtype=dtype) for s in (key_shape, value_shape))
            for _ in range(config.num_hidden_layers)
        ]
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)  # scattered, as after hours of serving

    def plan(self, batch: Sequence[Request]) -> Step:
        """Lend each request the blocks its pending tokens need, and describe the pass."""
        size = self.block_size
        for request in batch:
            while len(request.blocks) * size < request.length:
                if not self.free:
                    raise RuntimeError("no free block is left: make the cache larger")
                request.blocks.append(self.free.pop())
        new = [(r, t) for r in batch for t in range(r.cached, r.length)]
        width = max(len(r.blocks) for r in batch)
        rows = [r.blocks + [-1] * (width - len(r.blocks)) for r in batch]
        starts = [0, *accumulate(len(r.pending) for r in batch)]
        return Step(
            cache=self,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([r.length for r in batch], dtype=torch.int32),
            block_tables=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=torch.tensor([r.blocks[t // size] * size + t % size for r, t in new]),
            position_ids=torch.tensor([t for _, t in new]),
        )

    def release(self, request: Request) -> None:
        """Take back the blocks of a finished request."""
        self.free += request.blocks
        request.blocks = []


def attend(
    module: Any,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, kv_heads, num_tokens, head_dim], this step's tokens alone
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Step,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer's attention for the whole batch, in the form that transformers calls."""
    cache = step.cache
    key_cache, value_cache = cache.layers[module.layer_idx]
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    pagedattn.write_kv(
        key, value, key_cache, value_cache, step.slot_mapping, kv_layout=cache.layout
    )
    out = pagedattn.paged_attention(
        query,
        key_cache,
        value_cache,
        step.block_tables,
        step.seq_lens,
        query_start_loc=step.query_start_loc,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        kv_layout=cache.layout,
    )
    return out[None], None  # [1, num_tokens, num_heads, head_dim]


@torch.inference_mode()
def generate(
    model: Any,
    cache: PagedCache,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Collection[int] = (),
    max_batch: int = 8,
) -> Iterator[tuple[int, int]]:
    """Greedy continuous batching: yields (index of the prompt, its next token).

    A prompt joins as soon as fewer than `max_batch` run, in the same pass as their next tokens.
    It leaves, and gives its blocks back, with a token of `stop` (also yielded) or its last one.
    """
    waiting = deque(Request(i, list(tokens)) for i, tokens in enumerate(prompts))
    running: list[Request] = []
    while waiting or running:
        while waiting and len(running) < max_batch:
            running.append(waiting.popleft())
        step = cache.plan(running)
        logits = model(
            input_ids=torch.tensor([[t for r in running for t in r.pending]]),
            position_ids=step.position_ids[None],
            logits_to_keep=step.query_start_loc[1:].long() - 1,  # each request's last token
            use_cache=False,
            step=step,  # handed on to `attend`
        ).logits[0]
        for request, token in zip(tuple(running), logits.argmax(-1).tolist(), strict=True):
            request.cached, request.pending = request.length, [token]
            request.produced += 1
            if token in stop or request.produced == max_new_tokens:
                running.remove(request)
                cache.release(request)
            yield request.index, token
