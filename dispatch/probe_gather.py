"""The facts in full: each part asked in its turn, the vendor decided from what they say."""

from __future__ import annotations

from pagedattn.backends.facts import CompilerFacts, Facts, TorchFacts, Vendor
from pagedattn.backends.platform_rules import vendor_of_name
from pagedattn.probe_corex import corex_version, find_corex_compiler, find_corex_root
from pagedattn.probe_cuda import find_nvcc, nvidia_driver_seen
from pagedattn.probe_devices import Found, find_devices
from pagedattn.probe_software import read_torch, read_triton
from pagedattn.probe_sources import Notes, Sources

# what other vendors write behind torch's version
_FOREIGN_BUILDS = ("metax", "maca", "musa", "dtk", "das")


def gather(sources: Sources, devices: bool, touch: bool) -> Facts:
    """The body of `pagedattn.probe.probe`, which see."""
    notes = Notes()
    torch = read_torch(sources, notes)
    root = find_corex_root(sources, notes)
    found = find_devices(sources, torch, root, notes, touch) if devices else Found()
    vendor = _vendor(sources, torch, root, found, notes)
    _compare_driver(vendor, torch, found, notes)
    triton = read_triton(sources, notes)
    compiler = _compiler(sources, vendor, root, notes)
    version = corex_version(sources, torch, root, notes)
    return Facts(
        vendor=vendor,
        python=sources.python,
        system=sources.system,
        torch=torch,
        triton=triton,
        compiler=compiler,
        driver=found.driver,
        corex_version=version,
        devices=found.devices,
        notes=tuple(notes.lines),
        device_source=found.source,
        driver_cuda=found.driver_cuda,
        device_usable=found.usable,
        corex_root=root,
        corex_triton=sources.flag("PAGEDATTN_COREX_TRITON"),
    )


def _vendor(
    sources: Sources, torch: TorchFacts, root: str | None, found: Found, notes: Notes
) -> Vendor:
    """By the software stack, then by the devices' names; never by their capability."""
    if torch.corex:
        return "corex"
    if torch.hip is not None:
        return "other"
    if torch.cuda is None:
        return "cpu"
    vendors = {vendor_of_name(name) for name in found.names}
    if vendors:
        return next(v for v in ("corex", "nvidia", "other") if v in vendors)
    if any(mark in f"{torch.version}{torch.installed_version}" for mark in _FOREIGN_BUILDS):
        return "other"
    if torch.cuda == "10.2" and root is not None:
        notes.add(f"taken for CoreX: torch says CUDA 10.2, and {root} is a CoreX tree")
        return "corex"
    if nvidia_driver_seen(sources, notes):
        return "nvidia"
    if sources.which("nvidia-smi"):
        notes.add("nvidia-smi is here, but neither an NVIDIA device nor its driver was found")
    return "cpu"


def _compiler(sources: Sources, vendor: Vendor, root: str | None, notes: Notes) -> CompilerFacts:
    if vendor == "corex":
        return find_corex_compiler(sources, root, notes)
    if vendor == "other":
        return CompilerFacts(rejected=("no compiler is known for this vendor's devices",))
    return find_nvcc(sources, notes)


def _compare_driver(vendor: Vendor, torch: TorchFacts, found: Found, notes: Notes) -> None:
    # CoreX's torch says 10.2 whatever its driver serves
    if vendor != "nvidia" or not (torch.cuda and found.driver_cuda):
        return
    if int(torch.cuda.partition(".")[0]) > int(found.driver_cuda.partition(".")[0]):
        notes.add(
            f"torch is built for CUDA {torch.cuda}, but the driver {found.driver} serves "
            f"CUDA {found.driver_cuda} at most"
        )
