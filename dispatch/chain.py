"""The chain: which backend serves a problem on a device, and why the others do not.

A candidate passes four gates in turn: present (the machine has what it needs), supports (it can
do the problem), loadable (it imports or compiles), verified (it was right on this device). The
first that passes all is selected. Every reason is kept, whether it is asked for or not.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pagedattn import policy, registry
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    DeviceError,
    PagedAttnError,
    VerificationError,
)
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, Problem, Runner
from pagedattn.probe import facts as probe_facts

log = logging.getLogger("pagedattn")

#: What `use_backend` asks for in this context.
forced: contextvars.ContextVar[str | tuple[str, ...] | None] = contextvars.ContextVar(
    "pagedattn_backend", default=None
)


@dataclass(frozen=True)
class Candidate:
    """What is known of one backend for one problem. None: not tried."""

    name: str
    present: bool
    supported: bool | None = None
    loadable: bool | None = None
    verified: bool | None = None
    selected: bool = False
    reasons: tuple[str, ...] = ()  # why it was not selected
    remedy: str | None = None
    error: PagedAttnError | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class Binding:
    """The record of one resolution, and the function it ended in."""

    problem: Problem
    backend: str
    requested: tuple[str, ...] | None  # None: the automatic chain
    candidates: tuple[Candidate, ...]
    runner: Runner = field(repr=False)
    calls: int = 0

    def run(self, call: Call) -> None:
        """Run one call.

        Raises
        ------
        DeviceError
            If the device reports an error that it does not recover from.
        """
        self.calls += 1
        try:
            self.runner(call)
        except RuntimeError as error:
            raise_if_sticky(error, self.backend)
            raise


@dataclass(frozen=True)
class Request:
    """Which backends were asked for, and where."""

    names: tuple[str, ...] | None
    origin: str

    @classmethod
    def current(cls, argument: str | Sequence[str] | None) -> Request:
        """The argument if given, else `use_backend`, else ``PAGEDATTN_BACKEND``."""
        if argument is not None:
            return cls(parse(argument), f"backend={argument!r}")
        if (name := forced.get()) is not None:
            return cls(parse(name), f"use_backend({name!r})")
        name = os.environ.get("PAGEDATTN_BACKEND", "")
        return cls(parse(name), f"PAGEDATTN_BACKEND={name}" if name else "the automatic chain")


def parse(spec: str | Sequence[str]) -> tuple[str, ...] | None:
    """A name, comma list or sequence of names as a tuple; None for the automatic chain.

    Raises
    ------
    TypeError
        If it is neither.
    UnknownBackend
        If a name is nobody's.
    """
    parts = spec.split(",") if isinstance(spec, str) else spec
    if not isinstance(parts, Sequence) or not all(isinstance(p, str) for p in parts):
        raise TypeError(f"a backend is a name or a sequence of names, not {spec!r}")
    names = tuple(part.strip().lower() for part in parts if part.strip())
    if names in ((), ("auto",)):
        return None
    for name in names:
        registry.get(name)
    return names


@contextlib.contextmanager
def use_backend(backend: str | Sequence[str]) -> Iterator[None]:
    """Force a backend, or a chain of them, for the calls of this thread or task in the block.

    Parameters
    ----------
    backend : str or sequence of str
        A name, a comma list or a sequence; ``"auto"`` lifts what an outer block or
        ``PAGEDATTN_BACKEND`` asks for.

    Raises
    ------
    UnknownBackend
        On entry, if a name is nobody's.
    """
    parse(backend)
    token = forced.set(backend if isinstance(backend, str) else tuple(backend))
    try:
        yield
    finally:
        forced.reset(token)


_bindings: dict[tuple[Problem, tuple[str, ...] | None], Binding] = {}
_lock = threading.RLock()
_resets: list[Callable[[], None]] = []
_told: set[tuple[str, str]] = set()  # (device, backend) of fallbacks already logged


def on_reset(callback: Callable[[], None]) -> None:
    """Call `callback` whenever bindings are dropped."""
    _resets.append(callback)


def reset() -> None:
    """Drop every binding, so that the next call resolves again."""
    with _lock:
        _bindings.clear()
        for callback in _resets:
            callback()


registry.on_change(reset)


def bindings() -> tuple[Binding, ...]:
    """Every binding that this process made, oldest first."""
    return tuple(_bindings.values())


def binding_for(problem: Problem, argument: str | Sequence[str] | None = None) -> Binding:
    """The binding for `problem`, resolved once and by one thread.

    Raises
    ------
    UnknownBackend, BackendUnavailable, BuildError, VerificationError, DeviceError
        If no candidate of the chain could be bound.
    """
    request = Request.current(argument)
    key = (problem, request.names)
    binding = _bindings.get(key)
    if binding is None:
        with _lock:
            binding = _bindings.get(key)
            if binding is None:
                binding = _bindings[key] = resolve(problem, request, probe_facts())
    return binding


def resolve(problem: Problem, request: Request, facts: Facts) -> Binding:
    """Try each candidate in order and bind the first that is right."""
    names = request.names or policy.order(facts.vendor, problem.device_type)
    candidates: list[Candidate] = []
    runner: Runner | None = None
    for name in names:
        if runner is not None:
            candidates.append(examine(name, problem, facts))
            continue
        candidate, runner = attempt(name, problem, facts)
        candidates.append(candidate)
    if runner is None:
        raise unavailable(problem, request, facts, candidates)
    selected = next(c.name for c in candidates if c.selected)
    _tell(problem, request, candidates, selected)
    return Binding(problem, selected, request.names, tuple(candidates), runner)


def examine(name: str, problem: Problem, facts: Facts) -> Candidate:
    """The gates that touch nothing: present and supports."""
    try:
        backend = registry.get(name)
    except BackendUnavailable as error:
        return Candidate(name, False, reasons=(str(error),), error=error)
    absent = tuple(backend.not_present_reasons(facts))
    unsupported = tuple(backend.not_supported_reasons(problem))
    return Candidate(
        name,
        present=not absent,
        supported=not unsupported,
        reasons=tuple(dict.fromkeys(absent + unsupported)),
        remedy=backend.remedy(facts) if absent else None,
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

    candidate = examine(name, problem, facts)
    if candidate.reasons:
        return candidate, None
    backend = registry.get(name)
    try:
        runner = verify.load_and_verify(backend, problem, facts)
    except DeviceError:
        raise
    except VerificationError as error:
        return _failed(candidate, error, loadable=True, verified=False), None
    except (BackendUnavailable, BuildError) as error:
        return _failed(candidate, error, loadable=False), None
    except Exception as error:  # a backend may raise anything; what it raised is the reason
        raise_if_sticky(error, name)
        told = BackendUnavailable(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        return _failed(candidate, told, loadable=False), None
    verified = None if verify.is_off() else True
    return replace(candidate, loadable=True, verified=verified, selected=True), runner


def _failed(
    candidate: Candidate, error: PagedAttnError, *, loadable: bool, verified: bool | None = None
) -> Candidate:
    reasons = (*candidate.reasons, str(error))
    return replace(candidate, loadable=loadable, verified=verified, reasons=reasons, error=error)


def unavailable(
    problem: Problem, request: Request, facts: Facts, candidates: Sequence[Candidate]
) -> PagedAttnError:
    """The error for a chain in which nothing could be bound, with every reason."""
    lines = [f"no backend can serve this call ({request.origin}):"]
    for candidate in candidates:
        lines += [f"  {candidate.name}: {reason}" for reason in candidate.reasons]
        if candidate.remedy:
            lines.append(f"  {candidate.name}: to change that: {candidate.remedy}")
    if request.names is not None:
        lines.append(f"  {_advice(problem, request, facts)}")
    lines.append(f"  the problem was {problem}")
    kind: type[PagedAttnError] = BackendUnavailable
    if len(candidates) == 1 and candidates[0].error is not None:
        kind = type(candidates[0].error)
    error = kind("\n".join(lines), tuple(candidates))
    error.__cause__ = next((c.error for c in candidates if c.error is not None), None)
    return error


def _advice(problem: Problem, request: Request, facts: Facts) -> str:
    for name in policy.order(facts.vendor, problem.device_type):
        if name not in (request.names or ()) and not examine(name, problem, facts).reasons:
            return f"what could serve here is {name!r}: ask for PAGEDATTN_BACKEND={name}, or auto"
    return "nothing else in the automatic chain could serve it either"


def _tell(
    problem: Problem, request: Request, candidates: Sequence[Candidate], selected: str
) -> None:
    """Say once per device what was bound and who lost, and why."""
    if (problem.device, selected) in _told:
        return
    _told.add((problem.device, selected))
    lost = [c for c in candidates if c.reasons and not c.selected]
    why = "; ".join(f"{c.name}: {', '.join(c.reasons)}" for c in lost)
    level = logging.WARNING if lost and problem.device_type != "cpu" else logging.INFO
    log.log(
        level,
        "%s serves %s (%s)%s",
        selected,
        problem.device,
        request.origin,
        f"; passed over: {why}" if why else "",
    )


_STICKY = (
    "illegal memory access",
    "misaligned address",
    "device-side assert",
    "illegal instruction",
    "unspecified launch failure",
    "hardware stack error",
    "invalid program counter",
    "invalid address space",
    "the launch timed out",
    "uncorrectable ecc",
    "device is lost",
)


def raise_if_sticky(error: BaseException, backend: str) -> None:
    """Turn an error that a device does not recover from into a `DeviceError`."""
    text = str(error).lower()
    if any(sign in text for sign in _STICKY):
        raise DeviceError(
            f"the device is lost to this process: {backend} failed with: {error}\n"
            "No call on it can succeed any more; restart the process. "
            "PAGEDATTN_BACKEND chooses another backend there.",
            backend,
        ) from error
