"""NVIDIA's driver files and nvcc."""

from __future__ import annotations

from collections.abc import Iterator

from pagedattn.backends.facts import CompilerFacts
from pagedattn.probe_corex import describe, looks_like_corex
from pagedattn.probe_sources import FileKind, Notes, Sources

_DRIVER_FILES = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/dxg",  # Windows Subsystem for Linux
    "/etc/nv_tegra_release",
)

_TREE_SIGNS = ("include/cuda_runtime.h", "targets")


def nvidia_driver_seen(sources: Sources, notes: Notes) -> bool:
    """Whether the kernel has NVIDIA's driver. ``nvidia-smi`` proves nothing: others ship one."""
    return any(
        notes.attempt(path, sources.files.exists, path, default=False) for path in _DRIVER_FILES
    )


def find_nvcc(sources: Sources, notes: Notes) -> CompilerFacts:
    """nvcc of ``$CUDA_HOME``, ``$CUDA_PATH``, the PATH or ``/usr/local/cuda``.

    A script is accepted here with a note (conda and ccache wrap nvcc in one), except from a
    CoreX tree, whose nvcc is a decoy.
    """
    rejected: list[str] = []
    for path in _candidates(sources):
        missing: FileKind = "missing"
        kind = notes.attempt(path, sources.files.kind, path, default=missing)
        if kind == "missing":
            continue
        reason = _why_not(sources, path, kind, notes)
        if reason is None:
            note = "a script that wraps the compiler" if kind == "script" else None
            root = _root(sources, path, kind, notes)
            return CompilerFacts("nvcc", path, root, tuple(rejected), note)
        rejected.append(f"{path}: {reason}")
    return CompilerFacts(rejected=tuple(rejected))


def _candidates(sources: Sources) -> Iterator[str]:
    seen = set()
    roots = [sources.environ.get(name, "").rstrip("/") for name in ("CUDA_HOME", "CUDA_PATH")]
    named = [f"{root}/bin/nvcc" for root in roots if root]
    for path in (*named, sources.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if path and path not in seen:
            seen.add(path)
            yield path


def _why_not(sources: Sources, path: str, kind: FileKind, notes: Notes) -> str | None:
    if any(looks_like_corex(sources, tree) for tree in _prefixes(sources, path, notes)):
        return "a decoy: CoreX's nvcc compiles nothing"
    return None if kind in ("elf", "script") else describe(kind)


def _root(sources: Sources, path: str, kind: FileKind, notes: Notes) -> str | None:
    """The CUDA tree that `path` belongs to; a wrapper script can stand anywhere."""
    prefixes = _prefixes(sources, path, notes)
    home = sources.environ.get("CUDA_HOME", "").rstrip("/")
    for root in (*prefixes, home, "/usr/local/cuda"):
        if root and any(sources.files.exists(f"{root}/{sign}") for sign in _TREE_SIGNS):
            return root
    return prefixes[-1] if prefixes and kind == "elf" else None


def _prefixes(sources: Sources, path: str, notes: Notes) -> list[str]:
    """The trees that `path` lies in: as it is written, and with its links followed."""
    real = notes.attempt(path, sources.files.resolve, path, default=path)
    return [p.removesuffix("/bin/nvcc") for p in (path, real) if p.endswith("/bin/nvcc")]
