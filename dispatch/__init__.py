"""pagedattn: one call for attention over a paged KV cache.

Behind `paged_attention` stands whichever implementation is there and was proved right on this
machine. `capability_report` says which, and why the others lost; ``pagedattn report`` prints
it. The exceptions are in `pagedattn.errors`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from pagedattn import settings as _settings
from pagedattn.api import merge_states, paged_attention, write_kv
from pagedattn.backends import errors
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    ConfigurationError,
    DeviceError,
    PagedAttnError,
    PagedAttnWarning,
    UnknownBackend,
    VerificationError,
)
from pagedattn.binding import bind
from pagedattn.binding import bind_at_import as _bind_at_import
from pagedattn.record import Binding, Candidate
from pagedattn.registry import register_backend
from pagedattn.report import capability_report
from pagedattn.request import use_backend

__all__ = [
    "BackendUnavailable",
    "Binding",
    "BuildError",
    "Candidate",
    "ConfigurationError",
    "DeviceError",
    "PagedAttnError",
    "PagedAttnWarning",
    "UnknownBackend",
    "VerificationError",
    "bind",
    "capability_report",
    "errors",
    "merge_states",
    "paged_attention",
    "register_backend",
    "use_backend",
    "write_kv",
]

try:
    __version__ = _version("pagedattn")
except _PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

_settings.warn_of_unknown_variables()
_settings.configure_logging()
if _settings.eager():
    _bind_at_import()
