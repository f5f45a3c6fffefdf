"""A lock over one binary, so that processes that start together compile it once.

Its file lies beside the binary, with the owner's process and host in a second file. It only
saves work: binaries arrive by a rename, so two processes that both hold it harm nothing. That is
why a lock whose owner is dead may be taken over, and why a wait may end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedattn.backends.errors import BuildError

log = logging.getLogger("pagedattn")

#: Seconds between two looks at a lock that another holds.
POLL_S = 0.2
#: Seconds of waiting before it is said that, and for whom, one waits.
QUIET_S = 2.0


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    pid: int
    host: str
    since: float  # seconds since 1970

    def __str__(self) -> str:
        age = max(0.0, time.time() - self.since)
        return f"held for {age:.0f} s by process {self.pid} on {self.host}"

    @property
    def dead(self) -> bool:
        """Whether it surely runs no more; of another host nothing is known."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is another user's
            return False
        return False


@contextlib.contextmanager
def hold(path: Path, deadline_s: float, stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock at `path`.

    Raises
    ------
    BuildError
        If another holds it for longer than `deadline_s`; the message names the lock, its age
        and its owner. Also if `stop` is set in the meantime.
    OSError
        If the lock's file cannot be made.
    """
    import filelock  # only needed where something is compiled

    path.parent.mkdir(parents=True, exist_ok=True)
    began, told = time.monotonic(), False
    stop = stop or threading.Event()
    while True:
        lock = filelock.FileLock(path)  # a new one: the file under the name may have changed
        try:
            lock.acquire(timeout=0)
            break
        except NotImplementedError:  # a file system without locks: compile unguarded
            log.info("no locks on the file system of %s; another may compile the same", path)
            break
        except filelock.Timeout:
            told = _tell(path, time.monotonic() - began, deadline_s, told)
            if stop.wait(POLL_S):
                raise BuildError(f"stopped while waiting for the lock {path}") from None
    try:
        _write_owner(path)
        yield
    finally:
        with contextlib.suppress(OSError):
            _owner_file(path).unlink()
        lock.release()


def _tell(path: Path, waited: float, deadline_s: float, told: bool) -> bool:
    """Take over, give up, or say that one waits. Returns whether that has been said."""
    owner = read_owner(path)
    if owner is not None and owner.dead:
        # its lock lives on in a process that it forked
        log.warning("the lock %s is taken over: it was %s, which has ended", path, owner)
        with contextlib.suppress(FileNotFoundError):
            _owner_file(path).unlink()
            path.unlink()
        return told
    who = owner or "its owner is not known"
    if waited >= deadline_s:
        raise BuildError(
            f"gave up after waiting {waited:.0f} s for the lock {path} ({who}); "
            "if no build runs there, delete it and try again",
            owner,
        )
    if waited >= QUIET_S and not told:
        log.warning("waiting for a build in another process: the lock %s (%s)", path, who)
        told = True
    return told


def read_owner(path: Path) -> Owner | None:
    """Who wrote itself down as the owner of the lock at `path`, or None."""
    try:
        return Owner(**json.loads(_owner_file(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _owner_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.owner")


def _write_owner(path: Path) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    _owner_file(path).write_text(json.dumps(owner))
