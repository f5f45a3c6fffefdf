"""Where the probe looks: one object, so that a test can put any machine in its place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pagedattn.probe_nvml import Listing, list_devices

T = TypeVar("T")
FileKind = Literal["missing", "not executable", "elf", "script", "other"]
_TRUE = frozenset({"1", "true", "yes", "y", "on"})


@dataclass
class Notes:
    """What could not be learned, and what looks wrong, in the order it was met."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def attempt(
        self,
        what: str,
        function: Callable[..., T],
        *arguments: Any,
        default: T,
        errors: tuple[type[Exception], ...] = (OSError,),
    ) -> T:
        """`function(*arguments)`, or `default` and a note if it raises one of `errors`."""
        try:
            return function(*arguments)
        except errors as error:
            self.add(f"{what}: {type(error).__name__}: {error}")
            return default


@dataclass(frozen=True)
class Files:
    """The file system under `root`, addressed by absolute paths as if `root` were ``/``."""

    root: Path = Path("/")

    def real(self, path: str) -> Path:
        return self.root / path.lstrip("/") if self.root != Path("/") else Path(path)

    def exists(self, path: str) -> bool:
        return self.real(path).exists()

    def is_dir(self, path: str) -> bool:
        return self.real(path).is_dir()

    def resolve(self, path: str) -> str:
        """`path` with its links followed."""
        resolved = self.real(path).resolve()
        if self.root == Path("/"):
            return str(resolved)
        return "/" + resolved.relative_to(self.root.resolve()).as_posix()

    def kind(self, path: str) -> FileKind:
        """What the file is by its first bytes. No process is started."""
        real = self.real(path)
        if not real.is_file():
            return "missing"
        if not os.access(real, os.X_OK):
            return "not executable"
        with real.open("rb") as file:
            magic = file.read(4)
        if magic == b"\x7fELF":
            return "elf"
        return "script" if magic[:2] == b"#!" else "other"

    def text(self, path: str, limit: int = 65536) -> str:
        with self.real(path).open("r", encoding="utf-8", errors="replace") as file:
            return file.read(limit)


@dataclass(frozen=True)
class Sources:
    """Everything that the probe reads.

    Attributes
    ----------
    environ : mapping of str to str
    files : Files
    torch : the torch module (any object with the attributes read)
    version : the installed version of a distribution, or None
    entry_points : the names in an entry point group
    package_dir : a package's folder, found without importing it, or None
    which : as `shutil.which`
    list_devices : asks the first management library that loads, of the paths given
    python, system : what to call them
    """

    environ: Mapping[str, str]
    files: Files
    torch: Any
    version: Callable[[str], str | None]
    entry_points: Callable[[str], Sequence[str]]
    package_dir: Callable[[str], Path | None]
    which: Callable[[str], str | None]
    list_devices: Callable[[Sequence[str]], Listing]
    python: str
    system: str

    def flag(self, name: str) -> bool:
        """Whether the environment variable `name` is switched on."""
        return self.environ.get(name, "").strip().lower() in _TRUE


def this_machine() -> Sources:
    """The real sources."""
    import torch

    host = platform.uname()
    return Sources(
        environ=os.environ,
        files=Files(),
        torch=torch,
        version=_installed_version,
        entry_points=_entry_point_names,
        package_dir=_package_dir,
        which=shutil.which,
        list_devices=list_devices,
        python=platform.python_version(),
        system=f"{host.system} {host.release} {host.machine}",
    )


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _entry_point_names(group: str) -> Sequence[str]:
    return [point.name for point in importlib.metadata.entry_points(group=group)]


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    # a folder of that name without an __init__.py (a checkout beside us) has no origin
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])
