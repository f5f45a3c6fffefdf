"""fp32 means fp32: no TF32 on a GPU, no bf16 on a CPU, whatever the user allowed globally."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


class _MatmulPrecision:
    """The precision of fp32 products on one kind of device: read it, make it exact, restore it.

    torch ≥ 2.9 has one setting a device (`fp32_precision`) and refuses to have it mixed with
    the older `allow_tf32` and `set_float32_matmul_precision`; older ones have only these.
    """

    def __init__(self, device_type: str) -> None:
        owner = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        matmul: Any = getattr(owner, "matmul", None)
        self._setting = matmul if hasattr(matmul, "fp32_precision") else None

    def read(self) -> str:
        if self._setting is not None:
            return str(self._setting.fp32_precision)
        return torch.get_float32_matmul_precision()

    def write(self, value: str) -> None:
        if self._setting is not None:
            self._setting.fp32_precision = value
        else:
            torch.set_float32_matmul_precision(value)

    @property
    def exact(self) -> str:
        return "ieee" if self._setting is not None else "highest"


class ExactFp32:
    """A context in which fp32 products are exact; what was set before is restored.

    The setting is one for the whole process, so calls on several threads share it: the first
    one in saves it, the last one out restores it.
    """

    def __init__(self, device_type: str) -> None:
        self._precision = _MatmulPrecision(device_type)
        self._lock = threading.Lock()
        self._inside = 0
        self._saved: str | None = None

    @property
    def current(self) -> str:
        """The setting as it is now, in torch's words."""
        return self._precision.read()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                found = self._precision.read()
                # "none": nothing was chosen, here or for all of torch, and that is exact
                self._saved = None if found in (self._precision.exact, "none") else found
                if self._saved is not None:
                    self._precision.write(self._precision.exact)
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._saved is not None:
                self._precision.write(self._saved)


_guards: dict[str, ExactFp32] = {}


def without_gradients(out: Tensor) -> AbstractContextManager[object]:
    """A context, for the calling thread, in which `out` can be written and nothing is recorded.

    A tensor that was made in inference mode can be written in no other.
    """
    return torch.inference_mode() if out.is_inference() else torch.no_grad()


@contextmanager
def exact_arithmetic(out: Tensor) -> Iterator[None]:
    """No gradients, no autocast, and fp32 products that are really fp32, where `out` is."""
    device_type = out.device.type
    guard = _guards.setdefault(device_type, ExactFp32(device_type))
    with without_gradients(out), torch.autocast(device_type, enabled=False), guard:
        yield
