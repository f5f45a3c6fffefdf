"""Backends by name: our own, those of entry points, and those registered by a call.

This is the one module of the dispatcher that knows the implementations, and it imports each
on first use. An installed package's backends (entry point group ``pagedattn.backends``) can be
asked for by name; installing a package never changes what the automatic chain picks.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pagedattn.backends.errors import BackendUnavailable, UnknownBackend
from pagedattn.backends.protocol import Backend
from pagedattn.settings import nearest

ENTRY_POINT_GROUP = "pagedattn.backends"

_BUILTIN = {
    "cuda": ("pagedattn.backends.cuda.backend", "CudaBackend"),
    "triton": ("pagedattn.backends.triton.backend", "TritonBackend"),
    "torch": ("pagedattn.backends.python_v2.backend", "TorchBackend"),
    "reference": ("pagedattn.backends.reference", "ReferenceBackend"),
}
_instances: dict[str, Backend] = {}
_lock = threading.RLock()
_on_change: list[Callable[[], None]] = []


def names() -> tuple[str, ...]:
    """Every name that ``PAGEDATTN_BACKEND`` takes, ours first."""
    found = dict.fromkeys([*_BUILTIN, *_instances, *(point.name for point in _points())])
    return tuple(found)


def get(name: str) -> Backend:
    """The backend called `name`, imported on first use.

    Raises
    ------
    UnknownBackend
        If nobody registered the name; the message has the valid ones.
    BackendUnavailable
        If an entry point's module cannot be imported or is no backend.
    """
    with _lock:
        if name not in _instances:
            made = _load(name)
            # importing it may have registered it
            _instances.setdefault(name, made)
        return _instances[name]


def require_known(name: str) -> None:
    """Raise `UnknownBackend`, naming the nearest, if nobody registered `name`. Imports nothing."""
    if name not in _BUILTIN and name not in _instances and name not in names():
        raise UnknownBackend(
            f"no backend is called {name!r}{nearest(name, names())}; "
            f"valid are {', '.join(names())}, or auto"
        )


def register_backend(backend: Backend) -> None:
    """Make a backend of your own available by its ``name``.

    It can then be asked for by ``backend=``, `use_backend` and ``PAGEDATTN_BACKEND`` and is
    verified like any other before it is bound. It is never in the automatic chain.

    Parameters
    ----------
    backend : Backend
        An object with the members of `pagedattn.backends.protocol.Backend`.

    Raises
    ------
    TypeError
        If a member is missing.
    ValueError
        If the name is one of pagedattn's own, or no plain word in lower case.
    """
    _check(backend)
    if backend.name in _BUILTIN:
        raise ValueError(f"the name {backend.name!r} belongs to pagedattn; give yours another")
    with _lock:
        _instances[backend.name] = backend
    for callback in _on_change:
        callback()


def on_change(callback: Callable[[], None]) -> None:
    """Call `callback` after each registration, since bindings may no longer hold."""
    _on_change.append(callback)


def _points() -> list[EntryPoint]:
    return [p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name not in _BUILTIN]


def _load(name: str) -> Backend:
    require_known(name)
    if name in _BUILTIN:
        module, attribute = _BUILTIN[name]
        return _made(name, f"{module}:{attribute}", lambda: _builtin(module, attribute))
    point = next(p for p in _points() if p.name == name)
    return _made(name, f"the entry point {point.name} = {point.value}", point.load)


def _builtin(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(module), attribute)


def _made(name: str, origin: str, load: Callable[[], Any]) -> Backend:
    try:
        made = load()
        backend: Backend = made() if isinstance(made, type) else made
        _check(backend)
    except Exception as error:  # an import may raise anything; what it raised is the reason
        raise BackendUnavailable(
            f"{origin} gives no backend: {type(error).__name__}: {error}"
        ) from error
    if backend.name != name:
        raise BackendUnavailable(
            f"{origin} gives a backend that calls itself {backend.name!r}; "
            "the two names must be equal"
        )
    return backend


def _check(backend: Backend) -> None:
    missing = [
        member
        for member in ("name", "not_present_reasons", "not_supported_reasons", "load", "remedy")
        if not hasattr(backend, member)
    ]
    if missing:
        raise TypeError(
            f"{type(backend).__name__} is no backend: it lacks {', '.join(missing)} "
            "(see pagedattn.backends.protocol.Backend)"
        )
    name = backend.name
    plain = isinstance(name, str) and name.replace("-", "_").isidentifier() and name.islower()
    if not plain or name == "auto":
        raise ValueError(
            f"a backend's name must be a plain word in lower case, and not auto: {name!r}"
        )
