"""The portable CUDA sources compiled for this CPU, over the emulation in tests/cuda_emulation."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

from pagedattn.backends.cuda.spec import spec_of
from pagedattn.backends.protocol import Problem

HEADERS = Path(__file__).parent / "cuda_emulation"
COMPILER = shutil.which("g++")
WARP_SIZES = (32, 64)
#: tests/cuda_emulation's source of the tuned kernels without the portable ones
TUNED_ALONE = HEADERS / "tuned_kernels.cu"


def macros(problem: Problem) -> tuple[str, ...]:
    """The options that compile the sources for `problem`."""
    return spec_of(problem).macros()


def sources() -> Path:
    return Path(str(files("pagedattn.csrc")))


def tuned(arch: int) -> tuple[str, ...]:
    """The options that add the tuned kernels of an architecture (80 or 90), emulated."""
    return (f"-DPAGEDATTN_TUNED={arch}", '-DPAGEDATTN_EMULATED_PTX="emulated_ptx.h"')


def compile_for_host(source: Path, target: Path, *options: str) -> Path:
    """Compile a CUDA source into a shared library that the emulation runs."""
    assert COMPILER is not None
    command = [
        # static variables must not be shared with the libraries of other classes
        COMPILER, *("-std=c++17", "-O2", "-shared", "-fPIC", "-fno-gnu-unique"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"),
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

    def path(self, problem: Problem, *options: str, source: Path | None = None) -> Path:
        self.of(problem, *options, source=source)
        return self._place(self._key(problem, options, source))

    def of(self, problem: Problem, *options: str, source: Path | None = None) -> ctypes.CDLL:
        """`source` is the portable kernels' entry where none is named."""
        key = self._key(problem, options, source)
        if key not in self._loaded:
            entry = source or sources() / "portable.cu"
            self._loaded[key] = load(compile_for_host(entry, self._place(key), *key[1:]))
        return self._loaded[key]

    @staticmethod
    def _key(problem: Problem, options: tuple[str, ...], source: Path | None) -> tuple[str, ...]:
        return (source.stem if source else "portable", *macros(problem), *options)

    def _place(self, key: tuple[str, ...]) -> Path:
        name = "".join(k.replace("PAGEDATTN", "") for k in key)
        return self._folder / (name.replace('"', "") + ".so")
