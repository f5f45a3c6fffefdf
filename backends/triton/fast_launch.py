"""Launching a kernel again without Triton's binding of arguments, which costs tens of µs.

A jitted call binds some fifty arguments by name, looks at each one's type and alignment, and
looks the compiled kernel up. Here that is done once for each pattern of pointer alignments; a
warm launch hands addresses to the compiled kernel. As numbers, for those its launcher takes as
they are, 0 for none: it asks the driver about every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor

# The compiled kernel's launcher takes every argument, constants too, in these releases; others
# may leave the constants out. A release that nobody tried goes the long way.
_KNOWN = Version("3.6") <= Version(triton.__version__.split("+")[0]) < Version("3.7")

Grid = tuple[int, int, int]
# None where a problem lacks what it would point to, and the kernel never follows it
Pointers = tuple["Tensor | None", ...]


class FastKernel:
    """A jitted kernel with its constants, for calls that differ in the other arguments alone.

    Parameters
    ----------
    kernel : the jitted function; its parameters are pointers, then numbers, then constants
    constants : by name, every ``constexpr`` parameter
    options : ``num_warps``, ``num_stages`` and the like
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._kernel = kernel
        self._keywords = {**constants, **options}
        names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        self.constants = tuple(constants[name] for name in names)
        self._compiled: dict[tuple[bool, ...], Any] = {}
        self._fast = _KNOWN and hasattr(kernel, "device_caches")  # the interpreter has none
        if self._fast:
            fixed = [p.name for p in kernel.params if p.do_not_specialize]
            pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
            self._aligned = [i for i, name in enumerate(pointers) if name not in fixed]

    def launch(self, grid: Grid, pointers: Pointers, numbers: tuple[float, ...]) -> Any:
        """Launch by Triton's own road, compiling if need be; returns the compiled kernel, or
        None where only that road is known."""
        anything = pointers[0]
        given = [anything if p is None else p for p in pointers]
        compiled = self._kernel[grid](*given, *numbers, **self._keywords)
        if not self._fast:
            return None
        self._compiled[self._alignment(pointers)] = compiled
        return compiled

    def compiled(self, pointers: Pointers) -> Any:
        """The compiled kernel for pointers aligned as these, or None."""
        return self._compiled.get(self._alignment(pointers)) if self._fast else None

    def _alignment(self, pointers: Pointers) -> tuple[bool, ...]:
        chosen = [pointers[i] for i in self._aligned]
        return tuple([p is None or p.data_ptr() % 16 == 0 for p in chosen])


class Launch:
    """A launch that lacks only its pointers; those of one `Launch` must all be aligned alike."""

    __slots__ = ("_grid", "_kernel", "_middle", "_numbers", "_rest", "_run")

    def __init__(self, kernel: FastKernel, grid: Grid, numbers: tuple[float, ...]) -> None:
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._run: Any = None

    def __call__(self, pointers: Pointers) -> None:
        """Launch on the current stream of the current device, which holds the tensors."""
        if self._run is None and not self._prepare(pointers):
            return
        device = pointers[0].get_device()  # type: ignore[union-attr]
        addresses = [0 if p is None else p.data_ptr() for p in pointers]
        self.again(torch._C._cuda_getCurrentRawStream(device), addresses)

    def again(self, stream: int, addresses: Sequence[int]) -> bool:
        """Launch with addresses instead of tensors, 0 for None; False if that cannot be yet."""
        run = self._run
        if run is None:
            return False
        run(*self._grid, stream, *self._middle, *addresses, *self._rest)
        return True

    def _prepare(self, pointers: Pointers) -> bool:
        """Whether the compiled kernel was there; if it was not, this has launched it."""
        compiled = self._kernel.compiled(pointers)
        if compiled is None:
            self._kernel.launch(self._grid, pointers, self._numbers)
            return False
        self._middle = (compiled.function, compiled.packed_metadata, None, None, None)
        self._rest = (*self._numbers, *self._kernel.constants)
        self._run = compiled.run
        return True
