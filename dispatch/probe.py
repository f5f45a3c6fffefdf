"""What this machine is: facts only, gathered without starting anything.

`probe` starts no process, creates no CUDA context and does not import Triton, so a process
that is forked afterwards can still use the device. `facts` keeps the answer.

What gathers them is imported at the first call, since the import of the package is timed.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedattn.backends.facts import Facts
    from pagedattn.probe_sources import Sources

_lock = threading.Lock()
_facts: Facts | None = None


def probe(sources: Sources | None = None, *, devices: bool = True, touch: bool = False) -> Facts:
    """Gather the facts. What cannot be learned becomes a note; nothing is raised for it.

    Parameters
    ----------
    sources : Sources, optional
        Where to look; this machine if not given.
    devices : bool
        False leaves the management library alone (it can take tens of milliseconds), so that
        the vendor follows from the software.
    touch : bool
        Whether torch may initialise CUDA in this process. Only so can a driver that disagrees
        with the SDK be told from a machine with no device.
    """
    from pagedattn.probe_gather import gather

    return gather(_this_machine() if sources is None else sources, devices, touch)


def facts(*, refresh: bool = False, touch: bool = False) -> Facts:
    """This process's facts, gathered at the first call.

    They are gathered anew with `refresh`, with `touch` (as in `probe`), and once when CUDA has
    been initialised since: torch's own names of the devices are better than the library's.
    """
    global _facts
    with _lock:
        if _facts is None or refresh or (touch and _facts.device_usable is None):
            _facts = probe(touch=touch)
        elif _facts.device_usable is None and _initialised():
            _facts = probe()
        # what our errors tell a user to set must count when it is set
        accepted = _this_machine().flag("PAGEDATTN_COREX_TRITON")
        if accepted != _facts.corex_triton:
            _facts = replace(_facts, corex_triton=accepted)
        return _facts


def _this_machine() -> Sources:
    from pagedattn.probe_sources import this_machine

    return this_machine()


def _initialised() -> bool:
    from pagedattn.probe_devices import initialised
    from pagedattn.probe_sources import Notes

    return initialised(_this_machine().torch, Notes())
