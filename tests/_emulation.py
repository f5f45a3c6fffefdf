"""The portable CUDA sources compiled for this CPU, over the emulation in tests/cuda_emulation."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import torch

from pagedattn.backends.protocol import Problem

HEADERS = Path(__file__).parent / "cuda_emulation"
COMPILER = shutil.which("g++")
WARP_SIZES = (32, 64)
#: as csrc/pagedattn.h has them
_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int8: 3}
_CODES |= {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


def macros(problem: Problem) -> tuple[str, ...]:
    """The options that compile the sources for `problem`."""
    values = {
        "QUERY_TYPE": _CODES[problem.dtype],
        "KV_TYPE": _CODES[problem.kv_dtype],
        "HEAD_DIM": problem.head_dim,
        "GROUP": problem.group,
        "BLOCK_SIZE": problem.block_size,
    }
    return tuple(f"-DPAGEDATTN_{name}={value}" for name, value in values.items())


def sources() -> Path:
    return Path(str(files("pagedattn.csrc")))


def compile_for_host(source: Path, target: Path, *options: str) -> Path:
    """Compile a CUDA source into a shared library that the emulation runs."""
    assert COMPILER is not None
    command = [
        # static variables must not be shared with the libraries of other classes
        COMPILER, *("-std=c++17", "-O2", "-shared", "-fPIC", "-fno-gnu-unique"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        f"-I{HEADERS}", f"-I{sources()}", *options, "-x", "c++", str(source), "-o", str(target),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.emulation_fault.restype = ctypes.c_char_p
    return library


class Libraries:
    """Each class of problems compiled once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[tuple[str, ...], ctypes.CDLL] = {}

    def path(self, problem: Problem, *options: str) -> Path:
        self.of(problem, *options)
        return self._place((*macros(problem), *options))

    def of(self, problem: Problem, *options: str) -> ctypes.CDLL:
        key = (*macros(problem), *options)
        if key not in self._loaded:
            path = compile_for_host(sources() / "portable.cu", self._place(key), *key)
            self._loaded[key] = load(path)
        return self._loaded[key]

    def _place(self, key: tuple[str, ...]) -> Path:
        return self._folder / ("".join(k.replace("PAGEDATTN", "") for k in key) + ".so")
