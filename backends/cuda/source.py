"""The CUDA sources: where they are, and a hash of what they say."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from pathlib import Path

from pagedattn.backends.errors import BuildError

ENTRY = "portable.cu"
_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")


def folder() -> Path:
    """The folder of the sources, also where the package is installed."""
    return Path(str(resources.files("pagedattn.csrc")))


def entry() -> Path:
    """The file to compile.

    Raises
    ------
    BuildError
        If this installation has none.
    """
    path = folder() / ENTRY
    if not path.is_file():
        raise BuildError(f"{path} is not there: this version of pagedattn has no CUDA sources")
    return path


def content_hash() -> str:
    """Of the names and contents of all source files: any change makes another binary."""
    return _hash(folder())


@functools.cache
def _hash(where: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in where.rglob("*") if p.suffix in _SUFFIXES):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(where).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:16]
