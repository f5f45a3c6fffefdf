"""What is kept of a resolution: the candidates, and the binding that it ended in."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedattn import device_loss
from pagedattn.backends.errors import DeviceError, PagedAttnError
from pagedattn.backends.protocol import Call, Problem, QueryPart, Runner


@dataclass(frozen=True)
class Candidate:
    """What is known of one backend for one problem. None: not tried."""

    name: str
    present: bool
    supported: bool | None = None
    loadable: bool | None = None
    verified: bool | None = None
    selected: bool = False
    query_part: QueryPart = "all"  # which sequences of a call it was tried for
    reasons: tuple[str, ...] = ()  # why it was not selected
    remedy: str | None = None
    error: PagedAttnError | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class Binding:
    """The record of one resolution, and the function it ended in."""

    problem: Problem
    backend: str  # two share a call: both names, joined by "+"
    requested: tuple[str, ...] | None  # None: the automatic chain
    candidates: tuple[Candidate, ...]
    runner: Runner = field(repr=False)
    calls: int = 0  # threads that share a binding may miscount by a few

    @property
    def parts(self) -> dict[QueryPart, str]:
        """Which backend serves which sequences of a call."""
        return {c.query_part: c.name for c in self.candidates if c.selected}

    def run(self, call: Call) -> None:
        """Run one call.

        Raises
        ------
        DeviceError
            If the device reports an error that it does not recover from, or was lost before.
        """
        if device_loss.lost:
            device_loss.refuse_if_lost(self.problem.device)
        self.calls += 1
        try:
            self.runner(call)
        except DeviceError as error:
            device_loss.lose(self.problem.device, error)
            raise
        except RuntimeError as error:
            device_loss.raise_if_sticky(error, self.backend, self.problem.device)
            raise
