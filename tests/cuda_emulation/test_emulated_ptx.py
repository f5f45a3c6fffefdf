"""The emulation of ptx.cuh does what a device may do at the latest, and tells what it forbids."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from _emulation import COMPILER, HEADERS, compile_for_host, load, macros
from torch import Tensor

from pagedattn.backends.protocol import Problem

EMULATED = '-DPAGEDATTN_EMULATED_PTX="emulated_ptx.h"'
PROBLEM = Problem("cpu", torch.float16, torch.float16, 1, 1, 8, 8)
ORDERS = pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
TYPES = {"half": torch.float16, "bf16": torch.bfloat16}
# ptx_kernels.cu's enum how
RIGHT, READS_EARLY, WAITS_FOR_MORE, COPIES_MORE, MISALIGNED, NO_FENCE, TOO_FEW_ARRIVALS = range(7)
ARRIVES_TWICE, NEVER_WAITS, WRITES_BEYOND = range(7, 10)


class Probes:
    """The compiled kernels of ptx_kernels.cu."""

    def __init__(self, path: Path) -> None:
        self.library = load(path)
        self.library.emulation_bank_conflicts.restype = ctypes.c_long
        self.falling = False

    def run(
        self, name: str, given: Tensor, out: Tensor, choice: int = 0, blocks: int = 1,
        threads: int = 32, shared: int = 0, warp: int = 32,
    ) -> str:  # fmt: skip
        """The fault that was told, or nothing; the result is in `out`."""
        self.library.emulation_configure(warp, self.falling)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (given, out)]
        code = self.library[f"run_{name}"](*pointers, choice, blocks, threads, shared)
        fault = self.library.emulation_fault()
        assert (code == 0) == (fault is None)
        return (fault or b"").decode()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Probes:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    target = tmp_path_factory.mktemp("ptx") / "probes.so"
    return Probes(compile_for_host(HEADERS / "ptx_kernels.cu", target, *macros(PROBLEM), EMULATED))


@pytest.fixture
def probes(compiled: Probes) -> Probes:
    compiled.falling = False
    compiled.library.emulation_capability(9)
    compiled.library.emulation_bank_conflicts()
    return compiled


# ---- matrices


@ORDERS
@pytest.mark.parametrize("name", TYPES)
def test_a_product_of_tensor_cores(probes: Probes, name: str, falling: bool) -> None:
    probes.falling = falling
    given = torch.randn(24, 16).to(TYPES[name])
    out = torch.full((16, 8), math.nan)
    assert probes.run(f"multiplies_{name}", given, out) == ""
    a, b = given[:16], given[16:].reshape(16, 8)
    right = a.double() @ b.double()
    error = (out - right).abs()
    # 16 sums in fp32, each off by half a place of what has been summed
    assert bool((error <= 16 * 2**-24 * (a.double().abs() @ b.double().abs())).all())


def test_a_product_keeps_nan_where_the_weight_is_0(probes: Probes) -> None:
    given = torch.zeros(24, 16).half()
    given[16:].view(16, 8)[5, 3] = math.nan
    out = torch.zeros(16, 8)
    probes.run("multiplies_half", given, out)
    assert out.isnan().nonzero().tolist() == [[row, 3] for row in range(16)]


@ORDERS
def test_loads_of_matrices(probes: Probes, falling: bool) -> None:
    probes.falling = falling
    given = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    plain, transposed, turned = (torch.full((4, 8, 8), -1, dtype=torch.int16) for _ in range(3))
    for choice, out in enumerate((plain, transposed, turned)):
        assert probes.run("loads_matrices", given, out, choice) == ""
    assert torch.equal(plain, given)
    assert torch.equal(transposed, given.mT)
    assert torch.equal(turned, given.mT)
    again = torch.empty_like(turned)
    probes.run("loads_matrices", turned, again, 2)
    assert torch.equal(again, given)


def test_faults_of_matrices(probes: Probes) -> None:
    given, out = torch.zeros(256, dtype=torch.int16), torch.zeros(256, dtype=torch.int16)
    assert "aligned" in probes.run("loads_matrices", given, out, 3)
    assert "had ended" in probes.run("loads_matrices", given, out, 4)
    assert "different instructions" in probes.run("meets_in_two_places", given, out)
    assert "whole warps" in probes.run("loads_matrices", given, out, threads=16)
    assert "whole warps" in probes.run("loads_matrices", given, out, threads=64, warp=64)


def test_bank_conflicts_are_counted(probes: Probes) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    probes.run("loads_a_column", out, out, 1)
    assert probes.library.emulation_bank_conflicts() == 0
    probes.run("loads_a_column", out, out, 0)  # each row of 128 bytes begins at the same bank
    assert probes.library.emulation_bank_conflicts() == 4 * 7
    assert probes.library.emulation_bank_conflicts() == 0


# ---- bulk copies


def bulk(probes: Probes, choice: int, shared: int = 1024) -> tuple[Tensor, Tensor, str]:
    given, out = torch.randn(3, 128), torch.zeros(3, 128)
    fault = probes.run("copies_in_bulk", given, out, choice, threads=128, shared=shared)
    return given, out, fault


@ORDERS
def test_bulk_copies(probes: Probes, falling: bool) -> None:
    probes.falling = falling
    given, out, fault = bulk(probes, RIGHT)
    assert fault == ""
    assert torch.equal(out, given)


@ORDERS
def test_a_read_before_its_wait_is_nan(probes: Probes, falling: bool) -> None:
    probes.falling = falling
    _, out, fault = bulk(probes, READS_EARLY)
    assert fault == ""
    assert bool(out.isnan().all())


@ORDERS
@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (WAITS_FOR_MORE, "never complete"),
        (COPIES_MORE, "more bytes than its phase expects"),
        (MISALIGNED, "multiples of 16"),
        (NO_FENCE, "before the fence"),
        (TOO_FEW_ARRIVALS, "never complete"),
        (ARRIVES_TWICE, "nobody has seen complete"),
        (NEVER_WAITS, ""),
        (WRITES_BEYOND, "beyond the dynamic shared memory"),
    ],
)
def test_faults_of_bulk_copies(probes: Probes, choice: int, told: str, falling: bool) -> None:
    probes.falling = falling
    fault = bulk(probes, choice)[2]
    assert fault != ""
    assert told in fault


def test_bulk_copies_need_sm_90(probes: Probes) -> None:
    probes.library.emulation_capability(8)
    assert "sm_90" in bulk(probes, RIGHT)[2]


# ---- a thread's own copies


@ORDERS
@pytest.mark.parametrize("committed", [True, False])
def test_groups_of_copies(probes: Probes, committed: bool, falling: bool) -> None:
    probes.falling = falling
    given, out = torch.randn(256), torch.zeros(3, 128)
    fault = probes.run("copies_in_groups", given, out, RIGHT if committed else NEVER_WAITS)
    assert fault == ""
    if committed:  # the second group comes with the second wait
        assert torch.equal(out[0], given[:128])
        assert torch.equal(out[2], given[128:])
    else:  # one group is closed, and a wait for all but one covers none; one left open never comes
        assert bool(out[0].isnan().all())
        assert bool(out[2].isnan().all())
    assert bool(out[1].isnan().all())


def test_a_thread_copies_aligned_bytes(probes: Probes) -> None:
    out = torch.zeros(3, 128)
    assert "multiples of 16" in probes.run("copies_in_groups", torch.zeros(300), out, MISALIGNED)


# ---- launches


def test_dynamic_shared_memory_is_what_the_launch_gives(probes: Probes) -> None:
    assert "does not give" in bulk(probes, RIGHT, shared=0)[2]
    assert "beyond" in bulk(probes, RIGHT, shared=256)[2]
    assert "asked for" in bulk(probes, RIGHT, shared=49 * 1024)[2]
    assert probes.library.ask_for_shared(227 * 1024) == 0
    assert bulk(probes, RIGHT, shared=227 * 1024)[2] == ""
    assert probes.library.ask_for_shared(227 * 1024 + 1) != 0
    assert b"can have" in probes.library.emulation_fault()


def test_a_dependent_launch(probes: Probes) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    probes.library.emulation_configure(32, 0)
    assert probes.library.run_hands_over(ctypes.c_void_p(out.data_ptr()), 7) == 0
    assert out.tolist() == [7] * 32


def test_the_device_is_what_the_test_says(probes: Probes) -> None:
    probes.library.emulation_capability(8)
    probes.library.emulation_multiprocessors(132)
    assert [probes.library.device_attribute(which) for which in (75, 76, 16)] == [8, 0, 132]
    assert probes.library.device_attribute(97) == 227 * 1024
    probes.library.emulation_multiprocessors(4)


# ---- numbers


@pytest.mark.parametrize(
    ("place", "dtype"), [(0, torch.float8_e4m3fn), (1, torch.float8_e5m2), (2, torch.int8)], ids=str
)
def test_bytes_become_halves_exactly(probes: Probes, place: int, dtype: torch.dtype) -> None:
    out = torch.zeros(3, 65536, 2, dtype=torch.float16)
    assert probes.run("widens_bytes", out, out, blocks=64, threads=1024) == ""
    pairs = torch.arange(65536, dtype=torch.int32)
    two = torch.stack([pairs & 255, pairs >> 8], -1).to(torch.uint8)
    right, result = two.view(dtype).half(), out[place]
    same = (result == right) & (result.signbit() == right.signbit())
    assert bool((same | (result.isnan() & right.isnan())).all())


def test_pairs_are_rounded_as_torch_does(probes: Probes) -> None:
    special = torch.tensor([65519.0, 65520.0, -1e30, math.inf, -math.inf, math.nan, 0.0, -0.0])
    bits = torch.randint(-(2**31), 2**31, (4096 - 8 - 512,)).to(torch.int32).view(torch.float32)
    values = torch.cat([special, bits, torch.linspace(-160.0, 130.0, 512)])
    out = torch.zeros(4, 4096, dtype=torch.float16)
    assert probes.run("rounds_floats", values, out, blocks=8, threads=256) == ""
    for got, right in ((out[0], values.half()), (out[1].view(torch.bfloat16), values.bfloat16())):
        assert bool(((got == right) | (got.isnan() & right.isnan())).all())
    powers, exact = out[2:].flatten().view(torch.float32), torch.exp2(values.double())
    exact[exact < torch.finfo(torch.float32).tiny] = 0.0
    right = exact.float()
    near = (powers - right).abs() <= 2**-22 * right
    assert bool((near | (powers == right) | (powers.isnan() & right.isnan())).all())
