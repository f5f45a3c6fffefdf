"""Verification in a child process: what hangs or crashes there leaves this process alive.

The parent sends the backend and the problem, pickled, on the child's standard input, and reads
a JSON file back; the child's own output may hold anything a compiler says.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedattn.backends.errors import VerificationError
from pagedattn.backends.protocol import Backend, Problem

#: Seconds that a child has for importing torch, its first launches and the comparison.
DEADLINE_S = 120.0


def run(backend: Backend, problem: Problem, task: str = "attend") -> Sequence[Any]:
    """Judge `backend` in a child; returns the fields of a `pagedattn.verify.Verdict`.

    Parameters
    ----------
    task : of `pagedattn.verify.TASKS`

    Raises
    ------
    VerificationError
        If the backend cannot be sent to another process.
    """
    payload = _payload(backend, problem, task)
    with tempfile.TemporaryDirectory(prefix="pagedattn-") as folder:
        result = Path(folder) / "verdict.json"
        log = Path(folder) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", _START, str(result)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a child that bound at import would start a child in its turn
                env={k: v for k, v in os.environ.items() if k != "PAGEDATTN_EAGER"},
                start_new_session=True,
            )
        try:
            child.communicate(payload, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            _end(child)
            return "timeout", f"{backend.name} gave no answer within {DEADLINE_S:g} s"
        return _outcome(backend, child.returncode, result, log)


def _payload(backend: Backend, problem: Problem, task: str) -> bytes:
    """`sys.path`, and what it takes that path to unpickle."""
    name = type(backend).__module__
    try:
        if name == "__main__":
            raise TypeError("its class is defined in the script that is running")
        return pickle.dumps((sys.path, pickle.dumps((backend, problem, task))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise VerificationError(
            f"{backend.name} cannot be sent to the child process that proves it ({error}); "
            "define its class in a module of its own, with plain attributes"
        ) from error


# The child's path must be set before anything of ours is imported.
_START = """
import pickle, sys
path, inner = pickle.load(sys.stdin.buffer)
sys.path[:] = path
from pagedattn import verify_child
verify_child.answer(inner, sys.argv[1])
"""


def answer(inner: bytes, result: str) -> None:
    """The child's side: judge, and write the verdict to the file `result`."""
    from pagedattn import verify

    try:
        backend, problem, name = pickle.loads(inner)
        task = verify.TASKS[name]
        verdict = task.judge(task.load(backend, problem), problem)
    except Exception as error:  # whatever it is, it is the verdict
        detail = f"it failed in its proof: {type(error).__name__}: {error}"
        verdict = verify.Verdict("error", detail)
    Path(result).write_text(json.dumps(verdict))


def _outcome(backend: Backend, code: int, result: Path, log: Path) -> Sequence[Any]:
    # a child that was right and then died on its way out was not right
    if code == 0 and result.exists():
        verdict: list[Any] = json.loads(result.read_text())
        return verdict
    tail = log.read_text(errors="replace").strip()[-500:]
    said = f"; its last words: {tail}" if tail else ""
    if code < 0:
        return "signal", f"{backend.name} died of {signal.Signals(-code).name}{said}"
    return "error", f"{backend.name}'s child process ended with code {code}{said}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's whole process group; one stuck in the driver is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=2)
