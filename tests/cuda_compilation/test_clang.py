"""The portable sources compiled by clang 16 in CUDA mode, which CoreX's compiler is made from.

Beside it there must be the CUDA headers of that age: CUDA11_WHEELS names a folder into which
`pip install --no-deps --target` put nvidia-cuda-runtime-cu11 and nvidia-cuda-nvcc-cu11 (they
cannot lie beside those that a newer torch brings).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from _emulation import macros, sources

from pagedattn.backends.protocol import Problem

CLANG = shutil.which("clang++-16")
WHEELS = os.environ.get("CUDA11_WHEELS", "")
SHARED_LIMIT = 32768  # bytes that every device is known to have
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CLASSES = {
    "fp16-fp16-d256-g6-b16": Problem("cuda", HALF, HALF, 6, 1, 256, 16),
    "bf16-e4m3-d128-g4-b16": Problem("cuda", BF16, torch.float8_e4m3fn, 4, 1, 128, 16),
    "fp32-fp32-d256-g8-b16": Problem("cuda", FP32, FP32, 8, 1, 256, 16),
    "fp16-int8-d64-g3-b16": Problem("cuda", HALF, torch.int8, 3, 1, 64, 16),
}
DEVICE = ("--cuda-gpu-arch=sm_70", "--cuda-device-only", "--no-cuda-version-check", "-S")
HOST = ("--cuda-host-only", "-fsyntax-only")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What --cuda-path names: the two wheels' folders as one."""
    if CLANG is None:
        pytest.skip("clang++-16 is not installed")
    folders = [Path(WHEELS) / "nvidia" / name for name in ("cuda_runtime", "cuda_nvcc")]
    if not WHEELS or not all(folder.is_dir() for folder in folders):
        pytest.skip("CUDA11_WHEELS names no folder with CUDA 11's headers")
    root = tmp_path_factory.mktemp("cuda")
    for folder in folders:
        for path in folder.rglob("*"):
            place = root / path.relative_to(folder)
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.symlink_to(path)
    # clang includes it for names that it declares otherwise; it is of another wheel
    (root / "include" / "curand_mtgp32_kernel.h").touch()
    return root


def compile_source(cuda: Path, source: Path, target: Path, *options: str) -> str:
    """Compile as CoreX's compiler is called; returns the device code, or nothing for the host."""
    assert CLANG is not None
    command = [
        *(CLANG, "-x", "cuda", f"--cuda-path={cuda}", "-std=c++17", "-O3", "-D__ILUVATAR__"),
        *("-Wall", "-Wextra", "-Wno-unknown-cuda-version", f"-I{sources()}", *options),
        *(str(source), "-o", str(target)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return target.read_text() if target.exists() else ""


def faults(code: str) -> list[str]:
    """What the device code holds that must not be there."""
    found = []
    if ".local" in code:
        found.append("an array that is not in registers")
    if re.search(r"\.f64\b", code):
        found.append("double precision")
    if re.search(r"\bcall\b", code):
        found.append("a call that was not inlined")
    shared = [int(n) for n in re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code)]
    if not shared or max(shared) > SHARED_LIMIT:
        found.append(f"shared memory of {shared} bytes")
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_corex_compiler_takes_the_portable_sources(cuda: Path, tmp_path: Path, name: str) -> None:
    options = (*DEVICE, *macros(CLASSES[name]))
    code = compile_source(cuda, sources() / "portable.cu", tmp_path / "a.ptx", *options)
    kernels = re.findall(r"\.entry \w*?(\w+_kernel)", code)
    assert sum("decode_kernel" in k for k in kernels) in (3, 6)
    assert any("merge_kernel" in k for k in kernels)
    assert faults(code) == []


def test_corex_compiler_takes_the_launches(cuda: Path, tmp_path: Path) -> None:
    options = (*HOST, *macros(CLASSES["fp16-fp16-d256-g6-b16"]))
    compile_source(cuda, sources() / "portable.cu", tmp_path / "a.o", *options)


def test_what_it_would_not_take_is_told(cuda: Path, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void f(float *x) { *x = __shfl_xor_sync(~0ull, *x, 1, 32); }")
    with pytest.raises(AssertionError, match="changes value"):
        compile_source(cuda, source, tmp_path / "a.ptx", *DEVICE)
    source.write_text(
        "__global__ void f(float *x, double y, int n) {"
        " float a[9]; for (float& e : a) e = x[n++]; x[0] = y * a[n]; }"
    )
    assert faults(compile_source(cuda, source, tmp_path / "a.ptx", *DEVICE)) == [
        "an array that is not in registers",
        "double precision",
        "shared memory of [] bytes",
    ]
