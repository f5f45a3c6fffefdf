"""The environment variables, read when they are needed so that a change after import counts (but
for those about the import itself)."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from pagedattn.backends.errors import ConfigurationError, PagedAttnWarning

PREFIX = "PAGEDATTN_"

#: name -> what it means, in a line
VARIABLES: dict[str, str] = {
    "PAGEDATTN_BACKEND": "a backend's name, or a comma list that is the chain",
    "PAGEDATTN_BUILD": "auto | never | always: whether a first use may compile",
    "PAGEDATTN_CACHE_DIR": "where binaries and verdicts are kept",
    "PAGEDATTN_CHECK": "1: check lengths and table contents, naming the culprit; synchronises",
    "PAGEDATTN_COREX_TRITON": "1: accept the vendor's Triton on a BI-V100",
    "PAGEDATTN_EAGER": "1: bind at import, not at the first call",
    "PAGEDATTN_LOG": "debug | info | warning | error: log to stderr at this level",
    "PAGEDATTN_VERIFY": "auto | child (always in a child process) | off",
}
_CHOICES = {
    "PAGEDATTN_BUILD": ("auto", "never", "always"),
    "PAGEDATTN_LOG": ("debug", "info", "warning", "error"),
    "PAGEDATTN_VERIFY": ("auto", "child", "off"),
}
_SWITCHES = ("PAGEDATTN_CHECK", "PAGEDATTN_COREX_TRITON", "PAGEDATTN_EAGER")


def reader(name: str) -> Callable[[], str | None]:
    """A function that reads one variable, for where it is read in each call.

    ``os.environ.get`` takes 0.3 to 1.4 µs, most where the variable is unset; the table under it
    takes 0.05, and is changed by everything that changes ``os.environ``.
    """
    table = getattr(os.environ, "_data", None)
    if not isinstance(table, dict):
        return lambda: os.environ.get(name)
    key = os.environ.encodekey(name)

    def read() -> str | None:
        value = table.get(key)
        return None if value is None else os.environ.decodevalue(value)

    return read


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` where something known is close to `name`, else nothing."""
    spelt = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(spelt), n=1, cutoff=0.5)
    return f" (did you mean {spelt[close[0]]}?)" if close else ""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for each ``PAGEDATTN_`` variable that nothing reads."""
    # compared without the prefix, which would make any two of them alike
    ends = {name.removeprefix(PREFIX): name for name in VARIABLES}
    sentences = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), ends, n=1)
            hint = f" (did you mean {ends[close[0]]}?)" if close else ""
            sentences.append(f"{name} is not a variable of pagedattn and has no effect{hint}")
    return sentences


def warn_of_unknown_variables() -> None:
    for sentence in unknown_variables():
        warnings.warn(sentence, PagedAttnWarning, stacklevel=3)


def eager() -> bool:
    """Whether importing is to bind: ``PAGEDATTN_EAGER=1``, unless one of our commands is running.

    A command binds what it needs, and the report must print where nothing can be bound.
    """
    try:
        return switch("PAGEDATTN_EAGER") and not _our_command()
    except ConfigurationError as error:
        warnings.warn(f"{error}; nothing is bound at import", PagedAttnWarning, stacklevel=3)
        return False


def _our_command() -> bool:
    return Path(sys.argv[0] if sys.argv else "").stem == "pagedattn" or any(
        pair == ("-m", "pagedattn") for pair in pairwise(sys.orig_argv)
    )


def invalid_values() -> list[str]:
    """One sentence for each variable of ours whose value means nothing."""
    sentences = []
    for check, names in ((choice, _CHOICES), (switch, _SWITCHES)):
        for name in names:
            try:
                check(name)
            except ConfigurationError as error:
                sentences.append(str(error))
    return sentences


def choice(name: str) -> str:
    """The value of a variable that takes one of a few words; the first is the default.

    Raises
    ------
    ConfigurationError
        If it is set to anything else.
    """
    valid = _CHOICES[name]
    value = os.environ.get(name, "").strip().lower() or valid[0]
    if value not in valid:
        raise ConfigurationError(
            f"{name}={value!r} means nothing; valid are {', '.join(valid)}{nearest(value, valid)}"
        )
    return value


def switch(name: str) -> bool:
    """Whether an on/off variable is on.

    Raises
    ------
    ConfigurationError
        If it is neither of 1, true, yes, on, nor of 0, false, no, off or empty.
    """
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"{name}={value!r} means nothing; valid are 1 and 0")


def configure_logging() -> None:
    """Attach a handler to the logger ``pagedattn`` where ``PAGEDATTN_LOG`` asks for one."""
    if not os.environ.get("PAGEDATTN_LOG"):
        return
    try:
        level = choice("PAGEDATTN_LOG").upper()
    except ConfigurationError as error:  # a mistyped level is no reason to fail an import
        warnings.warn(str(error), PagedAttnWarning, stacklevel=3)
        return
    logger = logging.getLogger("pagedattn")
    logger.setLevel(level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
