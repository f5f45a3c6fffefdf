"""Scenes: dense sequences with a query, and the paged cache that holds them.

A test states its sequences densely, so that what is right can be computed without any paging;
`Scene.page` scatters them over a cache in which everything unused is poison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from _places import Place
from torch import Tensor

import pagedattn
from pagedattn.backends.protocol import KVLayout

INT_MAX = 2**31 - 1


class Result(NamedTuple):
    out: Tensor  # [num_tokens, num_heads, head_dim]
    lse: Tensor  # float32 [num_tokens, num_heads]


@dataclass
class Paged:
    """A cache and what finds the sequences in it."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    seq_lens: Tensor  # int32 [num_seqs]
    kv_layout: KVLayout


@dataclass
class Scene:
    """Sequences of keys and values, float32 ``[L, num_kv_heads, head_dim]`` each, exact in
    `kv_dtype`; `query_lens` is None where each has one query token."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    keys: list[Tensor]
    values: list[Tensor]
    kv_dtype: torch.dtype
    query_lens: list[int] | None = None
    features: dict[str, Any] = field(default_factory=dict)  # options that change the result

    @property
    def lengths(self) -> list[int]:
        return [keys.shape[0] for keys in self.keys]

    @property
    def starts(self) -> list[int]:
        counts = self.query_lens or [1] * len(self.keys)
        return [sum(counts[:i]) for i in range(len(counts) + 1)]

    def only(self, sequence: int) -> Scene:
        """The scene in which one sequence is alone."""
        first, end = self.starts[sequence], self.starts[sequence + 1]
        return Scene(
            self.query[first:end],
            [self.keys[sequence]],
            [self.values[sequence]],
            self.kv_dtype,
            None if self.query_lens is None else [end - first],
            self.features,
        )

    def page(
        self,
        layout: KVLayout = "NHD",
        block_size: int = 16,
        *,
        poison: float = math.nan,
        pads: Sequence[int] = (-1, INT_MAX),
        columns: int | None = None,
        spare: int = 3,
        device: str = "cpu",
    ) -> Paged:
        """Scatter the sequences over shuffled blocks; block 0 and `spare` − 1 more hold nothing."""
        counts = [-(-length // block_size) for length in self.lengths]
        num_blocks = sum(counts) + spare
        ids = 1 + torch.randperm(num_blocks - 1)
        tables = torch.empty(len(counts), columns or max(counts) + 2, dtype=torch.int32)
        for i, pad in enumerate(pads):
            tables[:, i :: len(pads)] = pad
        shape = (2, num_blocks * block_size, *self.keys[0].shape[1:])
        pool = torch.full(shape, 127.0 if self.kv_dtype == torch.int8 else poison)
        first = 0
        for row, count in enumerate(counts):
            mine = ids[first : first + count]
            tables[row, :count] = mine.to(torch.int32)
            slots = (mine[:, None] * block_size + torch.arange(block_size)).flatten()
            slots = slots[: self.lengths[row]]
            pool[0, slots], pool[1, slots] = self.keys[row], self.values[row]
            first += count
        keys, values = pool.unflatten(1, (num_blocks, block_size)).to(self.kv_dtype)
        return Paged(
            arrange_keys(keys, layout).to(device),
            arrange_values(values, layout).to(device),
            tables.to(device),
            torch.tensor(self.lengths, dtype=torch.int32, device=device),
            layout,
        )


def _movable(t: Tensor) -> Tensor:
    """fp8 cannot be copied through strides by every torch; its bytes can."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def arrange_keys(dense: Tensor, layout: KVLayout) -> Tensor:
    """Keys ``[num_blocks, block_size, num_kv_heads, head_dim]`` in `layout`."""
    t = _movable(dense)
    if layout == "HND":
        t = t.permute(0, 2, 1, 3)
    elif layout == "packed":
        x = 16 // dense.element_size()
        n, bs, kv, d = dense.shape
        t = t.reshape(n, bs, kv, d // x, x).permute(0, 2, 3, 1, 4)
    return t.contiguous().view(dense.dtype)


def arrange_values(dense: Tensor, layout: KVLayout) -> Tensor:
    """Values ``[num_blocks, block_size, num_kv_heads, head_dim]`` in `layout`."""
    order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "packed": (0, 2, 3, 1)}[layout]
    return _movable(dense).permute(order).contiguous().view(dense.dtype)


def make_scene(
    lengths: Sequence[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    query_lens: Sequence[int] | None = None,
    **features: Any,
) -> Scene:
    """Random sequences; the query is large enough that softmax picks some keys over others."""
    kv_dtype = kv_dtype or dtype
    spread = 24.0 if kv_dtype == torch.int8 else 1.0

    def stored(length: int) -> Tensor:
        made = spread * torch.randn(length, kv_heads, head_dim)
        made = made.round().clamp(-127, 127) if kv_dtype == torch.int8 else made
        return made.to(kv_dtype).float()

    tokens = len(lengths) if query_lens is None else sum(query_lens)
    return Scene(
        (2 * torch.randn(tokens, heads, head_dim)).to(dtype),
        [stored(n) for n in lengths],
        [stored(n) for n in lengths],
        kv_dtype,
        None if query_lens is None else list(query_lens),
        features,
    )


def run(
    scene: Scene,
    place: Place,
    layout: KVLayout = "NHD",
    block_size: int = 16,
    *,
    paged: Paged | None = None,
    **options: Any,
) -> Result:
    """The scene through the public function, into memory that holds NaN; results on the CPU.

    What a backend says that it cannot do skips the test, with what it said.
    """
    cache = paged or scene.page(layout, block_size, device=place.device)
    given: dict[str, Any] = {**vars(cache), **scene.features, **options}
    if scene.query_lens is not None:
        given.setdefault("query_start_loc", torch.tensor(scene.starts, dtype=torch.int32))
    given.setdefault("query", scene.query)
    given = {k: v.to(place.device) if isinstance(v, Tensor) else v for k, v in given.items()}
    query = given.pop("query")
    out = given.pop("out", None)
    if out is None:
        out = torch.full_like(query, math.nan)
    given.setdefault("backend", place.backend)
    try:
        result, lse = pagedattn.paged_attention(query, out=out, return_lse=True, **given)
    except pagedattn.BackendUnavailable as error:
        reasons = [c.reasons for c in error.record or () if c.supported is False]
        if not reasons:
            raise
        pytest.skip(f"{place.backend} says: {'; '.join(reasons[0])}")
    assert result is out
    assert lse.dtype == torch.float32
    assert lse.shape == query.shape[:2]
    return Result(result.cpu(), lse.cpu())
