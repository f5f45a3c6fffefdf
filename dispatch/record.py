"""What is kept of a resolution: the candidates, and the binding that it ended in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagedattn import device_loss
from pagedattn.backends.errors import DeviceError, PagedAttnError
from pagedattn.backends.protocol import Call, Problem, QueryPart, Runner

#: what a backend serves of a binding's calls: sequences of them, or whole ones
Part = Literal["all", "short", "long", "few", "more"]


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
    few_queries: int = 0  # for calls without a sequence of more query tokens; 0: for any
    reasons: tuple[str, ...] = ()  # why it was not selected
    remedy: str | None = None
    error: PagedAttnError | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class Binding:
    """The record of one resolution, and the function it ended in."""

    problem: Problem
    backend: str  # two share the calls: both names, joined by "+"
    requested: tuple[str, ...] | None  # None: the automatic chain
    candidates: tuple[Candidate, ...]
    runner: Runner = field(repr=False)
    calls: int = 0  # threads that share a binding may miscount by a few

    @property
    def parts(self) -> dict[Part, str]:
        """Which backend serves which sequences of a call; with ``few`` and ``more``, which calls as
        a whole: those without a sequence of more than `few_queries` query tokens, and the others.
        """
        rest: Part = "more" if self.few_queries else "all"
        parts: dict[Part, str] = {}
        for c in self.candidates:
            if c.selected:
                whole: Part = "few" if c.few_queries else rest
                parts[whole if c.query_part == "all" else c.query_part] = c.name
        return parts

    @property
    def few_queries(self) -> int:
        """The bound between calls of few query tokens a sequence and of more, where they are
        different backends'; 0 where they are not."""
        return max((c.few_queries for c in self.candidates if c.selected), default=0)

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
