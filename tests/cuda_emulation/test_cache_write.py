"""The compiled cache write with warps of 32 and of 64, bit by bit against the one in torch."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from _emulation import (
    COMPILER,
    HEADERS,
    WARP_SIZES,
    Libraries,
    compile_for_host,
    load,
    macros,
)
from torch import Tensor

from pagedattn.backends import kv_write
from pagedattn.backends.cuda.write import CudaWriter
from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.layouts import CacheShape, cache_shapes
from pagedattn.backends.protocol import KVLayout, Problem, Write

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [*product((FP32, FP16, BF16), (INT8, E4M3, E5M2)), (FP32, FP32), (FP16, FP16), (BF16, BF16)]
SLOTS = [33, 0, -1, 95, 16, -(2**31), 96, 2**31 - 1, 17, 47, 48, 60, 61, 62, 63, 64, 1, 2, 3, -7]
every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
every_pair = pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda p: "-".join(str(t).removeprefix("torch.") for t in p)
)


Build = Callable[[torch.dtype, torch.dtype], ctypes.CDLL]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("cache_write")

    @functools.cache
    def build(dtype: torch.dtype, kv_dtype: torch.dtype) -> ctypes.CDLL:
        target = folder / f"{dtype}-{kv_dtype}.so"
        options = macros(Problem("cpu", dtype, kv_dtype, 1, 1, 8, 8))
        return load(compile_for_host(HEADERS / "cache_write.cu", target, *options))

    return build


def write_of(
    pair: tuple[torch.dtype, torch.dtype], layout: KVLayout, head_dim: int = 32, **changes: Any
) -> Write:
    """20 tokens, of which 5 are skipped, into 6 blocks of 16 whose every byte is 0x11."""
    dtype, kv_dtype = pair
    shapes = cache_shapes(CacheShape(6, 3, 16, head_dim), kv_dtype, layout)
    caches = (
        torch.full((math.prod(s) * kv_dtype.itemsize,), 0x11, dtype=torch.uint8).view(kv_dtype)
        for s in shapes
    )
    key_cache, value_cache = (c.view(s) for c, s in zip(caches, shapes, strict=True))
    key, value = (100 * torch.randn(2, len(SLOTS), 3, head_dim)).to(dtype)
    given = Write(key, value, key_cache, value_cache, torch.tensor(SLOTS), layout, None, None)
    return given._replace(**changes)


def judge(build: Build, w: Write) -> None:
    """Both caches are what torch makes of them, with each warp size and order of threads."""
    right = w._replace(key_cache=w.key_cache.clone(), value_cache=w.value_cache.clone())
    kv_write.write(right)
    library = build(w.key.dtype, w.key_cache.dtype)
    before = [bytes_of(t).clone() for t in (w.key_cache, w.value_cache)]
    for warp, falling in zip(WARP_SIZES, (False, True), strict=True):
        for cache, old in zip((w.key_cache, w.value_cache), before, strict=True):
            bytes_of(cache).copy_(old)
        library.emulation_configure(warp, falling)
        CudaWriter(library, "cpu")(w)
        assert library.emulation_fault() is None
        for got, want in ((w.key_cache, right.key_cache), (w.value_cache, right.value_cache)):
            assert torch.equal(bytes_of(got), bytes_of(want))


def bytes_of(t: Tensor) -> Tensor:
    """A view of plain integers: a NaN is equal to itself, and fp8 can be copied."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


@every_layout
@every_pair
def test_types(build: Build, pair: Any, layout: KVLayout) -> None:
    judge(build, write_of(pair, layout))
    judge(build, write_of(pair, layout, k_scale=0.7, v_scale=3))
    each, one = torch.tensor([0.3, 7.0, 1.1]), torch.tensor(0.9)
    judge(build, write_of(pair, layout, k_scale=each, v_scale=one))


@every_layout
def test_slots_of_32_bits_and_of_any_stride(build: Build, layout: KVLayout) -> None:
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    judge(build, write_of((FP16, FP16), layout, slot_mapping=slots))
    apart = torch.full((len(SLOTS), 3), 5)
    apart[:, 1] = slots
    judge(build, write_of((FP16, FP16), layout, slot_mapping=apart[:, 1]))


@every_layout
@pytest.mark.parametrize("slot", [2**40, -(2**62), 96, -1])
def test_a_slot_out_of_range_writes_nothing(build: Build, layout: KVLayout, slot: int) -> None:
    slots = torch.full((len(SLOTS),), slot)
    w = write_of((FP16, E4M3), layout, slot_mapping=slots)
    judge(build, w)
    assert bool((w.key_cache.view(torch.uint8) == 0x11).all())


@every_layout
@pytest.mark.parametrize("count", [1, 2, 15, 17])
def test_few_tokens(build: Build, layout: KVLayout, count: int) -> None:
    w = write_of((BF16, BF16), layout)
    few = {n: getattr(w, n)[-count:] for n in ("key", "value", "slot_mapping")}
    judge(build, w._replace(**few))


@pytest.mark.parametrize("pair", [(FP16, FP16), (FP16, INT8), (FP32, E5M2)], ids=str)
@every_layout
def test_strides_that_wide_accesses_cannot_have(build: Build, pair: Any, layout: KVLayout) -> None:
    w = write_of(pair, layout)
    fused = torch.full((len(SLOTS), 9, 35), math.nan, dtype=pair[0])
    fused[:, 1:4, 2:34], fused[:, 5:8, 1:33] = w.key, w.value
    judge(build, w._replace(key=fused[:, 1:4, 2:34], value=fused[:, 5:8, 1:33]))
    judge(build, w._replace(key=w.key.transpose(1, 2).contiguous().transpose(1, 2)))
    judge(build, w._replace(key=w.key[:1].expand(len(SLOTS), 3, 32)))
    shifted = [torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape) for t in w[2:4]]
    judge(build, w._replace(key_cache=shifted[0], value_cache=shifted[1]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_of_one_interleaved_buffer(build: Build, layout: KVLayout) -> None:
    w = write_of((FP16, FP16), layout)
    pool = torch.stack([w.key_cache, w.value_cache], dim=1)
    judge(build, w._replace(key_cache=pool[:, 0], value_cache=pool[:, 1]))


@pytest.mark.parametrize("head_dim", [7, 33, 80, 96])
def test_any_head_size(build: Build, head_dim: int) -> None:
    judge(build, write_of((FP16, E4M3), "NHD", head_dim))


@every_pair
def test_every_kind_of_number(build: Build, pair: Any) -> None:
    """Every fp16, their midpoints and neighbours, what underflows and what overflows. (The bits
    of a NaN in 16 or 32 bits may be any NaN's.)"""
    halves = torch.arange(1 << 16).to(torch.int16).view(FP16).float()
    halves = halves[halves.isfinite()].sort().values
    near = torch.nextafter(halves, torch.tensor(0.0))
    numbers = torch.cat([halves, (halves[1:] + halves[:-1]) / 2, near, halves * 1e-5, halves * 300])
    special = torch.tensor([math.inf, -math.inf, 464.0, -464.0, 448.0, 480.0, 57344.0, 61440.0,
                            0.5, 1.5, 2.5, -126.5, 127.5, -0.0, 1e38, 1e-45])  # fmt: skip
    numbers = torch.cat([special, numbers])
    if pair[1] in (E4M3, E5M2):
        numbers = torch.cat([torch.tensor([math.nan]), numbers])
    numbers = numbers[: len(numbers) // 96 * 96].view(-1, 3, 32).to(pair[0])
    shape = cache_shapes(CacheShape(-(-len(numbers) // 16), 3, 16, 32), pair[1], "NHD")[0]
    cache, other = torch.zeros(2, *shape).to(pair[1])
    slots = torch.arange(len(numbers))
    judge(build, Write(numbers, numbers, cache, other, slots, "NHD", None, 1.5))


def test_a_nan_in_an_integer_cache_is_0(build: Build) -> None:
    w = write_of((FP16, INT8), "NHD", key=torch.full((20, 3, 32), math.nan, dtype=FP16))
    CudaWriter(build(FP16, INT8), "cpu")(w)
    assert bool((w.key_cache[0, 0] == 0).all())


def test_the_whole_library_has_it(libraries: Libraries) -> None:
    library = libraries.of(Problem("cpu", FP16, FP16, 12, 2, 256, 16), "-D__ILUVATAR__")
    w = write_of((FP16, FP16), "packed")
    CudaWriter(library, "cpu")(w)
    right = write_of((FP16, FP16), "packed", key=w.key, value=w.value)
    kv_write.write(right)
    assert torch.equal(bytes_of(w.key_cache), bytes_of(right.key_cache))


def test_a_library_without_it_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="interface 0"):
        CudaWriter(ctypes.CDLL(None), "cpu")
