"""The exceptions of pagedattn.

A wrong argument is a `ValueError` or a `TypeError`. Everything else is one of these::

    PagedAttnError(Exception)
    ├── BackendUnavailable       no backend (or not the forced one) can serve this call
    │   └── UnknownBackend       also a ValueError: the name is not one of ours
    ├── ConfigurationError       an environment variable of ours has a value we don't know
    ├── BuildError               compiling a backend failed; holds the compiler's first message
    ├── VerificationError        a backend ran and was not right
    └── DeviceError              the device is lost: a sticky error, or it hung

Each carries in `.record` what it speaks of (a chain's candidates, a build's log), or None.
"""

from __future__ import annotations

from typing import Any


class PagedAttnError(Exception):
    """Base of every error that is not a wrong argument.

    Parameters
    ----------
    message : str
        What happened, what was expected, what to do.
    record : object, optional
        The record that the message was made from.
    """

    def __init__(self, message: str, record: Any = None) -> None:
        super().__init__(message)
        self.record = record


class BackendUnavailable(PagedAttnError):
    """No backend can serve the call; the message holds every candidate's reasons."""


class UnknownBackend(BackendUnavailable, ValueError):
    """A backend name that nobody registered; the message names the nearest valid one."""


class ConfigurationError(PagedAttnError):
    """A ``PAGEDATTN_`` variable has a value that means nothing; the message lists those valid."""


class BuildError(PagedAttnError):
    """Compiling a backend failed; the message holds the compiler's first message."""


class VerificationError(PagedAttnError):
    """A backend ran on this device and its result was wrong."""


class DeviceError(PagedAttnError):
    """The device is lost to this process: an illegal access, a sticky error, or a hang."""


class PagedAttnWarning(UserWarning):
    """A setting of ours that has no effect, such as an unknown ``PAGEDATTN_`` variable."""
