"""Compiled binaries kept on disk, each under all that it depends on.

A binary is a folder, ``binaries/<name>-<hash>/``, with the library and a record of what it was
made of. It comes into being by one rename, so nobody ever sees half of one; a change of anything
in the record's `made_of` gives another name, so nothing stale is ever loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagedattn.backends.cache_folder import cache_dir
from pagedattn.backends.cuda.spec import Spec

log = logging.getLogger("pagedattn")

LIBRARY = "kernels.so"
_RECORD = "record.json"
_FAILURE = ".failed.json"


@dataclass(frozen=True)
class Key:
    """What a binary is made of.

    Attributes
    ----------
    source : str
        The hash of the sources.
    abi : int
        The number that the library must answer with.
    toolchain : mapping
        Compiler, its version, flags and architecture (`pagedattn.backends.cuda.toolchain`).
    """

    spec: Spec
    source: str
    abi: int
    toolchain: Mapping[str, object]

    def made_of(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "spec": asdict(self.spec),
            "source": self.source,
            "abi": self.abi,
            **self.toolchain,
        }

    @property
    def name(self) -> str:
        """Readable first, then unique."""
        text = json.dumps(self.made_of(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{self.spec.name}-{self.toolchain['arch']}-{digest}"


@dataclass(frozen=True)
class Binary:
    """A library in the cache."""

    path: Path
    made_of: Mapping[str, Any]
    when: str  # UTC, ISO 8601
    seconds: float  # that compiling took

    @property
    def spec(self) -> Spec:
        """What it was compiled for."""
        return Spec(**self.made_of["spec"])

    def made_for(self, source: str, abi: int, arch: str) -> bool:
        """Whether these sources give it on `arch`, whoever compiled it."""
        made = self.made_of
        return (made["source"], made["abi"], made["arch"]) == (source, abi, arch)


def folder() -> Path:
    """Where the binaries are. Raises OSError where no folder is known."""
    return cache_dir() / "binaries"


def lookup(key: Key) -> Binary | None:
    """The binary of `key`, or None."""
    try:
        return _read(folder() / key.name)
    except OSError:
        return None


def listing() -> list[Binary]:
    """Every binary that can be read, by name."""
    try:
        entries = sorted(p for p in folder().iterdir() if p.is_dir())
    except OSError:
        return []
    return [binary for binary in map(_read, entries) if binary is not None]


def find(spec: Spec, source: str, abi: int, arch: str) -> Binary | None:
    """The newest binary that serves, by whichever compiler: where none is installed, as in an
    image that was built elsewhere, the exact key cannot be known."""
    return _newest(b for b in listing() if b.spec == spec and b.made_for(source, abi, arch))


def find_types(spec: Spec, source: str, abi: int, arch: str) -> Binary | None:
    """The newest binary of the types of `spec`, whatever its sizes."""
    found = (b for b in listing() if b.made_for(source, abi, arch))
    types = (spec.dtype, spec.kv_dtype)
    return _newest(b for b in found if (b.spec.dtype, b.spec.kv_dtype) == types)


def _newest(found: Iterable[Binary]) -> Binary | None:
    return max(found, key=lambda binary: binary.when, default=None)


def _read(path: Path) -> Binary | None:
    try:
        record = json.loads((path / _RECORD).read_text())
        library = path / LIBRARY
        Spec(**record["made_of"]["spec"])
        if library.is_file():
            return Binary(library, record["made_of"], record["when"], record["seconds"])
    except FileNotFoundError:
        return None  # also a folder that somebody is still filling
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.debug("%s is no record of a binary: %r", path, error)
    return None


def keep(key: Key, library: Path, seconds: float) -> Binary:
    """Move `library`, with its record beside it, into the cache; the folder it lies in goes there
    whole.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
    made = Binary(folder() / key.name / LIBRARY, key.made_of(), _now(), round(seconds, 2))
    record = {"made_of": made.made_of, "when": made.when, "seconds": made.seconds}
    (library.parent / _RECORD).write_text(json.dumps(record, indent=1))
    target = made.path.parent
    try:
        os.rename(library.parent, target)
    except OSError:
        # another process that did not see our lock was faster, or what is there is damaged
        if _read(target) is None:
            shutil.rmtree(target, ignore_errors=True)
            os.rename(library.parent, target)
    forget_failure(key)
    return made


def keep_failure(key: Key, message: str) -> None:
    """Keep why compiling failed. A folder that cannot be written costs a repeated attempt."""
    record = {"message": message, "when": _now(), "made_of": key.made_of()}
    path = folder() / f"{key.name}{_FAILURE}"
    try:
        new = path.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps(record, indent=1))
        os.replace(new, path)
    except OSError as error:
        log.debug("the failure is not kept: %s", error)


def failure(key: Key) -> tuple[str, str] | None:
    """The message and the time of the last failed attempt at `key`, or None."""
    try:
        record = json.loads((folder() / f"{key.name}{_FAILURE}").read_text())
        return record["message"], record["when"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_failure(key: Key) -> None:
    """Delete what `keep_failure` kept."""
    (folder() / f"{key.name}{_FAILURE}").unlink(missing_ok=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
