"""Simulated machines for the probe and the chain: each builder describes one.

``bi_v100().sources(tmp_path)`` puts it in place under a folder. torch is a stand-in that
remembers whether anything that initialises CUDA was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pagedattn.probe_nvml import Listing, NvmlError, RawDevice
from pagedattn.probe_sources import Files, Sources

ELF = b"\x7fELF\x02\x01\x01" + bytes(57)
SCRIPT = b"#!/bin/sh\necho 'Cuda compilation tools, release 10.2, V10.2.89'\nexit 0\n"
GIB = 2**30

BI_V100 = RawDevice("Iluvatar BI-V100", "GPU-b1000000-0000", (7, 0), 34_057_748_480)
BI_V150 = RawDevice("Iluvatar BI-V150", "GPU-b1500000-0000", (7, 1), 64 * GIB)
H200 = RawDevice("NVIDIA H200", "GPU-h2000000-0000", (9, 0), 141 * GIB)
V100 = RawDevice("Tesla V100-SXM2-32GB", "GPU-v1000000-0000", (7, 0), 32 * GIB)
FOREIGN = RawDevice("MetaX C500", "GPU-c5000000-0000", (8, 0), 64 * GIB)


class FakeCuda:
    """`torch.cuda` of a machine with `devices`; `calls` holds what would initialise CUDA."""

    def __init__(self, devices: Sequence[RawDevice], available: bool, initialised: bool) -> None:
        self.devices = devices
        self.available = available
        self.initialised = initialised
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return self.initialised

    def is_available(self) -> bool:
        self.calls.append("is_available")
        return self.available and bool(self.devices)

    def device_count(self) -> int:
        self.calls.append("device_count")
        return len(self.devices)

    def get_device_properties(self, index: int) -> Any:
        self.calls.append("get_device_properties")
        raw = self.devices[index]
        assert raw.capability is not None
        return SimpleNamespace(
            name=raw.name,
            major=raw.capability[0],
            minor=raw.capability[1],
            total_memory=raw.memory_bytes,
            multi_processor_count=16,
        )


@dataclass
class Machine:
    """What a simulated machine is made of.

    files : path to contents (bytes: an executable; str: the target of a link)
    installed : distribution to version
    devices : None where there is no management library
    triton_backends : None where Triton is not installed
    """

    torch_version: str
    cuda: str | None = None
    hip: str | None = None
    corex: bool = False
    devices: Sequence[RawDevice] | None = ()
    driver: str | None = None
    driver_cuda: str | None = None
    library: str = "libnvidia-ml.so.1"
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    installed: Mapping[str, str] = field(default_factory=dict)
    triton_backends: Sequence[str] | None = None
    available: bool = True
    initialised: bool = False

    def sources(self, root: Path) -> Sources:
        for path, contents in self.files.items():
            _place(root / path.lstrip("/"), contents)
        environ = {"PATH": "/usr/local/corex/bin:/usr/local/cuda/bin:/usr/bin", **self.environ}
        return Sources(
            environ=environ,
            files=Files(root),
            torch=self.torch(),
            version={"torch": self.torch_version, **self.installed}.get,
            entry_points=lambda group: [],
            package_dir=lambda name: self._triton(root) if name == "triton" else None,
            which=lambda name: _which(root, environ["PATH"], name),
            list_devices=self._list,
            python="3.10.12",
            system="Linux 5.4.0 x86_64",
        )

    def torch(self) -> Any:
        torch = SimpleNamespace(
            __version__=self.torch_version,
            version=SimpleNamespace(cuda=self.cuda, hip=self.hip),
            cuda=FakeCuda(self.devices or (), self.available, self.initialised),
        )
        if self.corex:
            torch.corex = True
        return torch

    def _triton(self, root: Path) -> Path | None:
        if self.triton_backends is None:
            return None
        folder = root / "site-packages" / "triton"
        for name in self.triton_backends:
            _place(folder / "backends" / name / "compiler.py", b"")
        return folder

    def _list(self, libraries: Sequence[str]) -> Listing:
        if self.devices is None or not any(path.endswith(self.library) for path in libraries):
            raise NvmlError(f"{self.library}: cannot open shared object file")
        return Listing(self.library, self.driver, self.driver_cuda, tuple(self.devices))


def _place(path: Path, contents: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(contents, str):
        if not path.is_symlink():
            path.symlink_to(contents)
        return
    path.write_bytes(contents)
    path.chmod(0o755)


def _which(root: Path, search: str, name: str) -> str | None:
    for folder in search.split(":"):
        real = root / folder.lstrip("/") / name
        if real.is_file() and real.stat().st_mode & 0o111:
            return f"{folder}/{name}"
    return None


def corex_tree(version: str) -> dict[str, bytes | str]:
    """The CoreX SDK as its images ship it: clang++, and an nvcc that is none."""
    root = f"/usr/local/corex-{version}"
    return {
        f"{root}/bin/clang++": "clang-16",
        f"{root}/bin/clang-16": ELF,
        f"{root}/bin/nvcc": SCRIPT,
        f"{root}/bin/ixsmi": ELF,
        f"{root}/lib64/libixml.so": ELF,
        "/usr/local/corex": f"corex-{version}",
    }


def bi_v100(**changes: Any) -> Machine:
    """BI-V100, CoreX 3.2.3, with the version's suffix; its Triton is the stock one."""
    fields: dict[str, Any] = {
        "torch_version": "2.1.0+corex.3.2.3",
        "cuda": "10.2",
        "corex": True,
        "devices": [BI_V100],
        "driver": "3.2.3",
        "library": "libixml.so",
        "files": corex_tree("3.2.3"),
        "installed": {"triton": "2.3.1"},
        "triton_backends": (),
    }
    return Machine(**{**fields, **changes})


def bi_v100_bare(**changes: Any) -> Machine:
    """The same where every trace of the suffix is lost, and torch.corex too."""
    return bi_v100(**{"torch_version": "2.1.0", "corex": False, **changes})


def bi_v150(**changes: Any) -> Machine:
    """BI-V150, CoreX 4.4: torch 2.7.1 and the vendor's Triton."""
    fields: dict[str, Any] = {
        "torch_version": "2.7.1+corex.4.4.0",
        "devices": [BI_V150],
        "driver": "4.4.0",
        "files": corex_tree("4.4.0"),
        "installed": {"triton": "3.1.0+corex.4.4.0"},
        "triton_backends": ("iluvatar",),
    }
    return bi_v100(**{**fields, **changes})


def corex_driver_mismatch(**changes: Any) -> Machine:
    """CoreX whose driver and SDK disagree: devices are counted, none can be used."""
    return bi_v100(**{"available": False, **changes})


def nvidia(**changes: Any) -> Machine:
    """An H200 with nvcc."""
    fields: dict[str, Any] = {
        "torch_version": "2.11.0",
        "cuda": "13.0",
        "devices": [H200],
        "driver": "580.65.06",
        "driver_cuda": "13.0",
        "files": {
            "/usr/local/cuda-13.0/bin/nvcc": ELF,
            "/usr/local/cuda-13.0/include/cuda_runtime.h": b"",
            "/usr/local/cuda": "cuda-13.0",
            "/proc/driver/nvidia/version": b"",
        },
        "installed": {"triton": "3.6.0"},
        "triton_backends": ("nvidia", "amd"),
    }
    return Machine(**{**fields, **changes})


def nvidia_without_nvcc(**changes: Any) -> Machine:
    return nvidia(**{"files": {"/proc/driver/nvidia/version": b""}, **changes})


def other_vendor(**changes: Any) -> Machine:
    """Not NVIDIA, though nvidia-smi and NVIDIA's management library answer."""
    fields: dict[str, Any] = {
        "torch_version": "2.6.0+metax3.0",
        "cuda": "11.6",
        "devices": [FOREIGN],
        "files": {"/usr/bin/nvidia-smi": ELF, "/usr/bin/nvcc": SCRIPT},
    }
    return Machine(**{**fields, **changes})


def cpu_only(**changes: Any) -> Machine:
    return Machine(**{"torch_version": "2.13.0+cpu", "devices": None, **changes})


PLATFORMS: dict[str, Callable[..., Machine]] = {
    "bi_v100": bi_v100,
    "bi_v100_bare": bi_v100_bare,
    "bi_v150": bi_v150,
    "corex_driver_mismatch": corex_driver_mismatch,
    "nvidia": nvidia,
    "nvidia_without_nvcc": nvidia_without_nvcc,
    "other_vendor": other_vendor,
    "cpu_only": cpu_only,
}
