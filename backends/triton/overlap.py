"""Programmatic dependent launch, where the installed Triton has it: the merge's launch overlaps
the kernel before it. Elsewhere the same names do nothing, so that no kernel names a function
that Triton lacks."""

from __future__ import annotations

import torch
import triton.language as tl

from pagedattn.backends.platform_rules import vendor_of_name

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    AVAILABLE = True
except ImportError:
    AVAILABLE = False
    # never called, but a kernel's source names them, and Triton looks every name up
    gdc_launch_dependents = gdc_wait = tl.debug_barrier


def usable(device: str) -> bool:
    """Whether the device (a CUDA one) has it: from Hopper on."""
    name = torch.cuda.get_device_properties(device).name
    return (
        AVAILABLE
        and vendor_of_name(name) == "nvidia"
        and (torch.cuda.get_device_capability(device) >= (9, 0))
    )


__all__ = ["AVAILABLE", "gdc_launch_dependents", "gdc_wait", "usable"]
