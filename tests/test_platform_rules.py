"""What follows from a device's name, and when Triton is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from _platforms import BI_V100, BI_V150, Machine, bi_v100, bi_v150, nvidia

from pagedattn.backends.platform_rules import (
    corex_arch,
    device_of,
    triton_refusal,
    vendor_of_name,
    warp_size_of,
)
from pagedattn.probe import probe
from pagedattn.probe_nvml import RawDevice


@pytest.mark.parametrize(
    ("name", "vendor", "warp"),
    [
        ("Iluvatar BI-V100", "corex", 64),
        ("Iluvatar BI-V150", "corex", 64),
        ("Iluvatar MR-V50", "corex", 64),
        ("BI-V150S", "corex", 64),
        ("NVIDIA H200", "nvidia", 32),
        ("Tesla V100-SXM2-32GB", "nvidia", 32),
        ("A100-SXM4-40GB", "nvidia", 32),
        ("MetaX C500", "other", None),
        ("AMD Instinct MI300X", "other", None),
        ("BR100", "other", None),
        ("", "other", None),
    ],
)
def test_names(name: str, vendor: str, warp: int | None) -> None:
    assert vendor_of_name(name) == vendor
    assert warp_size_of(name) == warp


@pytest.mark.parametrize(
    ("name", "capability", "arch"),
    [
        ("Iluvatar BI-V100", (7, 0), "ivcore10"),
        ("Iluvatar BI-V100", None, "ivcore10"),
        ("Iluvatar BI-V150", (7, 1), "ivcore11"),
        ("Iluvatar MR-V50", (7, 1), "ivcore11"),
        ("Iluvatar ZZ-V9", (8, 0), "ivcore20"),
        ("Iluvatar ZZ-V9", (9, 9), None),
        ("Iluvatar ZZ-V9", None, None),
        ("Tesla V100-SXM2-32GB", (7, 0), None),
    ],
)
def test_corex_arch(name: str, capability: tuple[int, int] | None, arch: str | None) -> None:
    assert corex_arch(name, capability) == arch


def _refusal(machine: Machine, tmp_path: Path, device: str = "cuda:0") -> str | None:
    facts = probe(machine.sources(tmp_path))
    return triton_refusal(facts, device_of(facts, device))


def test_stock_triton_on_corex_is_refused(tmp_path: Path) -> None:
    reason = _refusal(bi_v100(), tmp_path)
    assert reason is not None
    assert "no backend for CoreX" in reason
    reason = _refusal(bi_v150(triton_backends=("amd", "nvidia")), tmp_path)
    assert reason is not None
    assert "amd, nvidia" in reason


def test_vendor_triton_is_refused_on_a_bi_v100_alone(tmp_path: Path) -> None:
    reason = _refusal(bi_v100(triton_backends=("iluvatar",)), tmp_path)
    assert reason is not None
    assert "BI-V100" in reason
    assert _refusal(bi_v150(), tmp_path) is None
    assert _refusal(bi_v150(triton_backends=("corex",)), tmp_path / "b") is None


def test_each_device_is_judged_by_itself(tmp_path: Path) -> None:
    machine = bi_v150(devices=[BI_V100, BI_V150], environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert _refusal(machine, tmp_path, "cuda:0") is not None
    assert _refusal(machine, tmp_path, "cuda:1") is None
    assert _refusal(machine, tmp_path, "cuda") == _refusal(machine, tmp_path, "cuda:0")


def test_device_without_a_name_is_refused(tmp_path: Path) -> None:
    reason = _refusal(bi_v150(devices=None), tmp_path)
    assert reason is not None
    assert "not known yet" in reason


def test_new_name_of_the_bi_v100s_capability_is_refused(tmp_path: Path) -> None:
    for capability, refused in (((7, 0), True), ((7, 1), False)):
        machine = bi_v150(devices=[RawDevice("Iluvatar ZZ-V9", None, capability)])
        assert (_refusal(machine, tmp_path) is not None) == refused


def test_opting_in_lifts_every_refusal(tmp_path: Path) -> None:
    environ = {"PAGEDATTN_COREX_TRITON": "1"}
    assert _refusal(bi_v100(environ=environ), tmp_path) is None
    assert _refusal(bi_v100(environ=environ, devices=None), tmp_path) is None


def test_other_stacks_are_not_concerned(tmp_path: Path) -> None:
    assert _refusal(nvidia(), tmp_path) is None
