"""The devices that torch would show: listed by the management library, or by torch itself.

Asking torch initialises the CUDA runtime, and a process forked after that cannot use the
device. So torch is asked only when it is initialised already, or when the caller says that
it may be.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedattn.backends.facts import DeviceFacts, DeviceSource, TorchFacts
from pagedattn.backends.platform_rules import vendor_of_name, warp_size_of
from pagedattn.probe_corex import management_libraries
from pagedattn.probe_nvml import NVIDIA_LIBRARIES, Listing, RawDevice
from pagedattn.probe_sources import Notes, Sources


@dataclass(frozen=True)
class Found:
    """What is known of the devices; `names` are all of them, the hidden ones too."""

    devices: tuple[DeviceFacts, ...] = ()
    names: tuple[str, ...] = ()
    source: DeviceSource = "unknown"
    driver: str | None = None
    driver_cuda: str | None = None
    usable: bool | None = None


def find_devices(
    sources: Sources, torch: TorchFacts, corex_root: str | None, notes: Notes, touch: bool
) -> Found:
    """List the devices.

    Parameters
    ----------
    touch : bool
        Whether CUDA may be initialised in this process.
    """
    cpu_build = torch.cuda is None and torch.hip is None
    # that a machine without a GPU has no such library is not worth a note
    listing = _listing(sources, corex_root, Notes() if cpu_build else notes)
    found = _from_listing(sources, listing, notes) if listing else Found()
    if cpu_build:
        if found.names:
            notes.add(f"torch {torch.version} is a CPU build: it cannot use {found.names[0]}")
        return Found((), found.names, "none", found.driver, found.driver_cuda)
    if not (touch or initialised(sources.torch, notes)):
        if found.source == "unknown":
            notes.add("no list of the devices: their names are unknown until the first use of one")
        return found
    return _from_torch(sources.torch, found, notes)


def _listing(sources: Sources, corex_root: str | None, notes: Notes) -> Listing | None:
    libraries = (*management_libraries(sources, corex_root), *NVIDIA_LIBRARIES)
    # a vendor's library may raise anything through ctypes or a stand-in
    return notes.attempt(
        "listing the devices", sources.list_devices, libraries, default=None, errors=(Exception,)
    )


def _from_listing(sources: Sources, listing: Listing, notes: Notes) -> Found:
    names = tuple(raw.name for raw in listing.devices)
    setting = sources.environ.get("CUDA_VISIBLE_DEVICES")
    doubt = _why_not_ordinals(listing.devices, setting, sources.environ.get("CUDA_DEVICE_ORDER"))
    if doubt:
        notes.add(doubt)
        return Found((), names, "unknown", listing.driver, listing.driver_cuda)
    shown = visible_devices(listing.devices, setting)
    if len(shown) < len(names):
        notes.add(f"CUDA_VISIBLE_DEVICES={setting} shows {len(shown)} of {len(names)} devices")
    devices = tuple(_facts_of(index, raw) for index, raw in enumerate(shown))
    source: DeviceSource = "ixml" if "ixml" in listing.library else "nvml"
    return Found(devices, names, source, listing.driver, listing.driver_cuda)


def _why_not_ordinals(
    devices: Sequence[RawDevice], setting: str | None, order: str | None
) -> str | None:
    """Why the library's numbers are not CUDA's, or None if they are."""
    if any(raw.partitioned for raw in devices) or "MIG-" in (setting or ""):
        return "a device is divided (MIG), so CUDA numbers its instances itself"
    by_number = setting is None or any(part.strip().isdigit() for part in setting.split(","))
    if by_number and order != "PCI_BUS_ID" and len({raw.name for raw in devices}) > 1:
        return (
            "the devices differ and CUDA numbers the fastest first; with "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID they could be named before their first use"
        )
    return None


def visible_devices(devices: Sequence[RawDevice], setting: str | None) -> list[RawDevice]:
    """What ``CUDA_VISIBLE_DEVICES=setting`` leaves, in its order.

    As CUDA reads it: numbers or beginnings of UUIDs; the first entry that is no device ends
    the list; a device named twice leaves none.
    """
    if setting is None:
        return list(devices)
    shown: list[RawDevice] = []
    for part in (piece.strip() for piece in setting.split(",")):
        device = _named(devices, part)
        if device is None:
            break
        if any(device is other for other in shown):
            return []
        shown.append(device)
    return shown


def _named(devices: Sequence[RawDevice], part: str) -> RawDevice | None:
    if part.isdigit():
        return devices[int(part)] if int(part) < len(devices) else None
    matches = [raw for raw in devices if part and raw.uuid and raw.uuid.startswith(part)]
    return matches[0] if len(matches) == 1 else None


def _facts_of(index: int, raw: RawDevice) -> DeviceFacts:
    return DeviceFacts(
        index=index,
        name=raw.name,
        vendor=vendor_of_name(raw.name),
        capability=raw.capability,
        warp_size=warp_size_of(raw.name),
        memory_bytes=raw.memory_bytes,
        uuid=raw.uuid,
    )


def initialised(torch: Any, notes: Notes) -> bool:
    """Whether CUDA is initialised in this process, which a forked child cannot undo."""
    return notes.attempt(
        "torch.cuda", lambda: bool(torch.cuda.is_initialized()), default=False, errors=(Exception,)
    )


def _from_torch(torch: Any, found: Found, notes: Notes) -> Found:
    with warnings.catch_warnings(record=True) as caught:  # "driver too old" comes as a warning
        warnings.simplefilter("always")
        usable = notes.attempt(
            "torch.cuda.is_available",
            lambda: bool(torch.cuda.is_available()),
            default=False,
            errors=(Exception,),
        )
        count = notes.attempt(
            "torch.cuda.device_count",
            lambda: int(torch.cuda.device_count()),
            default=0,
            errors=(Exception,),
        )
        devices = [_torch_device(torch, index, notes) for index in range(count if usable else 0)]
    for warning in caught:
        notes.add(f"torch: {warning.message}")
    if not usable and count > 0:
        notes.add(
            f"torch counts {count} device(s) but cannot use any: the driver and the SDK that "
            "torch was built with disagree"
        )
    known = tuple(device for device in devices if device is not None)
    if not usable or len(known) < count:
        return Found(
            found.devices, found.names, found.source, found.driver, found.driver_cuda, usable
        )
    names = found.names or tuple(device.name for device in known)
    return Found(known, names, "torch", found.driver, found.driver_cuda, usable)


def _torch_device(torch: Any, index: int, notes: Notes) -> DeviceFacts | None:
    def read() -> DeviceFacts:
        seen = torch.cuda.get_device_properties(index)
        uuid = getattr(seen, "uuid", None)
        return DeviceFacts(
            index=index,
            name=str(seen.name),
            vendor=vendor_of_name(seen.name),
            capability=(int(seen.major), int(seen.minor)),
            warp_size=warp_size_of(seen.name) or getattr(seen, "warp_size", None),
            multiprocessors=int(seen.multi_processor_count),
            memory_bytes=int(seen.total_memory),
            uuid=None if uuid is None else f"GPU-{uuid}".replace("GPU-GPU-", "GPU-"),
        )

    return notes.attempt(
        f"the properties of device {index}", read, default=None, errors=(Exception,)
    )
