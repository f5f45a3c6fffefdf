"""The CoreX tree and the compiler in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pagedattn.backends.facts import CompilerFacts, TorchFacts
from pagedattn.probe_sources import Notes, Sources

_DEFAULT_ROOT = "/usr/local/corex"
_LIBRARY_FOLDERS = ("lib64", "lib")
_VERSION = re.compile(r"corex[.-](\d+(?:\.\d+)*)")


def looks_like_corex(sources: Sources, root: str) -> bool:
    """Whether the tree at `root` is a CoreX SDK, by its name or the vendor's own files."""
    if "corex" in sources.files.resolve(root).rsplit("/", 1)[-1].lower():
        return True
    signs = ("bin/ixsmi", "bin/ixcc", *(f"{lib}/libixml.so" for lib in _LIBRARY_FOLDERS))
    return any(sources.files.exists(f"{root}/{sign}") for sign in signs)


def find_corex_root(sources: Sources, notes: Notes) -> str | None:
    """The first of ``$COREX_HOME``, ``$COREX_PATH``, ``$COREX_ROOT``, ``$CUDA_HOME`` (if it is
    a CoreX tree) and ``/usr/local/corex`` that is a folder."""
    for name in ("COREX_HOME", "COREX_PATH", "COREX_ROOT"):
        root = sources.environ.get(name, "").rstrip("/")
        if not root:
            continue
        if notes.attempt(name, sources.files.is_dir, root, default=False):
            return root
        notes.add(f"{name}={root} is not a folder")
    for root in (sources.environ.get("CUDA_HOME", "").rstrip("/"), _DEFAULT_ROOT):
        if root and notes.attempt(root, _is_tree, sources, root, default=False):
            return root
    return None


def _is_tree(sources: Sources, root: str) -> bool:
    return sources.files.is_dir(root) and looks_like_corex(sources, root)


def corex_version(
    sources: Sources, torch: TorchFacts, root: str | None, notes: Notes
) -> str | None:
    """The SDK's version, from torch's own suffix, else from the tree's name."""
    of_torch = _version_in(torch.installed_version) or _version_in(torch.version)
    resolved = notes.attempt(root, sources.files.resolve, root, default="") if root else ""
    of_tree = _version_in(resolved)
    if torch.corex and of_torch and of_tree and of_torch != of_tree:
        notes.add(f"torch is built for CoreX {of_torch}, but {resolved} is CoreX {of_tree}")
    return of_torch or of_tree


def _version_in(text: str | None) -> str | None:
    found = _VERSION.search(text or "")
    return found.group(1) if found else None


def management_libraries(sources: Sources, root: str | None) -> tuple[str, ...]:
    """Where Iluvatar's management library would be. By its full path alone: an XML library
    that many systems have is called libixml.so as well."""
    if root is None:
        return ()
    paths = (f"{root}/{folder}/libixml.so" for folder in _LIBRARY_FOLDERS)
    return tuple(path for path in paths if sources.files.exists(path))


def find_corex_compiler(sources: Sources, root: str | None, notes: Notes) -> CompilerFacts:
    """``ixcc``, else ``clang++``, of the tree at `root`; each nvcc is rejected with its reason.

    A ``clang++`` elsewhere knows nothing of the device, so only the tree's own counts.
    """
    rejected = [] if root else ["no CoreX tree was found (COREX_HOME names it)"]
    chosen = CompilerFacts()
    for path in _candidates(sources, root):
        kind = notes.attempt(path, sources.files.kind, path, default="missing")
        name = path.rsplit("/", 1)[-1]
        if kind == "elf" and name != "nvcc" and chosen.path is None:
            chosen = CompilerFacts("ixcc" if name == "ixcc" else "clang++", path, root)
        elif name == "nvcc" and kind != "missing":
            rejected.append(f"{path}: {_why_not_nvcc(kind)}")
        elif kind not in ("missing", "elf"):
            rejected.append(f"{path}: {describe(kind)}")
    return CompilerFacts(chosen.kind, chosen.path, chosen.root, tuple(rejected))


def _candidates(sources: Sources, root: str | None) -> Iterator[str]:
    seen = set()
    in_tree = [f"{root}/bin/{name}" for name in ("ixcc", "clang++", "nvcc")] if root else []
    for path in (*in_tree[:1], sources.which("ixcc"), *in_tree[1:], sources.which("nvcc")):
        if path and path not in seen:
            seen.add(path)
            yield path


def describe(kind: str) -> str:
    """Why a file of this kind is no compiler."""
    return {
        "script": "a script, not a compiler",
        "not executable": "not executable",
        "other": "not an ELF program",
    }.get(kind, kind)


def _why_not_nvcc(kind: str) -> str:
    if kind == "elf":
        return "builds for NVIDIA devices, not for CoreX"
    return f"a decoy ({describe(kind)}): CoreX builds with ixcc or clang++"
