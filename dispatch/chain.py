"""The chain: which backend serves a problem on a device, and why the others do not.

A candidate passes four gates in turn: present (the machine has what it needs), supports (it can
do the problem), loadable (it imports or compiles), verified (it was right on this device). The
first that passes all is selected. Every reason is kept, whether it is asked for or not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagedattn import device_loss, policy, registry
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    ConfigurationError,
    DeviceError,
    PagedAttnError,
    VerificationError,
)
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Problem, Runner, ServesFew, StepsBack
from pagedattn.composition import Composed, FewApart
from pagedattn.probe import facts as probe_facts
from pagedattn.record import Binding, Candidate
from pagedattn.request import Request
from pagedattn.wording import describe, describe_parts

log = logging.getLogger("pagedattn")

# A reset replaces this and the next, so that what another thread made before it is not kept after.
_bindings: dict[tuple[Problem, tuple[str, ...] | None], Binding] = {}
# Candidates that failed a proof or a build, for the report. What failed to build is not built
# again by this process: the first message is the useful one.
_Failures = dict[tuple[str, Problem], Candidate]
_failures: _Failures = {}
_resets: list[Callable[[], None]] = []
_bound: list[Callable[[], None]] = []
_told: set[tuple[str, str]] = set()  # (device, who serves what) of bindings already logged
# One lock a device: a first call waits for another on its own device and for nothing else. A
# warm call takes none.
_locks: dict[str, threading.Lock] = {}


def on_reset(callback: Callable[[], None]) -> None:
    """Call `callback` whenever bindings are dropped."""
    _resets.append(callback)


def on_bound(callback: Callable[[], None]) -> None:
    """Call `callback` after each new binding: a backend may have become ready for more by it."""
    _bound.append(callback)


def reset() -> None:
    """Drop every binding and every kept failure, so that the next call resolves again."""
    global _bindings, _failures
    _bindings, _failures = {}, {}
    for callback in _resets:
        callback()


registry.on_change(reset)


def bindings() -> tuple[Binding, ...]:
    """Every binding that this process made, oldest first."""
    return tuple(_bindings.values())


def failures(problem: Problem) -> tuple[Candidate, ...]:
    """The candidates that failed to load, build or be right for `problem` in this process."""
    return tuple(c for (_, failed), c in list(_failures.items()) if failed == problem)


def binding_for(problem: Problem, argument: str | Sequence[str] | None = None) -> Binding:
    """The binding for `problem`, resolved once and by one thread.

    Raises
    ------
    UnknownBackend, BackendUnavailable, BuildError, VerificationError, DeviceError
        If no candidate of the chain could be bound.
    """
    if device_loss.lost:
        device_loss.refuse_if_lost(problem.device)
    request = Request.current(argument)
    key = (problem, request.names)
    known = _bindings
    binding = known.get(key)
    if binding is None:
        with _locks.setdefault(problem.device, threading.Lock()):
            known = _bindings
            binding = known.get(key)
            if binding is None:
                device_loss.refuse_if_lost(problem.device)  # maybe by whom we waited for
                binding = known[key] = resolve(problem, request, probe_facts())
                for callback in _bound:
                    callback()
    return binding


def resolve(problem: Problem, request: Request, facts: Facts) -> Binding:
    """Try each candidate in order and bind the first that is right."""
    names = request.names or automatic_order(problem, facts)
    candidates: list[Candidate] = []
    runner: Runner | None = None
    while runner is None and len(candidates) < len(names):
        name, *others = names[len(candidates) :]
        tried: list[Candidate] = []
        if name in policy.SHORT_FIRST and problem.varlen_query and problem.query_part == "all":
            tried, runner = _compose(name, others, problem, facts)
        if not tried:
            candidate, runner = attempt(name, problem, facts)
            tried = [candidate]
        candidates += tried
    if runner is None:
        raise unavailable(problem, request, facts, candidates)
    # a sequence of a batch-invariant call must not change hands with the others' lengths
    if request.names is None and problem.varlen_query and not problem.batch_invariant:
        candidates, runner = _set_few_apart(candidates, runner, problem, facts)
    known = [c.name for c in candidates]
    untried = [examine(name, problem, facts) for name in names if name not in known]
    selected = "+".join(c.name for c in candidates if c.selected)
    binding = Binding(problem, selected, request.names, (*candidates, *untried), runner)
    _tell(binding, request, [c for c in candidates if not c.selected])
    return binding


def automatic_order(problem: Problem, facts: Facts) -> tuple[str, ...]:
    """The policy's order, but for those that step back for `problem`: they come last but one."""
    *names, floor = policy.order(facts.vendor, problem.device_type)
    behind = [name for name in names if _steps_back(name, problem, facts)]
    return (*(name for name in names if name not in behind), *behind, floor)


def _steps_back(name: str, problem: Problem, facts: Facts) -> bool:
    try:
        backend = registry.get(name)
    except BackendUnavailable:  # told when its turn comes
        return False
    return isinstance(backend, StepsBack) and backend.step_back_reason(problem, facts) is not None


def _set_few_apart(
    candidates: list[Candidate], runner: Runner, problem: Problem, facts: Facts
) -> tuple[list[Candidate], Runner]:
    """Have the calls of few query tokens served by one that stepped back for the others, where it
    says that it is better at them and is right.

    It is proved for calls as it will be given them, whole and up to its limit: the short sequences
    of longer calls, which `_compose` proves, are other numbers of rows and may be another kernel's.
    """
    order = policy.order(facts.vendor, problem.device_type)
    bound = next(c.name for c in candidates if c.selected)
    tried = [c.name for c in candidates]
    for name in order[: order.index(bound)]:
        if name in tried:  # and could not
            continue
        backend = registry.get(name)  # stepped back
        limit = backend.few_queries(problem, facts) if isinstance(backend, ServesFew) else 0
        if limit > 0:
            candidate, few = attempt(name, replace(problem, few_queries=limit), facts)
            candidate = replace(candidate, few_queries=limit)
            if few is not None:
                return [candidate, *candidates], FewApart(few, runner, limit)
            candidates = [*candidates, candidate]
    return candidates, runner


def _compose(
    name: str, others: Sequence[str], problem: Problem, facts: Facts
) -> tuple[list[Candidate], Runner | None]:
    """Bind `name` to the short sequences of the calls, and the first of `others` that can to the
    long ones. Nothing was tried in the end where none of them can."""
    candidate, short = attempt(name, replace(problem, query_part="short"), facts)
    tried = [replace(candidate, query_part="short")]
    if short is None:
        return tried, None
    for other in others:
        candidate, long = attempt(other, replace(problem, query_part="long"), facts)
        tried.append(replace(candidate, query_part="long"))
        if long is not None:
            return tried, Composed(short, long)
    return [], None


def examine(name: str, problem: Problem, facts: Facts) -> Candidate:
    """The gates that touch nothing: present and supports. What a backend raises is a reason."""
    try:
        backend = registry.get(name)
    except BackendUnavailable as error:
        return Candidate(name, False, reasons=(str(error),), error=_kept(error))
    try:
        absent = tuple(backend.not_present_reasons(facts))
        unsupported = tuple(backend.not_supported_reasons(problem))
        remedy = backend.remedy(facts) if absent else None
    except Exception as error:  # somebody else's code may raise anything
        reason = f"it could not say whether it can serve: {type(error).__name__}: {error}"
        return Candidate(name, False, reasons=(reason,))
    return Candidate(
        name,
        present=not absent,
        supported=not unsupported,
        reasons=tuple(dict.fromkeys(absent + unsupported)),
        remedy=remedy,
    )


def attempt(name: str, problem: Problem, facts: Facts) -> tuple[Candidate, Runner | None]:
    """All four gates. Returns the candidate, and its runner if it passed.

    Raises
    ------
    DeviceError
        If the device was lost on the way: nothing else can be tried on it.
    """
    # imported here because most of a process's life never verifies anything
    from pagedattn import verify

    known = _failures  # until a reset
    earlier = known.get((name, problem))
    if earlier is not None and isinstance(earlier.error, BuildError):
        return earlier, None
    candidate = examine(name, problem, facts)
    if candidate.reasons:
        return candidate, None
    try:
        runner = verify.load_and_verify(registry.get(name), problem, facts)
    except DeviceError as error:
        device_loss.lose(problem.device, error)
        raise
    except ConfigurationError:  # a wrong setting is no fault of this backend
        raise
    except VerificationError as error:
        return _failed(known, candidate, problem, error, loadable=True), None
    except (BackendUnavailable, BuildError) as error:
        return _failed(known, candidate, problem, error, loadable=False), None
    except Exception as error:  # a backend may raise anything; what it raised is the reason
        device_loss.raise_if_sticky(error, name, problem.device)
        told = BackendUnavailable(f"it could not be loaded: {type(error).__name__}: {error}")
        told.__cause__ = error
        return _failed(known, candidate, problem, told, loadable=False), None
    known.pop((name, problem), None)  # what failed had a passing cause
    verified = None if verify.is_off() else True
    return replace(candidate, loadable=True, verified=verified, selected=True), runner


def _failed(
    known: _Failures, candidate: Candidate, problem: Problem, error: PagedAttnError, *,
    loadable: bool,
) -> Candidate:  # fmt: skip
    log.debug("%s failed", candidate.name, exc_info=error)
    failed = replace(
        candidate,
        loadable=loadable,
        verified=False,
        reasons=(*candidate.reasons, str(error)),
        error=_kept(error),
    )
    known[candidate.name, problem] = failed
    return failed


def _kept(error: PagedAttnError) -> PagedAttnError:
    """Without tracebacks, whose frames would hold a failed attempt's tensors for good."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def unavailable(
    problem: Problem, request: Request, facts: Facts, candidates: Sequence[Candidate]
) -> PagedAttnError:
    """The error for a chain in which nothing could be bound, with every reason."""
    lines = [f"no backend can serve this call ({request.origin}):"]
    for candidate in candidates:
        lines += [f"  {candidate.name}: {_indent(reason)}" for reason in candidate.reasons]
        if candidate.remedy:
            lines.append(f"  {candidate.name}: to change that: {candidate.remedy}")
    lines.append(f"the call: {problem.device}, {describe(problem)}")
    if request.names is not None:
        lines.append(_advice(problem, request, facts))
    kind: type[PagedAttnError] = BackendUnavailable
    if len(candidates) == 1 and candidates[0].error is not None:
        kind = type(candidates[0].error)
    error = kind("\n".join(lines), tuple(candidates))
    error.__cause__ = next((c.error for c in candidates if c.error is not None), None)
    return error


def _indent(reason: str) -> str:
    return reason.replace("\n", "\n    ")


def _advice(problem: Problem, request: Request, facts: Facts) -> str:
    for name in policy.order(facts.vendor, problem.device_type):
        if name not in (request.names or ()) and not examine(name, problem, facts).reasons:
            # what an argument or a `with` block asks for, the variable does not change
            by_variable = request.origin.startswith("PAGEDATTN_BACKEND")
            ask = f"PAGEDATTN_BACKEND={name}" if by_variable else f"ask for {name}"
            return f"to go on here: {ask} (or auto, which picks what can serve)"
    return "nothing else in the automatic chain could serve it either"


def _tell(binding: Binding, request: Request, lost: Sequence[Candidate]) -> None:
    """Say once per device what was bound and who lost, and why."""
    device, parts = binding.problem.device, describe_parts(binding.parts, binding.few_queries)
    served = f"{binding.backend}: {parts}" if parts else binding.backend
    if (device, served) in _told:
        return
    _told.add((device, served))
    why = "; ".join(f"{c.name}: {', '.join(c.reasons)}" for c in lost)
    # a warning where one that was asked for lost, something failed or only plain torch is left; not
    # for what waits to be built while another serves, nor on a CPU: nothing faster is missed there
    failed = any(c.present and c.supported for c in lost)
    matters = failed or request.names is not None or binding.backend == policy.FLOOR.name
    told = lost and matters and binding.problem.device_type != "cpu"
    level = logging.WARNING if told else logging.INFO
    log.log(
        level,
        "%s serves %s (%s)%s%s",
        binding.backend,
        device,
        request.origin,
        f": {parts}" if parts else "",
        f"; passed over: {why}" if why else "",
    )
