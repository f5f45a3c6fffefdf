"""The installed torch and Triton, from their attributes, files and metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from pagedattn.backends.facts import TorchFacts, TritonFacts
from pagedattn.probe_sources import Notes, Sources

# the distributions that install a package named triton
_TRITON_DISTRIBUTIONS = ("triton", "flagtree", "pytorch-triton", "pytorch-triton-rocm")
_VERSION_LINE = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_METADATA_ERRORS = (PackageNotFoundError, OSError, ValueError, KeyError, TypeError)


def read_torch(sources: Sources, notes: Notes) -> TorchFacts:
    """The torch that is imported, and what its metadata calls it."""
    torch = sources.torch
    installed = notes.attempt(
        "torch's metadata", sources.version, "torch", default=None, errors=_METADATA_ERRORS
    )
    version = str(getattr(torch, "__version__", "unknown"))
    build = getattr(torch, "version", None)
    # a vendor may answer an attribute with anything, an exception included
    marked = notes.attempt(
        "torch.corex",
        lambda: bool(getattr(torch, "corex", False)),
        default=False,
        errors=(Exception,),
    )
    return TorchFacts(
        version=version,
        installed_version=installed,
        cuda=getattr(build, "cuda", None),
        hip=getattr(build, "hip", None),
        corex=marked or any("corex" in (v or "") for v in (version, installed)),
    )


def read_triton(sources: Sources, notes: Notes) -> TritonFacts:
    """The Triton that an import would find. It is not imported."""
    interpret = sources.flag("TRITON_INTERPRET")
    folder = notes.attempt(
        "looking for triton",
        sources.package_dir,
        "triton",
        default=None,
        errors=(ImportError, ValueError, AttributeError, OSError),
    )
    if folder is None:
        return TritonFacts(interpret=interpret)
    return TritonFacts(
        version=_triton_version(sources, folder, notes),
        backends=_triton_backends(sources, folder, notes),
        interpret=interpret,
    )


def _triton_version(sources: Sources, folder: Path, notes: Notes) -> str:
    for name in _TRITON_DISTRIBUTIONS:
        version = notes.attempt(
            f"{name}'s metadata", sources.version, name, default=None, errors=_METADATA_ERRORS
        )
        if version is not None:
            return version
    text = notes.attempt(
        "triton's version", (folder / "__init__.py").read_text, "utf-8", default=""
    )
    found = _VERSION_LINE.search(text)
    return found.group(1) if found else "unknown"


def _triton_backends(sources: Sources, folder: Path, notes: Notes) -> tuple[str, ...]:
    def folders() -> Sequence[str]:
        # each backend is a folder with its compiler; Triton before 3.0 has no such folder
        return [path.parent.name for path in (folder / "backends").glob("*/compiler.py")]

    none: Sequence[str] = ()
    named = notes.attempt(
        "Triton's entry points",
        sources.entry_points,
        "triton.backends",
        default=none,
        errors=_METADATA_ERRORS,
    )
    return tuple(sorted({*named, *notes.attempt("Triton's backends", folders, default=none)}))
