"""Verification: a backend is bound only after it was right on this very device.

It runs a hard small problem of the caller's class and is compared with the fp64 oracle. Where
a launch can hang the card the run is in a child process with a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pagedattn import device_loss, hard_problems, hard_writes, registry, verdicts, verify_child
from pagedattn.backends.errors import DeviceError, VerificationError
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Backend, Call, Problem, Runner
from pagedattn.settings import choice

#: Largest error of a row, relative to the row's norm, that still counts as right. A few units
#: of rounding in the output's type; a key too many, too few or a wrong head gives over 0.05
#: in problems as short as these, and TF32 in fp32 about 3e-4.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: Largest absolute error of a log-sum-exp: its scores come from products rounded to the type.
LSE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Verdict(NamedTuple):
    """What a proof found."""

    outcome: str  # ok, wrong, error (it raised), signal (it died) or timeout
    detail: str
    error: float | None = None  # the worst row's, relative
    lse_error: float | None = None  # absolute; None too where no log-sum-exp was asked for


def is_off() -> bool:
    """Whether ``PAGEDATTN_VERIFY=off``."""
    return choice("PAGEDATTN_VERIFY") == "off"


class Task(NamedTuple):
    """What is to be proved of a backend: how to load it, and how to judge what was loaded."""

    name: str  # by which a child process finds it
    load: Callable[[Any, Problem], Any]
    judge: Callable[[Any, Problem], Verdict]


ATTEND = Task("attend", lambda backend, p: backend.load(p), lambda runner, p: judge(runner, p))
WRITE = Task(
    "write",
    lambda backend, p: backend.load_writer(p),
    lambda writer, p: Verdict(*hard_writes.judge(writer, p)),
)
TASKS = {task.name: task for task in (ATTEND, WRITE)}


def load_and_verify(backend: Backend, problem: Problem, facts: Facts, task: Task = ATTEND) -> Any:
    """What `task` loads of the backend, once it is known to be right on this device.

    Raises
    ------
    BackendUnavailable, BuildError
        If it does not load.
    VerificationError
        If it ran and was wrong, or failed or died, now or when the kept verdict was made.
    DeviceError
        If it hung, so that the device must not be touched again, or lost the device.
    """
    if is_off():
        return task.load(backend, problem)
    mark = verdicts.fingerprint(backend, problem, facts)
    if task is not ATTEND:
        mark["task"] = task.name
    kept = verdicts.read(mark)
    if kept is not None and kept["outcome"] != "ok":
        raise VerificationError(
            f"{kept['detail']} (verdict of {kept['when']}; `pagedattn verify --again` tries again)",
            kept,
        )
    loaded = task.load(backend, problem)
    if kept is None:
        verdict = prove(backend, loaded, problem, facts, mark, task)
        if verdict.outcome != "ok":
            raise VerificationError(verdict.detail, mark)
    return loaded


def prove(
    backend: Backend,
    loaded: Any,
    problem: Problem,
    facts: Facts,
    mark: dict[str, Any],
    task: Task = ATTEND,
) -> Verdict:
    """Judge a backend where it is safe to, and keep the verdict under the fingerprint `mark`.

    Raises
    ------
    DeviceError
        If it hung on a device, or lost it.
    """
    if facts.vendor == "corex" or choice("PAGEDATTN_VERIFY") == "child":
        verdict = Verdict(*verify_child.run(backend, problem, task.name))
    else:
        verdict = _judge_here(backend, loaded, problem, task)
    outcome, detail = verdict[:2]
    hung = outcome == "timeout" and problem.device_type != "cpu"
    # What may have a passing cause (a full card, a busy host) is not held against it for good.
    if outcome in ("ok", "wrong", "signal") or hung or device_loss.is_sticky(detail):
        verdicts.write(mark, outcome, detail)
    if hung:
        raise DeviceError(f"{detail}; {problem.device} is not touched again by this process", mark)
    return verdict


def _judge_here(backend: Backend, loaded: Any, problem: Problem, task: Task) -> Verdict:
    try:
        return task.judge(loaded, problem)
    except DeviceError:
        raise
    except Exception as error:  # a backend may raise anything; what it raised is the verdict
        device_loss.raise_if_sticky(error, backend.name, problem.device)
        return Verdict("error", f"it failed in its proof: {type(error).__name__}: {error}")


def judge(runner: Runner, problem: Problem) -> Verdict:
    """Run hard calls until one is wrong: ``ok`` or ``wrong``, with the error found (of all of them
    the worst)."""
    verdicts: list[Verdict] = []
    for call in hard_problems.make_calls(problem):
        verdicts.append(_judge_call(runner, call, problem))
        if verdicts[-1].outcome != "ok":
            break
    return max(verdicts, key=lambda one: (one.outcome != "ok", one.error))


def _judge_call(runner: Runner, call: Call, problem: Problem) -> Verdict:
    runner(call)
    error, lse_error = errors(call, oracle(call, problem))
    limit, lse_limit = TOLERANCE[problem.dtype], LSE_TOLERANCE[problem.dtype]
    detail = f"relative error {error:.1e} (at most {limit:.0e} is right)"
    if call.lse is not None:
        detail += f", log-sum-exp off by {lse_error:.1e} (at most {lse_limit:.0e})"
    shown = None if call.lse is None else lse_error
    if error <= limit and lse_error <= lse_limit:
        return Verdict("ok", detail, error, shown)
    return Verdict("wrong", f"wrong numbers on {problem.device}: {detail}", error, shown)


def oracle(call: Call, problem: Problem) -> Call:
    """The same call answered in fp64; its results are on the CPU."""
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    truth = replace(
        call,
        out=torch.full(call.out.shape, hard_problems.UNTOUCHED, **exact),
        lse=None
        if call.lse is None
        else torch.full(call.lse.shape, hard_problems.UNTOUCHED, **exact),
    )
    registry.get("reference").load(problem)(truth)
    return truth


def errors(call: Call, truth: Call) -> tuple[float, float]:
    """The worst row's relative error, and the worst log-sum-exp's absolute one.

    A row that should be NaN and is not, or the other way round, or should be zero and is
    not, counts as infinite.
    """
    worst = _row_error(call.out.cpu().double(), truth.out)
    worst_lse = 0.0
    if call.lse is not None and truth.lse is not None:
        lse = call.lse.cpu().double()
        same = (lse == truth.lse) | (lse.isnan() & truth.lse.isnan())  # −inf and NaN rows
        gap = torch.where(same, 0.0, (lse - truth.lse).abs())
        worst_lse = float(gap.nan_to_num(nan=math.inf).max()) if gap.numel() else 0.0
    return worst, worst_lse


def _row_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    if out.numel() == 0:
        return 0.0
    nan_rows = truth.isnan()
    if not torch.equal(out.isnan(), nan_rows):
        return math.inf
    out, truth = out.masked_fill(nan_rows, 0.0), truth.masked_fill(nan_rows, 0.0)
    gap, size = (out - truth).norm(dim=-1), truth.norm(dim=-1)
    relative = torch.where(gap == 0, 0.0, gap / size)  # a zero row that is not zero: inf
    return float(relative.max())
