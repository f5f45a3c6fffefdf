"""Which compiler builds for which architecture, and with which command line."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagedattn.backends.cuda.confirm import confirm_compiler, environment
from pagedattn.backends.cuda.spec import Spec
from pagedattn.backends.errors import BuildError
from pagedattn.backends.facts import CompilerFacts, DeviceFacts, Facts
from pagedattn.backends.platform_rules import corex_arch

_ARCH = re.compile(r"sm_\d{2,3}[af]?|ivcore\d+")
_EXAMPLES = "--arch sm_90 (H100, H200), --arch sm_80 (A100), --arch ivcore10 (BI-V100)"


@dataclass(frozen=True)
class Toolchain:
    """A compiler that was started and answered, and the architecture it is to build for."""

    compiler: CompilerFacts
    arch: str

    @property
    def path(self) -> str:
        """The compiler's own path."""
        return self.compiler.path or ""

    def flags(self, spec: Spec) -> tuple[str, ...]:
        """Every option that decides what the binary holds."""
        common = ("-std=c++17", "-O3", "-shared")
        if self.compiler.kind == "nvcc":
            # its own runtime, linked in: whichever torch brings, the binary fits
            target = ("-gencode", f"arch={_virtual(self.arch)},code={self.arch}")
            kinds = (*_tuned(self.arch, self.compiler.version), *spec.macros())
            return (*common, "-Xcompiler", "-fPIC", *target, "-cudart=static", *kinds)
        root = self.compiler.root
        return (
            *common,
            "-fPIC",
            f"--cuda-path={root}",
            f"--cuda-gpu-arch={self.arch}",
            "--no-cuda-version-check",
            *spec.macros(),
        )

    def command(self, spec: Spec, source: Path, output: Path) -> list[str]:
        """The command line that compiles `source` into the shared object `output`."""
        made = [self.path, *self.flags(spec), f"-I{source.parent}", str(source), "-o", str(output)]
        if self.compiler.kind != "nvcc":
            folders = [f"{self.compiler.root}/{name}" for name in ("lib64", "lib")]
            made += [f"-L{folder}" for folder in folders if os.path.isdir(folder)]
            made += ["-lcudart", *(f"-Wl,-rpath,{folder}" for folder in folders)]
        return made

    def environment(self) -> dict[str, str]:
        """What to start the compiler in."""
        return environment(self.compiler, os.environ)


def tuned_for(arch: str) -> str | None:
    """The tuned kernels' variant that is for `arch`, if there is one: "80" or "90"."""
    found = re.fullmatch(r"sm_(80|90)a?", arch)
    return found[1] if found else None


def has_tuned(flags: Sequence[str]) -> bool:
    """Whether a binary of these `Toolchain.flags` holds the tuned kernels."""
    return any(flag.startswith("-DPAGEDATTN_TUNED=") for flag in flags)


def _tuned(arch: str, version: str | None) -> tuple[str, ...]:
    """The option that adds the tuned kernels, where nvcc knows what they are written with (tensor
    maps, bulk copies: CUDA 12)."""
    variant = tuned_for(arch)
    is_old = version is not None and int(version.split(".")[0]) < 12
    return (f"-DPAGEDATTN_TUNED={variant}",) if variant and not is_old else ()


def _virtual(arch: str) -> str:
    return arch.replace("sm_", "compute_")


def known_archs(facts: Facts) -> tuple[str, ...]:
    """The architectures of the devices in sight, each once."""
    found = (arch_of(facts, device) for device in facts.devices)
    return tuple(dict.fromkeys(arch for arch in found if arch))


def arch_of(facts: Facts, device: DeviceFacts | None) -> str | None:
    """The architecture of `device`, or None where its name and capability do not say."""
    if device is None:
        return None
    if device.vendor == "corex":
        return corex_arch(device.name, device.capability)
    if device.vendor == "nvidia" and device.capability:
        return "sm_{}{}".format(*device.capability)
    return None


def chosen_archs(facts: Facts, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The architectures to build for: those asked for, else those of the devices in sight.

    Raises
    ------
    BuildError
        If there is neither, or one asked for is spelt as none is.
    """
    for arch in asked:
        if not _ARCH.fullmatch(arch):
            raise BuildError(f"{arch!r} is no architecture; they are written as in {_EXAMPLES}")
    found = tuple(dict.fromkeys(asked)) or known_archs(facts)
    if not found:
        seen = ", ".join(device.name for device in facts.devices)
        why = f"the architecture of {seen} is not known" if seen else "no GPU is in sight"
        raise BuildError(f"{why}, so name what to build for: {_EXAMPLES}")
    return found


def find(facts: Facts, arch: str) -> Toolchain:
    """The toolchain for `arch`, its compiler started once in this process to see that it is one.

    Raises
    ------
    BuildError
        If no compiler was found, it does not run, or it is one for other devices.
    """
    compiler = facts.compiler
    if compiler.path is None:
        raise BuildError("\n  ".join(("no CUDA compiler was found", *compiler.rejected)), compiler)
    for_corex = arch.startswith("ivcore")
    if for_corex != (compiler.kind != "nvcc"):
        whose = "an Iluvatar" if for_corex else "an NVIDIA"
        raise BuildError(f"{arch} is {whose} architecture, and {compiler.path} does not build it")
    confirmed = _confirmed(facts, _stamp(compiler.path))
    if not confirmed.confirmed:
        raise BuildError("\n  ".join(("the compiler is none", *confirmed.rejected)), confirmed)
    return Toolchain(confirmed, arch)


def _stamp(path: str) -> tuple[int, int]:
    """Changes when the compiler is replaced in the life of this process."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _confirmed(facts: Facts, stamp: tuple[int, int]) -> CompilerFacts:
    return confirm_compiler(replace(facts, notes=()))


def identity(toolchain: Toolchain, spec: Spec) -> Mapping[str, object]:
    """What of the toolchain a binary depends on."""
    return {
        "compiler": toolchain.path,
        "version": toolchain.compiler.version,
        "flags": list(toolchain.flags(spec)),
        "arch": toolchain.arch,
    }
