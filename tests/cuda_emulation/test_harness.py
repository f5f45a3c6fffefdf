"""The emulation shows the faults that it is for, and the small parts of the sources are right."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from _emulation import COMPILER, HEADERS, WARP_SIZES, compile_for_host, load, macros
from torch import Tensor

from pagedattn.backends.protocol import Problem

Build = Callable[[Problem], ctypes.CDLL]
PROBLEM = Problem("cpu", torch.float16, torch.float8_e4m3fn, 1, 1, 8, 8)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("kernels")

    def build(problem: Problem) -> ctypes.CDLL:
        target = folder / f"{abs(hash(problem))}.so"
        return load(compile_for_host(HEADERS / "kernels.cu", target, *macros(problem)))

    return build


@pytest.fixture(scope="module")
def kernels(build: Build) -> ctypes.CDLL:
    return build(PROBLEM)


def run(kernels: ctypes.CDLL, name: str, warp: int, falling: bool = False) -> tuple[Tensor, str]:
    """What a kernel makes of 1 … 128, and the fault that was told."""
    data = torch.arange(1.0, 129.0)
    kernels.emulation_configure(warp, falling)
    code = kernels[f"run_{name}"](ctypes.c_void_p(data.data_ptr()))
    fault = kernels.emulation_fault()
    assert (code == 0) == (fault is None)
    return data, (fault or b"").decode()


def test_a_kernel_that_takes_warps_for_32_is_wrong_at_64(kernels: ctypes.CDLL) -> None:
    values = torch.arange(1.0, 129.0)
    right = values / values.view(4, 32)[:, :1].repeat(1, 32).flatten()
    assert torch.equal(run(kernels, "takes_warps_for_32", 32)[0], right)
    wrong, fault = run(kernels, "takes_warps_for_32", 64)
    assert fault == ""
    assert torch.equal(wrong[:32], right[:32])
    assert not torch.equal(wrong[32:64], right[32:64])
    for warp in WARP_SIZES:
        assert torch.equal(run(kernels, "names_its_width", warp)[0], right)


@pytest.mark.parametrize("warp", WARP_SIZES)
def test_a_missing_barrier_shows_in_one_order_or_the_other(kernels: ctypes.CDLL, warp: int) -> None:
    rising, falling = (run(kernels, "forgets_a_barrier", warp, order)[0] for order in (False, True))
    assert not torch.equal(rising, falling)


def test_a_branch_that_only_whole_warps_of_32_may_take_is_told(kernels: ctypes.CDLL) -> None:
    assert run(kernels, "shuffles_in_a_branch", 32)[1] == ""
    assert "wait for others" in run(kernels, "shuffles_in_a_branch", 64)[1]


def test_a_mask_of_32_lanes_is_told(kernels: ctypes.CDLL) -> None:
    assert run(kernels, "names_32_lanes", 32)[1] == ""
    assert "mask" in run(kernels, "names_32_lanes", 64)[1]


@pytest.mark.parametrize("warp", WARP_SIZES)
def test_a_barrier_in_a_branch_is_told(kernels: ctypes.CDLL, warp: int) -> None:
    assert "had ended" in run(kernels, "barrier_in_a_branch", warp)[1]


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("warp", WARP_SIZES)
def test_block_reductions(kernels: ctypes.CDLL, warp: int, falling: bool) -> None:
    data, fault = run(kernels, "reduces", warp, falling)
    assert fault == ""
    assert data[::2].tolist() == [128 * 129 / 2] * 64
    assert data[1::2].tolist() == [128.0] * 64


def _combine(
    kernels: ctypes.CDLL, left: tuple[float, float], right: tuple[float, float]
) -> list[float]:
    given = [(ctypes.c_float * 2)(*pair) for pair in (left, right)]
    result = (ctypes.c_float * 4)()
    kernels.combine_states(*given, result)
    return list(result)


def test_combine_has_its_identity_and_keeps_poison(kernels: ctypes.CDLL) -> None:
    empty = (-math.inf, 0.0)
    assert _combine(kernels, empty, empty)[:2] == list(empty)
    assert _combine(kernels, (3.0, 2.0), empty) == [3.0, 2.0, 1.0, 0.0]
    assert _combine(kernels, empty, (-7.0, 2.0)) == [-7.0, 2.0, 0.0, 1.0]
    assert _combine(kernels, (1.0, 2.0), (3.0, 5.0)) == [3.0, 5.5, 0.25, 1.0]
    for other in (empty, (200.0, 1.0), (-200.0, 1.0)):
        assert math.isnan(_combine(kernels, (0.0, math.nan), other)[1])


KV_TYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.mark.parametrize("dtype", KV_TYPES, ids=str)
def test_every_value_of_a_stored_type(build: Build, dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    narrow = bits.to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    right = narrow.view(dtype).float()
    result = torch.full_like(right, math.nan)
    library = build(replace(PROBLEM, kv_dtype=dtype))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (bits, result)]
    library.kv_to_float(*pointers, len(bits))
    same = (result == right) & (result.signbit() == right.signbit())
    assert bool((same | (result.isnan() & right.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_results_are_rounded_as_torch_does(build: Build, dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32)
    every_half = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float()
    halfway = (every_half[:-1] + every_half[1:]) / 2
    special = torch.tensor([65519.0, 65520.0, math.inf, -math.inf, math.nan, 3e38, -3.4e38, 0.0])
    values = torch.cat([bits.view(torch.float32), every_half, halfway, special])
    result = torch.zeros(values.shape, dtype=dtype)
    library = build(replace(PROBLEM, dtype=dtype))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (values, result)]
    library.float_to_query(*pointers, len(values))
    right = values.to(dtype)
    assert bool(((result == right) | (result.isnan() & right.isnan())).all())
