"""Small cache writes that are hard to get right, and their judge: the write in torch on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagedattn.backends import kv_write
from pagedattn.backends.layouts import CacheShape, cache_shapes
from pagedattn.backends.protocol import Problem, Write, Writer

_BLOCKS = 5


def make_write(problem: Problem, seed: int = 0) -> Write:
    """A `Write` of the class `problem`, on its device, into caches whose every byte is 0x11.

    Among its slots are negative ones and some beyond the cache; its numbers are subnormal,
    halfway and too large for the type. Scales are powers of two, by which any division is exact.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    size, heads = problem.block_size, problem.num_kv_heads
    count = _BLOCKS * size
    slots = torch.randperm(count, generator=generator, device="cpu")[: min(count, 40)]
    slots[1::5], slots[3::7] = -1, count + torch.arange(len(slots[3::7]), device="cpu")
    shape = (2, len(slots), heads, problem.head_dim)
    spread = torch.randint(-12, 9, shape, generator=generator, device="cpu")
    # few bits of mantissa, so that many lie halfway between two values of an 8-bit type
    steps = torch.randint(-33, 34, shape, generator=generator, device="cpu").float()
    key, value = torch.ldexp(steps, spread).to(problem.dtype)
    caches = _blank(problem)
    scale: float | Tensor | None = None if problem.kv_scales == "none" else 0.25
    if problem.kv_scales in ("tensor", "per_head"):
        exponents = torch.arange(heads if problem.kv_scales == "per_head" else 1, device="cpu") % 4
        scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 2)
    return on_device(
        Write(key, value, *caches, slots, problem.kv_layout, scale, scale), problem.device
    )


def _blank(problem: Problem) -> tuple[Tensor, Tensor]:
    size = CacheShape(_BLOCKS, problem.num_kv_heads, problem.block_size, problem.head_dim)
    key, value = (
        torch.full((*shape[:-1], shape[-1] * problem.kv_dtype.itemsize), 0x11, dtype=torch.uint8,
                   device="cpu").view(problem.kv_dtype)
        for shape in cache_shapes(size, problem.kv_dtype, problem.kv_layout)
    )  # fmt: skip
    return key, value


def on_device(w: Write, device: str) -> Write:
    """The same write with every tensor on `device`."""
    return Write(*(v.to(device) if isinstance(v, Tensor) else v for v in w))  # type: ignore[arg-type]


def judge(writer: Writer, problem: Problem) -> tuple[str, str]:
    """``ok`` or ``wrong``, and how many bytes of both caches are not what they should be."""
    w = make_write(problem)
    right = make_write(replace(problem, device="cpu"))
    kv_write.write(right)
    writer(w)
    pairs = ((w.key_cache, right.key_cache), (w.value_cache, right.value_cache))
    wrong = sum(int((_bytes(got.cpu()) != _bytes(want)).sum()) for got, want in pairs)
    if wrong == 0:
        return "ok", "bit by bit the caches that torch writes"
    return "wrong", f"{wrong} wrong bytes in the caches it wrote on {problem.device}"


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)
