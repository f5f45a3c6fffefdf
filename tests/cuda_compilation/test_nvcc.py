"""The sources compiled by nvcc for GPUs that are not here: what the kernels need of registers,
stack and shared memory, held against the figures in portable.json and tuned.json. And that the
instructions of ptx.cuh compile.

`python tests/cuda_compilation/test_nvcc.py` records the figures anew.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run by itself
from _emulation import HEADERS, TUNED_ALONE, macros, sources

from pagedattn.backends.protocol import Problem

NVCC = shutil.which("nvcc")
FIGURES = Path(__file__).with_name("portable.json")
TUNED_FIGURES = Path(__file__).with_name("tuned.json")
SHARED_LIMIT = 32768  # bytes that every device is known to have
REGISTER_LIMIT = 255  # of a thread; 128 threads then fit twice into 64K registers
#: bytes on the stack, stored and loaded, that the tuned kernel whose rows share what they read may
#: have at heads of 256, where 192 of 255 registers are sums
SHARING_STACK = 512
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CLASSES = {
    "fp16-fp16-d256-g6-b16": Problem("cuda", HALF, HALF, 6, 1, 256, 16),
    "fp16-e4m3-d256-g6-b16": Problem("cuda", HALF, torch.float8_e4m3fn, 6, 1, 256, 16),
    "bf16-bf16-d128-g4-b16": Problem("cuda", BF16, BF16, 4, 1, 128, 16),
    "fp32-fp32-d256-g8-b16": Problem("cuda", FP32, FP32, 8, 1, 256, 16),
    "bf16-int8-d80-g7-b24": Problem("cuda", BF16, torch.int8, 7, 1, 80, 24),
}
ARCHS: dict[str, tuple[str, ...]] = dict.fromkeys(CLASSES, ("sm_90",))
ARCHS["fp16-fp16-d256-g6-b16"] = ("sm_75", "sm_80", "sm_90")
TUNED_CLASSES = {
    "fp16-fp16-d256-g6-b16": CLASSES["fp16-fp16-d256-g6-b16"],
    "bf16-e4m3-d256-g6-b16": Problem("cuda", BF16, torch.float8_e4m3fn, 6, 1, 256, 16),
    "bf16-bf16-d128-g4-b16": CLASSES["bf16-bf16-d128-g4-b16"],
    "fp16-int8-d80-g7-b32": Problem("cuda", HALF, torch.int8, 7, 1, 80, 32),
    "fp16-fp16-d80-g7-b24": Problem("cuda", HALF, HALF, 7, 1, 80, 24),
}
TUNED_ARCHS = ("sm_80", "sm_90")
EACH_TUNED = [(name, arch) for name in TUNED_CLASSES for arch in TUNED_ARCHS]
EACH = [(name, arch) for name, archs in ARCHS.items() for arch in archs]

_ENTRY = re.compile(
    r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers(?:[^\n]*? (\d+) bytes smem)?",
    re.DOTALL,
)
_DECODE = re.compile(r"decode_kernelILi(\d+)ELi(\d+)ENS_\d+values_(by_\w+?)ILi(\d+)E")
_TUNED = re.compile(r"tuned_decode_kernelILNS_\d+kv_orderE(\d)ELi(\d)ELb(\d)E")
_MERGE = re.compile(r"merge_shapeILi(\d+)ELi(\d+)E")
_ORDERS = ("packed", "rows", "swizzled")
_WRITE = re.compile(r"cache_write_kernelILi(\d+)E")

Figures = dict[str, dict[str, int]]


def compile_for(name: str, arch: str) -> Figures:
    """Registers, stack and shared memory of each portable kernel, as ptxas tells them."""
    return _figures(arch, sources() / "portable.cu", *macros(CLASSES[name]))


def compile_tuned(name: str, arch: str) -> Figures:
    """The same of the tuned kernels alone; the dynamic shared memory is not in it."""
    options = (*macros(TUNED_CLASSES[name]), _tuned(arch), f"-I{sources()}")
    found = _figures(arch, TUNED_ALONE, *options)
    return {kernel: figures for kernel, figures in found.items() if kernel.startswith("tuned")}


def _tuned(arch: str) -> str:
    return f"-DPAGEDATTN_TUNED={arch.removeprefix('sm_')}"


def _figures(arch: str, source: Path, *options: str) -> Figures:
    assert NVCC is not None
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(NVCC, "-std=c++17", "-O3", f"-arch={arch}", "-cubin", "-Xptxas", "-v"),
            *(*options, str(source), "-o", f"{folder}/a.cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    found = {}
    for symbol, stack, stores, loads, registers, shared in _ENTRY.findall(done.stderr):
        found[_short(symbol)] = {
            "registers": int(registers),
            "stack": int(stack) + int(stores) + int(loads),
            "shared": int(shared or 0),
        }
    return dict(sorted(found.items()))


def _short(symbol: str) -> str:
    """``decode rows=6 key=8 by_token=8``, ``write 8``, or the kernel's own name."""
    if "tuned" in symbol:
        order, shape = _TUNED.search(symbol), _MERGE.search(symbol)
        if shape is not None:
            return f"tuned merge dims={shape[1]} warps={shape[2]}"
        if order is None:
            return "tuned rest" if "rest_kernel" in symbol else symbol
        form = " sharing" if int(order[2]) > 1 else " clustered" if order[3] == "1" else ""
        return f"tuned decode {_ORDERS[int(order[1])]}{form}"
    match = _DECODE.search(symbol)
    if match is None:
        write = _WRITE.search(symbol)
        return f"write {write[1]}" if write else "merge" if "merge_kernel" in symbol else symbol
    rows, key, policy, width = match.groups()
    return f"decode rows={rows} key={key} {policy}={width}"


def release() -> str:
    assert NVCC is not None
    done = subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True)
    match = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    assert match is not None, done.stdout
    return match[1]


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("name", "arch"), EACH, ids=[f"{n}-{a}" for n, a in EACH])
def test_portable_kernels_fit_every_device(name: str, arch: str) -> None:
    found = compile_for(name, arch)
    assert len([kernel for kernel in found if kernel.startswith("decode")]) in (3, 6)
    assert {"merge", "write 1"} < found.keys()
    for kernel, figures in found.items():
        assert figures["shared"] <= SHARED_LIMIT, kernel
        assert figures["stack"] == 0, f"{kernel} spills"
        assert figures["registers"] <= REGISTER_LIMIT, kernel
    _hold_to_record(found, json.loads(FIGURES.read_text()), name, arch)


def _hold_to_record(found: Figures, recorded: dict[str, Any], name: str, arch: str) -> None:
    kept: Figures = recorded[name][arch]
    if recorded["nvcc"] == release():  # another one may number registers otherwise
        assert found == kept
    else:
        assert {k: f["shared"] for k, f in found.items()} == {
            k: f["shared"] for k, f in kept.items()
        }


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("name", "arch"), EACH_TUNED, ids=[f"{n}-{a}" for n, a in EACH_TUNED])
def test_tuned_kernels_keep_all_in_registers(name: str, arch: str) -> None:
    found = compile_tuned(name, arch)
    assert [kernel.startswith("tuned merge dims=") for kernel in found].count(True) == 3
    assert [kernel.endswith(" sharing") for kernel in found].count(True) == 2
    clustered = [kernel for kernel in found if kernel.endswith(" clustered")]
    assert len(clustered) == (2 if arch == "sm_90" else 0)
    assert len(found) == 8 + len(clustered)
    for kernel, figures in found.items():
        crowded = kernel.endswith(" sharing") and TUNED_CLASSES[name].head_dim == 256
        assert figures["stack"] <= (SHARING_STACK if crowded else 0), f"{kernel} spills"
    _hold_to_record(found, json.loads(TUNED_FIGURES.read_text()), name, arch)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", TUNED_ARCHS)
def test_bulk_copies_are_for_the_devices_that_have_them(arch: str, tmp_path: Path) -> None:
    assert NVCC is not None
    command = [
        *(NVCC, "-std=c++17", "-O3", f"-arch={arch}", "-ptx", _tuned(arch), f"-I{sources()}"),
        *macros(TUNED_CLASSES["fp16-fp16-d256-g6-b16"]),
        *(str(TUNED_ALONE), "-o", str(tmp_path / "a.ptx")),
    ]
    subprocess.run(command, timeout=300, check=True)
    code = (tmp_path / "a.ptx").read_text()
    for newer in ("cp.async.bulk", "mbarrier", "griddepcontrol", "createpolicy"):
        assert (newer in code) == (arch == "sm_90"), newer
    assert "cp.async.cg" in code or arch == "sm_90"
    assert "trap" not in code
    # swizzled copies count on it
    assert re.search(r"\.extern \.shared \.align 1024 ", code)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_libraries_share_no_variables(tmp_path: Path) -> None:
    """One that says what a device was asked for would speak for the kernels of another class."""
    assert NVCC is not None
    command = [
        *(NVCC, "-std=c++17", "-O1", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"),
        *(*macros(TUNED_CLASSES["fp16-int8-d80-g7-b32"]), _tuned("sm_90"), f"-I{sources()}"),
        *(str(TUNED_ALONE), "-o", str(tmp_path / "a.so")),
    ]
    subprocess.run(command, timeout=300, check=True)
    told = subprocess.run(["nm", tmp_path / "a.so"], capture_output=True, text=True, check=True)
    assert "allowed" in told.stdout
    assert re.findall(r"^\S+ u .*pagedattn.*", told.stdout, re.MULTILINE) == []


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_instructions_compile_for_the_devices_that_have_them(arch: str, tmp_path: Path) -> None:
    assert NVCC is not None
    command = [
        *(NVCC, "-std=c++17", "-O3", f"-arch={arch}", "-cubin", "--keep", "-Xptxas", "-v"),
        *(f"--keep-dir={tmp_path}", *macros(CLASSES["fp16-fp16-d256-g6-b16"])),
        *(f"-I{sources()}", str(HEADERS / "ptx_kernels.cu"), "-o", str(tmp_path / "a.cubin")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    code = (tmp_path / "ptx_kernels.ptx").read_text()
    for everywhere in ("mma.sync", "ldmatrix.sync", "movmatrix.sync", "cp.async.cg"):
        assert everywhere in code
    for newer in ("cp.async.bulk", "mbarrier.try_wait", "griddepcontrol", "e4m3x2"):
        assert (newer in code) == (arch == "sm_90"), newer


def test_every_class_is_recorded() -> None:
    recorded = json.loads(FIGURES.read_text())
    assert {name: tuple(recorded[name]) for name in CLASSES} == ARCHS
    recorded = json.loads(TUNED_FIGURES.read_text())
    assert {tuple(recorded[name]) for name in TUNED_CLASSES} == {TUNED_ARCHS}


def main() -> None:
    figures: dict[str, object] = {"nvcc": release()}
    for name, archs in ARCHS.items():
        figures[name] = {arch: compile_for(name, arch) for arch in archs}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    figures = {"nvcc": release()}
    for name in TUNED_CLASSES:
        figures[name] = {arch: compile_tuned(name, arch) for arch in TUNED_ARCHS}
    TUNED_FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
