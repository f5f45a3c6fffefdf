"""Verdicts kept on disk: a backend that was proved right on a device need not prove it again.

A verdict holds for one fingerprint: the device, the software under it, the backend's source and
the problem. Anything else changes the file's name, so nothing stale is ever read.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Backend, Problem

log = logging.getLogger("pagedattn")


def cache_dir() -> Path:
    """``PAGEDATTN_CACHE_DIR``, else the user's cache folder for pagedattn.

    Raises
    ------
    OSError
        There is none: the user has no home, as in some containers.
    """
    import platformdirs  # only needed once something is kept

    try:
        if chosen := os.environ.get("PAGEDATTN_CACHE_DIR"):
            return Path(chosen).expanduser()
        return Path(platformdirs.user_cache_dir("pagedattn", appauthor=False)).absolute()
    except RuntimeError as error:  # what pathlib and platformdirs say of a missing home
        raise OSError(f"no cache folder ({error}); PAGEDATTN_CACHE_DIR names one") from error


def fingerprint(backend: Backend, problem: Problem, facts: Facts) -> dict[str, Any]:
    """All that a verdict depends on."""
    return {
        "backend": backend.name,
        "source": _source_hash(type(backend)),
        "device": _device(problem.device),
        "driver": facts.driver,
        "torch": facts.torch.installed_version or facts.torch.version,
        "cuda": facts.torch.cuda,
        "triton": facts.triton.version,
        "compiler": [facts.compiler.kind, facts.compiler.path],
        "problem": {k: str(v) for k, v in asdict(problem).items() if k != "device"},
    }


def read(mark: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict kept for a fingerprint, or None."""
    try:
        kept: dict[str, Any] = json.loads(_path(mark).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.debug("a kept verdict could not be read and is made again: %s", error)
        return None
    return kept if kept.get("fingerprint") == mark else None


def write(mark: dict[str, Any], outcome: str, detail: str) -> None:
    """Keep a verdict. A folder that cannot be written costs a repeated proof, nothing else."""
    record = {
        "outcome": outcome,
        "detail": detail,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fingerprint": mark,
    }
    try:
        path = _path(mark)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1)
        os.replace(name, path)
    except OSError as error:
        log.info("the verdict on %s is not kept: %s", mark["backend"], error)


def forget() -> int:
    """Delete every kept verdict; returns how many there were."""
    kept = list((cache_dir() / "verdicts").glob("*.json"))
    for path in kept:
        path.unlink(missing_ok=True)
    return len(kept)


def _path(mark: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "verdicts" / f"{digest[:32]}.json"


def _device(device: str) -> list[str]:
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return [properties.name, f"{properties.major}.{properties.minor}"]
    return [device.partition(":")[0], torch.backends.cpu.get_cpu_capability()]


@functools.cache
def _source_hash(backend: type) -> str:
    """Of all our sources for one of our backends; of its own file for somebody else's."""
    digest = hashlib.sha256()
    if backend.__module__.startswith("pagedattn."):
        for package in ("pagedattn.backends", "pagedattn.csrc"):
            for path in sorted(_files(resources.files(package))):
                digest.update(path.encode())
                digest.update(Path(path).read_bytes())
    else:
        try:
            digest.update(Path(inspect.getfile(backend)).read_bytes())
        except (OSError, TypeError):  # typed in at a prompt: holds for this process only
            digest.update(f"{id(backend)}-{os.getpid()}-{time.time()}".encode())
    return digest.hexdigest()[:16]


def _files(root: Any) -> Iterable[str]:
    for entry in root.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry)
        elif entry.name.endswith((".py", ".cu", ".cuh", ".h", ".cpp")):
            yield str(entry)
