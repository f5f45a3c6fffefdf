"""The portable sources compiled by nvcc for GPUs that are not here: what they need of registers,
stack and shared memory, held against the figures in portable.json. And that the instructions of
ptx.cuh compile.

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

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run by itself
from _emulation import HEADERS, macros, sources

from pagedattn.backends.protocol import Problem

NVCC = shutil.which("nvcc")
FIGURES = Path(__file__).with_name("portable.json")
SHARED_LIMIT = 32768  # bytes that every device is known to have
REGISTER_LIMIT = 255  # of a thread; 128 threads then fit twice into 64K registers
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
EACH = [(name, arch) for name, archs in ARCHS.items() for arch in archs]

_ENTRY = re.compile(
    r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers(?:[^\n]*? (\d+) bytes smem)?",
    re.DOTALL,
)
_DECODE = re.compile(r"decode_kernelILi(\d+)ELi(\d+)ENS_\d+values_(by_\w+?)ILi(\d+)E")
_WRITE = re.compile(r"cache_write_kernelILi(\d+)E")

Figures = dict[str, dict[str, int]]


def compile_for(name: str, arch: str) -> Figures:
    """Registers, stack and shared memory of each kernel, as ptxas tells them."""
    assert NVCC is not None
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(NVCC, "-std=c++17", "-O3", f"-arch={arch}", "-cubin", "-Xptxas", "-v"),
            *(*macros(CLASSES[name]), str(sources() / "portable.cu"), "-o", f"{folder}/a.cubin"),
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
    recorded = json.loads(FIGURES.read_text())
    if recorded["nvcc"] == release():  # another one may number registers otherwise
        assert found == recorded[name][arch]
    else:
        kept = recorded[name][arch]
        assert {k: f["shared"] for k, f in found.items()} == {
            k: f["shared"] for k, f in kept.items()
        }


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


def main() -> None:
    figures: dict[str, object] = {"nvcc": release()}
    for name, archs in ARCHS.items():
        figures[name] = {arch: compile_for(name, arch) for arch in archs}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
