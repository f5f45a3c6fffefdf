"""Devices that this process has lost, so that nothing touches them again.

An illegal access takes the context with it, and a card that hung may hang whatever asks it next:
in both cases the first reason is the useful one, and every later call is refused with it.
"""

from __future__ import annotations

from typing import NoReturn

from pagedattn.backends.errors import DeviceError

#: device -> why it was lost. Empty in almost every process, which is all that a call checks.
lost: dict[str, DeviceError] = {}

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


def is_sticky(message: str) -> bool:
    """Whether an error's text names a fault that a CUDA context does not recover from."""
    text = message.lower()
    return any(sign in text for sign in _STICKY)


def lose(device: str, error: DeviceError) -> DeviceError:
    """Remember that `device` is lost; returns `error`. The first reason stays."""
    lost.setdefault(device, error.with_traceback(None))
    return error


def raise_if_sticky(error: BaseException, backend: str, device: str) -> None:
    """Turn an error that the device does not recover from into a `DeviceError`, and remember it."""
    if not is_sticky(str(error)):
        return
    raise lose(
        device,
        DeviceError(
            f"{device} is lost to this process: {backend} failed with: {error}\n"
            "No call on it can succeed any more; restart the process. "
            "PAGEDATTN_BACKEND chooses another backend there.",
            backend,
        ),
    ) from error


def refuse_if_lost(device: str) -> None:
    """Raise `DeviceError`, with the first reason, if `device` was lost."""
    if (first := lost.get(device)) is not None:
        _refuse(device, first)


def _refuse(device: str, first: DeviceError) -> NoReturn:
    raise DeviceError(
        f"{device} was lost earlier and is not touched again by this process; "
        f"the first error was:\n{first}",
        first.record,
    )
