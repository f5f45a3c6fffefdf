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
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from pagedattn import registry
from pagedattn.backends.cache_folder import cache_dir
from pagedattn.backends.facts import Facts
from pagedattn.backends.platform_rules import device_of
from pagedattn.backends.protocol import Backend, Problem

log = logging.getLogger("pagedattn")


#: Why the last verdict could not be kept on disk, for the report; None if it was.
not_kept: str | None = None
# This process's own verdicts, by file name: where the folder cannot be written they hold too.
_memory: dict[str, dict[str, Any]] = {}


def fingerprint(backend: Backend, problem: Problem, facts: Facts) -> dict[str, Any]:
    """All that a verdict depends on."""
    return {
        "backend": backend.name,
        "source": _source_hash(type(backend)),
        "judge": _judge_hash(),
        "device": _device(problem.device, facts),
        "driver": facts.driver,
        "torch": facts.torch.installed_version or facts.torch.version,
        "cuda": facts.torch.cuda,
        "triton": [facts.triton.version, facts.triton.interpret],
        "compiler": [facts.compiler.kind, facts.compiler.path],
        "problem": {k: str(v) for k, v in asdict(problem).items() if k != "device"},
    }


def read(mark: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict kept for a fingerprint, or None."""
    name = _file_name(mark)
    if name in _memory:
        return _memory[name]
    try:
        kept = json.loads((_folder() / name).read_text())
        if kept["fingerprint"] == mark and {"outcome", "detail", "when"} <= kept.keys():
            return dict(kept)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.debug("a kept verdict could not be read and is made again: %r", error)
    return None


def write(mark: dict[str, Any], outcome: str, detail: str) -> None:
    """Keep a verdict. A folder that cannot be written costs a repeated proof, nothing else."""
    global not_kept
    record = {
        "outcome": outcome,
        "detail": detail,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fingerprint": mark,
    }
    _memory[_file_name(mark)] = record
    try:
        _replace(_folder() / _file_name(mark), json.dumps(record, indent=1))
        not_kept = None
    except OSError as error:
        not_kept = f"verdicts are not kept, so each process proves anew: {error}"
        log.info("the verdict on %s: %s", mark["backend"], not_kept)


def forget() -> int:
    """Delete every kept verdict; returns how many there were.

    Raises
    ------
    OSError
        If one cannot be deleted.
    """
    _memory.clear()
    kept = list(_folder().glob("*.json"))
    for path in kept:
        path.unlink(missing_ok=True)
    return len(kept)


def _folder() -> Path:
    return cache_dir() / "verdicts"


def _file_name(mark: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def _replace(path: Path, text: str) -> None:
    """Write whole or not at all, so that another process never reads half a verdict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _device(device: str, facts: Facts) -> list[str]:
    if not device.startswith("cuda"):
        return [device.partition(":")[0], torch.backends.cpu.get_cpu_capability()]
    known = device_of(facts, device)  # asked first: it costs no context on the device
    if known is not None and known.capability is not None:
        return [known.name, "{}.{}".format(*known.capability)]
    properties = torch.cuda.get_device_properties(device)
    return [properties.name, f"{properties.major}.{properties.minor}"]


@functools.cache
def _judge_hash() -> str:
    """Of what judges: a harder problem must be passed anew."""
    folder = Path(__file__).parent
    reference = Path(inspect.getfile(type(registry.get("reference"))))
    return _hash([folder / "hard_problems.py", folder / "verify.py", reference])


@functools.cache
def _source_hash(backend: type) -> str:
    """Of all our sources for one of our backends; of its folder or file for somebody else's."""
    if backend.__module__.startswith("pagedattn."):
        packages = ("pagedattn.backends", "pagedattn.csrc")
        return _hash(p for name in packages for p in _files(resources.files(name)))
    try:
        path = Path(inspect.getfile(backend))
    except (OSError, TypeError):  # typed in at a prompt: holds for this process only
        return f"{id(backend)}-{os.getpid()}-{time.time()}"
    # a module that stands alone may lie in site-packages, beside everybody else's
    return _hash(_files(path.parent) if "." in backend.__module__ else [path])


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _files(root: Any) -> Iterator[Path]:
    for entry in root.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry)
        elif entry.name.endswith((".py", ".cu", ".cuh", ".h", ".cpp")):
            yield Path(str(entry))
