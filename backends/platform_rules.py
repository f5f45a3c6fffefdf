"""What follows from a device's name: vendor, warp size, architecture, whether Triton may run.

The name decides, never the compute capability: an NVIDIA V100 and an Iluvatar BI-V100 are both
(7, 0).
"""

from __future__ import annotations

import re

from pagedattn.backends.facts import DeviceFacts, Facts, Vendor

# Plain strings: `re` compiles (and keeps) them at their first use, not at import.
_ILUVATAR = r"(?i)\biluvatar\b|\b(BI|MR)-?V\d"
# Drivers before 2021 left the word NVIDIA out of the names.
_NVIDIA = r"(?i)^(NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID|RTX|A(2|10|16|30|40|100)\b)"
_BI_V100 = r"(?i)\bBI-?V100"
_COREX_ARCHS = ((_BI_V100, "ivcore10"), (r"(?i)\bBI-?V150|\bMR-?V\d", "ivcore11"))
_COREX_ARCH_OF_CAPABILITY = {(7, 0): "ivcore10", (7, 1): "ivcore11", (8, 0): "ivcore20"}

COREX_TRITON_BACKENDS = ("iluvatar", "corex")


def vendor_of_name(name: str) -> Vendor:
    """Who made the device: "corex" for Iluvatar, "nvidia", else "other"."""
    if re.search(_ILUVATAR, name):
        return "corex"
    return "nvidia" if re.search(_NVIDIA, name) else "other"


def warp_size_of(name: str) -> int | None:
    """Threads in a warp: 64 on every Iluvatar device, 32 on NVIDIA's, else None (ask the device).

    The property ``warp_size`` is missing from torch 2.1, so a default of 32 read from there
    would be silently wrong on an Iluvatar device.
    """
    return {"corex": 64, "nvidia": 32}.get(vendor_of_name(name))


def corex_arch(name: str, capability: tuple[int, int] | None) -> str | None:
    """The ``--cuda-gpu-arch`` of an Iluvatar device, or None if it is not a known one.

    A wrong architecture compiles, loads and computes zeros there, so nothing is guessed: a
    name that is known decides, and a new Iluvatar device goes by its capability.
    """
    if vendor_of_name(name) != "corex":
        return None
    for pattern, arch in _COREX_ARCHS:
        if re.search(pattern, name):
            return arch
    return _COREX_ARCH_OF_CAPABILITY.get(capability) if capability else None


def device_of(facts: Facts, device: str) -> DeviceFacts | None:
    """The facts of ``"cuda:1"`` (``"cuda"`` is index 0), or None where they are not known."""
    index = int(device.partition(":")[2] or 0)
    return next((d for d in facts.devices if d.index == index), None)


def triton_refusal(facts: Facts, device: DeviceFacts | None) -> str | None:
    """Why Triton must not be launched on `device`, or None if it may.

    On CoreX a Triton without the vendor's backend emits NVIDIA code, and an attention kernel
    launched so is reported to hang the card until the host is restarted; on a BI-V100 the
    BI-V150's Triton does it too. So it is refused before anything is launched.

    Parameters
    ----------
    device : DeviceFacts or None
        None means a device that has no name yet, which could be any of them.
    """
    vendor = device.vendor if device else facts.vendor
    if vendor != "corex" or facts.corex_triton:
        return None
    remedy = "; PAGEDATTN_COREX_TRITON=1 accepts it at your own risk"
    if not any(name in facts.triton.backends for name in COREX_TRITON_BACKENDS):
        found = ", ".join(facts.triton.backends) or "none"
        return (
            f"Triton {facts.triton.version} has no backend for CoreX (it has: {found}), and its "
            f"NVIDIA code can hang an Iluvatar card{remedy}"
        )
    if device is None:
        return f"the device's name is not known yet, and Triton can hang a BI-V100{remedy}"
    if _is_bi_v100(device):
        return f"Triton is reported to hang a {device.name} until the host restarts{remedy}"
    return None


def _is_bi_v100(device: DeviceFacts) -> bool:
    # an Iluvatar name that we do not know counts by its capability, to be on the safe side
    known = any(re.search(pattern, device.name) for pattern, _ in _COREX_ARCHS)
    return bool(re.search(_BI_V100, device.name)) or (not known and device.capability == (7, 0))
