"""Which implementation writes a class of caches.

The first of the chain that has a write of its own, ready and proved right on this device; plain
torch writes everywhere else. All of them write the same, so that only the time differs.
"""

from __future__ import annotations

import logging

from pagedattn import chain, device_loss, policy, registry
from pagedattn.backends import kv_write
from pagedattn.backends.errors import ConfigurationError, DeviceError
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Problem, Writer, WritesCache
from pagedattn.probe import facts as probe_facts
from pagedattn.request import Request
from pagedattn.wording import describe

log = logging.getLogger("pagedattn")

# Replaced, not emptied, where bindings change: what was resolved before must not be kept after.
_writers: dict[tuple[Problem, tuple[str, ...] | None], Writer] = {}


def _forget() -> None:
    global _writers
    _writers = {}


chain.on_reset(_forget)
chain.on_bound(_forget)  # a backend that was bound may have compiled what a write needs


def writer_for(problem: Problem) -> Writer:
    """What writes caches of `problem`'s types, sizes and layout, resolved once.

    Raises
    ------
    UnknownBackend
        If a backend is asked for that nobody registered.
    DeviceError
        If the device was lost, now or before.
    """
    device_loss.refuse_if_lost(problem.device)
    request = Request.current(None)
    key = (problem, request.names)
    known = _writers
    writer = known.get(key)
    if writer is None:
        writer = known[key] = _resolve(problem, request)
    return writer


def prepare(problem: Problem) -> None:
    """Resolve now what the first write into the caches of these attention calls would."""
    writer_for(
        Problem(
            problem.device, problem.dtype, problem.kv_dtype, problem.num_kv_heads,
            problem.num_kv_heads, problem.head_dim, problem.block_size, problem.kv_layout,
            kv_scales=problem.kv_scales,
        )
    )  # fmt: skip


def _resolve(problem: Problem, request: Request) -> Writer:
    facts = probe_facts()
    for name in request.names or policy.order(facts.vendor, problem.device_type):
        if name == policy.FLOOR.name:
            break
        writer = _attempt(name, problem, facts)
        if writer is not None:
            log.info("%s writes caches on %s: %s", name, problem.device, describe(problem))
            return writer
    return kv_write.write


def _attempt(name: str, problem: Problem, facts: Facts) -> Writer | None:
    # imported here because most of a process's life never verifies anything
    from pagedattn import verify

    candidate = chain.examine(name, problem, facts)
    if candidate.reasons:
        return None
    backend = registry.get(name)
    if not isinstance(backend, WritesCache):
        return None
    try:
        writer: Writer = verify.load_and_verify(backend, problem, facts, verify.WRITE)
    except DeviceError as error:
        device_loss.lose(problem.device, error)
        raise
    except ConfigurationError:  # a wrong setting is no fault of this backend
        raise
    except Exception as error:  # a backend may raise anything; torch writes where it does
        device_loss.raise_if_sticky(error, name, problem.device)
        log.info("%s does not write caches on %s: %s", name, problem.device, error)
        return None
    return writer
