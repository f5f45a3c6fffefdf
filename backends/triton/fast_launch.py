"""Launching a kernel again without Triton's binding of arguments, which costs tens of µs.

A jitted call binds some fifty arguments by name, looks at each one's type and alignment, and
looks the compiled kernel up. Here that is done once for each pattern of pointer alignments; a
warm launch hands the arguments to the compiled kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor

# The compiled kernel's launcher takes every argument, constants too, in these releases; others
# may leave the constants out. A release that nobody tried goes the long way.
_KNOWN = Version("3.6") <= Version(triton.__version__.split("+")[0]) < Version("3.7")


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
        self._constants = tuple(constants[name] for name in names)
        self._compiled: dict[tuple[bool, ...], Any] = {}
        self._fast = _KNOWN and hasattr(kernel, "device_caches")  # the interpreter has none
        if self._fast:
            fixed = [p.name for p in kernel.params if p.do_not_specialize]
            pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
            self._aligned = [i for i, name in enumerate(pointers) if name not in fixed]

    def __call__(
        self, grid: tuple[int, int, int], pointers: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> None:
        """Launch on the current stream of the current device, which holds the tensors."""
        if not self._fast:
            self._kernel[grid](*pointers, *numbers, **self._keywords)
            return
        alignment = tuple([pointers[i].data_ptr() % 16 == 0 for i in self._aligned])
        compiled = self._compiled.get(alignment)
        if compiled is None:
            self._compiled[alignment] = self._kernel[grid](*pointers, *numbers, **self._keywords)
            return
        stream = torch._C._cuda_getCurrentRawStream(pointers[0].get_device())
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *numbers, *self._constants,
        )  # fmt: skip
