"""Compiling one binary: what a compiler says is believed only once its output has been loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from pagedattn.backends.cuda import binary_cache, build_lock, source
from pagedattn.backends.cuda import toolchain as toolchains
from pagedattn.backends.cuda.binary_cache import Binary, Key
from pagedattn.backends.cuda.spec import Spec, check
from pagedattn.backends.cuda.toolchain import Toolchain
from pagedattn.backends.errors import BuildError

log = logging.getLogger("pagedattn")

#: Seconds that the compiler has for one binary; a cold build takes 30 s on a BI-V100's host.
COMPILE_S = 600.0
#: Seconds that loading the output in a child process may take.
LOAD_S = 60.0
_ERROR = re.compile(r"\berror\b|\bfatal\b|not found|cannot|No such file", re.IGNORECASE)
_LINES = 8  # of the compiler's output, from the first error on
_PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    getattr(library, name)
library.pagedattn_abi.restype = ctypes.c_int
print("abi", library.pagedattn_abi(), flush=True)
"""
_SYMBOLS = (
    "pagedattn_abi", "pagedattn_run", "pagedattn_error", "pagedattn_tuned_warps",
    "pagedattn_clustered",
)  # fmt: skip


class PassingFailure(BuildError):
    """A failure that may have a passing cause (a busy host, no memory): it is not kept."""


def key_of(toolchain: Toolchain, spec: Spec, abi: int) -> Key:
    """The cache's key of what `toolchain` makes for `spec` of the sources as they are now."""
    return Key(spec, source.content_hash(), abi, toolchains.identity(toolchain, spec))


def build(
    toolchain: Toolchain,
    spec: Spec,
    abi: int,
    *,
    again: bool = False,
    stop: threading.Event | None = None,
) -> Binary:
    """The binary for `spec`, out of the cache or compiled now.

    Parameters
    ----------
    abi : int
        What the library's ``pagedattn_abi()`` must answer.
    again : bool
        Compile also where an earlier attempt at the very same failed. Otherwise its message is
        told again, and nothing is started.
    stop : Event, optional
        Once it is set, what runs is ended.

    Raises
    ------
    BuildError
        With the compiler's first message.
    OSError
        If the cache cannot be written.
    """
    check(spec)
    key = key_of(toolchain, spec, abi)
    found = binary_cache.lookup(key)
    if found is not None:
        return found
    path = binary_cache.folder() / f"{key.name}.lock"
    with build_lock.hold(path, deadline_s=COMPILE_S + LOAD_S, stop=stop):
        found = binary_cache.lookup(key)  # whoever we waited for may have made it
        if found is not None:
            return found
        if not again:
            _tell_kept_failure(key)
        try:
            return _make(toolchain, spec, key, stop)
        except PassingFailure:
            raise
        except BuildError as error:
            binary_cache.keep_failure(key, str(error))
            raise


def _tell_kept_failure(key: Key) -> None:
    kept = binary_cache.failure(key)
    if kept is not None:
        message, when = kept
        raise BuildError(f"{message}\n(failed at {when}; `pagedattn build` tries again)", key)


def _make(toolchain: Toolchain, spec: Spec, key: Key, stop: threading.Event | None) -> Binary:
    """Compile in a new folder within the cache, so that the last step is one rename."""
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=binary_cache.folder()))
    try:
        output = work / "out" / binary_cache.LIBRARY
        output.parent.mkdir()
        began = time.monotonic()
        _compile(toolchain, spec, output, work / "log", stop)
        _require_library(toolchain, output, key.abi)
        return binary_cache.keep(key, output, time.monotonic() - began)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(
    toolchain: Toolchain, spec: Spec, output: Path, said: Path, stop: threading.Event | None
) -> None:
    command = toolchain.command(spec, source.entry(), output)
    log.debug("compiling: %s", " ".join(command))
    code = _run(command, toolchain.environment(), said, output.parent.parent, COMPILE_S, stop)
    text = said.read_text(errors="replace")
    where = f"{toolchain.path} for {toolchain.arch}, {spec.name}"
    if stop is not None and stop.is_set():
        raise PassingFailure(f"{where}: stopped")
    if code is None:
        raise PassingFailure(f"{where}: gave no result within {COMPILE_S:g} s and was ended")
    if code < 0:
        name = signal.Signals(-code).name
        raise PassingFailure(f"{where}: the compiler died of {name}: {first_message(text)}")
    if code != 0:
        raise BuildError(f"{where}: {first_message(text)}", text)
    if not output.is_file():
        raise BuildError(
            f"{where}: it exits with 0 and writes no output: a decoy, not a compiler", text
        )


def _run(
    command: list[str],
    environ: dict[str, str],
    said: Path,
    work: Path,
    timeout: float,
    stop: threading.Event | None = None,
) -> int | None:
    """The exit code, or None if time ran out or `stop` was set; then its whole process group is
    ended.

    Its output goes to a file: a pipe would be held open by whatever it leaves behind.
    """
    with said.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, env={**environ, "TMPDIR": str(work)}, cwd=work, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PassingFailure(f"{command[0]} cannot be started: {error}") from error
        try:
            return _wait(process, time.monotonic() + timeout, stop)
        finally:
            if process.returncode is None:  # also where we are interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)


def _wait(
    process: subprocess.Popen[bytes], deadline: float, stop: threading.Event | None
) -> int | None:
    while (left := deadline - time.monotonic()) > 0 and not (stop is not None and stop.is_set()):
        # waits in short turns only where somebody may ask it to stop
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(left if stop is None else min(left, 0.2))
    return None


def first_message(text: str) -> str:
    """The first error in a compiler's output and what it says about it; later ones follow from
    it more often than not."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if _ERROR.search(line)), 0)
    return "\n".join(lines[start : start + _LINES]) or "it printed nothing"


def _require_library(toolchain: Toolchain, output: Path, abi: int) -> None:
    """Raise `BuildError` unless `output` is a shared object of ours that loads.

    It is loaded in a child process: what crashes or hangs there leaves this one alive.
    """
    where = f"{toolchain.path} for {toolchain.arch}"
    with output.open("rb") as file:
        head = file.read(18)
    if head[:4] != b"\x7fELF" or head[16:17] != b"\x03":  # ET_DYN
        raise BuildError(f"{where}: what it wrote is no shared object (it begins {head[:4]!r})")
    said = output.parent.parent / "loading"
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(output), *_SYMBOLS]
    code = _run(command, dict(os.environ), said, output.parent.parent, LOAD_S)
    text = said.read_text(errors="replace").strip()
    last = text.splitlines()[-1] if text else "it printed nothing"
    if code is None:
        raise PassingFailure(f"{where}: what it wrote did not load within {LOAD_S:g} s")
    if code < 0:
        raise BuildError(f"{where}: loading what it wrote died of {signal.Signals(-code).name}")
    if code != 0:
        raise BuildError(f"{where}: what it wrote does not load: {last}", text)
    if last != f"abi {abi}":
        raise BuildError(f"{where}: what it wrote answers {last!r}, and not 'abi {abi}'", text)
