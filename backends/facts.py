"""What the probe learned about the machine. Plain data: nothing here looks anything up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Vendor = Literal["corex", "nvidia", "cpu", "other"]
# Where the list of devices came from; "unknown" until torch has used one.
DeviceSource = Literal["nvml", "ixml", "torch", "none", "unknown"]


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch. `installed_version` is the metadata's, which may hold a suffix
    (``+corex.3.2.3``) that ``torch.__version__`` has lost."""

    version: str
    installed_version: str | None
    cuda: str | None
    hip: str | None
    corex: bool


@dataclass(frozen=True)
class TritonFacts:
    """The installed Triton, from its files and metadata alone (it is not imported)."""

    version: str | None = None  # None: not installed
    backends: tuple[str, ...] = ()  # "nvidia", "amd", "iluvatar", …; before 3.0 none are listed
    interpret: bool = False  # TRITON_INTERPRET=1


@dataclass(frozen=True)
class CompilerFacts:
    """The compiler that would build the CUDA sources, and the ones that were passed over.

    Found by its place and its first bytes. Whether it runs and knows the device is
    `confirmed`, which stays None until `confirm_compiler` has started it.
    """

    kind: Literal["ixcc", "clang++", "nvcc"] | None = None
    path: str | None = None
    root: str | None = None  # the CoreX or CUDA tree
    rejected: tuple[str, ...] = ()  # "path: reason" of each candidate passed over
    note: str | None = None  # what is unusual about the one chosen
    confirmed: bool | None = None
    version: str | None = None  # what the compiler calls itself; known once confirmed


@dataclass(frozen=True)
class DeviceFacts:
    """One device as the management library names it, without a context on it.

    `index` is torch's: what is left after ``CUDA_VISIBLE_DEVICES``.
    """

    index: int
    name: str
    vendor: Vendor
    capability: tuple[int, int] | None = None
    warp_size: int | None = None
    multiprocessors: int | None = None  # known once torch has used a device
    memory_bytes: int | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything the probe knows."""

    vendor: Vendor
    python: str
    system: str
    torch: TorchFacts
    triton: TritonFacts = field(default_factory=TritonFacts)
    compiler: CompilerFacts = field(default_factory=CompilerFacts)
    driver: str | None = None
    corex_version: str | None = None
    devices: tuple[DeviceFacts, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be learned, and what looks wrong
    device_source: DeviceSource = "unknown"
    driver_cuda: str | None = None  # the newest CUDA that the driver serves: "13.0"
    # torch.cuda.is_available(), where asking was allowed (it initialises the driver)
    device_usable: bool | None = None
    corex_root: str | None = None
    corex_triton: bool = False  # PAGEDATTN_COREX_TRITON=1

    @property
    def has_gpu(self) -> bool:
        """Whether torch can be expected to reach a GPU: none is hidden, unusable or missing.

        Where the devices are not known yet, the software that is there for one decides.
        """
        if self.vendor == "cpu" or self.device_usable is False:
            return False
        return bool(self.devices) or self.device_source == "unknown"
