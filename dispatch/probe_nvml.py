"""The devices as the driver's management library lists them, without a CUDA context.

NVIDIA's library is ``libnvidia-ml.so.1``. Iluvatar's ``libixml.so`` has the same functions
under the same names. Both are called through ctypes, and shut down again at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

NVIDIA_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TEXT = 96  # bytes; the longest of the library's fixed buffers


class NvmlError(Exception):
    """The management library is not there, or refused; the message says which call."""


@dataclass(frozen=True)
class RawDevice:
    """One physical device, in the library's order."""

    name: str
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    partitioned: bool = False  # MIG is on: CUDA shows an instance in its place


@dataclass(frozen=True)
class Listing:
    """What the management library answered."""

    library: str
    driver: str | None
    driver_cuda: str | None  # "13.0"
    devices: tuple[RawDevice, ...]


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def list_devices(libraries: Sequence[str] = NVIDIA_LIBRARIES) -> Listing:
    """Ask the first of `libraries` that loads and has NVML's functions.

    Raises
    ------
    NvmlError
        None loads, or the library refuses (no driver, wrong driver).
    """
    failures = []
    for path in libraries:
        try:
            library = ctypes.CDLL(path)
            # another project's XML library is called libixml.so too
            library.nvmlInit_v2  # noqa: B018
        except (OSError, AttributeError) as error:
            failures.append(str(error))
            continue
        return _ask(library, path)
    raise NvmlError("; ".join(failures) or "no management library to ask")


def _ask(library: Any, path: str) -> Listing:
    _call(library, "nvmlInit_v2")
    try:
        return Listing(
            library=path,
            driver=_text(library, "nvmlSystemGetDriverVersion"),
            driver_cuda=_driver_cuda(library),
            devices=tuple(_device(library, index) for index in range(_count(library))),
        )
    finally:
        with suppress(NvmlError):  # the answers are in; nothing depends on the shutdown
            _call(library, "nvmlShutdown")


def _call(library: Any, name: str, *arguments: Any) -> None:
    function = getattr(library, name, None)
    if function is None:
        raise NvmlError(f"{name} is not in the library")
    status = function(*arguments)
    if status != 0:
        raise NvmlError(f"{name} failed: {_explain(library, status)}")


def _explain(library: Any, status: int) -> str:
    explain = getattr(library, "nvmlErrorString", None)
    if explain is None:
        return f"status {status}"
    explain.restype = ctypes.c_char_p
    return f"{(explain(status) or b'').decode(errors='replace')} (status {status})"


def _text(library: Any, name: str, *handle: Any) -> str | None:
    buffer = ctypes.create_string_buffer(_TEXT)
    try:
        _call(library, name, *handle, buffer, ctypes.c_uint(_TEXT))
    except NvmlError:
        return None
    return buffer.value.decode(errors="replace")


def _count(library: Any) -> int:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    return count.value


def _driver_cuda(library: Any) -> str | None:
    version = ctypes.c_int()
    try:
        _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
    except NvmlError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _device(library: Any, index: int) -> RawDevice:
    handle = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    name = _text(library, "nvmlDeviceGetName", handle)
    if not name:
        raise NvmlError(f"device {index} has no name")
    return RawDevice(
        name=name,
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        capability=_pair(library, "nvmlDeviceGetCudaComputeCapability", handle),
        memory_bytes=_memory(library, handle),
        partitioned=(_pair(library, "nvmlDeviceGetMigMode", handle, ctypes.c_uint) or (0,))[0] == 1,
    )


def _pair(
    library: Any, name: str, handle: Any, kind: type[Any] = ctypes.c_int
) -> tuple[int, int] | None:
    first, second = kind(), kind()
    try:
        _call(library, name, handle, ctypes.byref(first), ctypes.byref(second))
    except NvmlError:  # a device or a library that lacks the feature
        return None
    return first.value, second.value


def _memory(library: Any, handle: Any) -> int | None:
    memory = _Memory()
    try:
        _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except NvmlError:
        return None
    return int(memory.total)
