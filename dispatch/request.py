"""Which backends a caller asks for: by argument, by `use_backend`, or by the environment."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedattn import registry
from pagedattn.backends.errors import UnknownBackend

#: What `use_backend` asks for in this context.
forced: contextvars.ContextVar[str | tuple[str, ...] | None] = contextvars.ContextVar(
    "pagedattn_backend", default=None
)


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
    # a name twice is no second try
    names = tuple(dict.fromkeys(part.strip().lower() for part in parts if part.strip()))
    if names in ((), ("auto",)):
        return None
    if "auto" in names:
        raise UnknownBackend(f"auto stands alone: it is the whole chain, not a part of {spec!r}")
    for name in names:
        registry.require_known(name)
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
