"""The probe on simulated machines: who made the device, and what each platform says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _platforms import (
    BI_V100,
    H200,
    PLATFORMS,
    V100,
    bi_v100,
    bi_v100_bare,
    bi_v150,
    corex_driver_mismatch,
    cpu_only,
    nvidia,
    other_vendor,
)

from pagedattn import probe as probe_module
from pagedattn.probe import probe


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        ("bi_v100", "corex"),
        ("bi_v100_bare", "corex"),
        ("bi_v150", "corex"),
        ("corex_driver_mismatch", "corex"),
        ("nvidia", "nvidia"),
        ("nvidia_without_nvcc", "nvidia"),
        ("other_vendor", "other"),
        ("cpu_only", "cpu"),
    ],
)
def test_vendor(name: str, vendor: str, tmp_path: Path) -> None:
    assert probe(PLATFORMS[name]().sources(tmp_path)).vendor == vendor


@pytest.mark.parametrize("name", PLATFORMS)
def test_probe_never_initialises_cuda(name: str, tmp_path: Path) -> None:
    sources = PLATFORMS[name]().sources(tmp_path)
    probe(sources)
    assert sources.torch.cuda.calls == []


def test_bi_v100(tmp_path: Path) -> None:
    facts = probe(bi_v100().sources(tmp_path))
    (device,) = facts.devices
    assert (device.name, device.vendor, device.warp_size) == ("Iluvatar BI-V100", "corex", 64)
    assert device.capability == (7, 0)
    assert facts.corex_version == "3.2.3"
    assert facts.corex_root == "/usr/local/corex"
    assert facts.device_source == "ixml"
    assert facts.triton.version == "2.3.1"


def test_suffix_that_only_the_metadata_has_kept(tmp_path: Path) -> None:
    installed = {"torch": "2.1.0+corex.3.2.3"}
    machine = bi_v100_bare(devices=None, files={}, installed=installed)
    facts = probe(machine.sources(tmp_path))
    assert facts.torch.version == "2.1.0"
    assert facts.torch.installed_version == "2.1.0+corex.3.2.3"
    assert facts.torch.corex
    assert (facts.vendor, facts.corex_version) == ("corex", "3.2.3")


def test_torch_corex_alone_is_enough(tmp_path: Path) -> None:
    facts = probe(bi_v100(torch_version="2.1.0", devices=None, files={}).sources(tmp_path))
    assert facts.vendor == "corex"


def test_bare_version_goes_by_the_devices_name(tmp_path: Path) -> None:
    facts = probe(bi_v100_bare().sources(tmp_path))
    assert not facts.torch.corex
    assert facts.vendor == "corex"
    assert facts.corex_version == "3.2.3"  # the tree's


def test_bare_version_without_a_library_goes_by_the_tree(tmp_path: Path) -> None:
    facts = probe(bi_v100_bare(devices=None).sources(tmp_path))
    assert facts.vendor == "corex"
    assert any("taken for CoreX" in note for note in facts.notes)


def test_bi_v150(tmp_path: Path) -> None:
    facts = probe(bi_v150().sources(tmp_path))
    assert facts.devices[0].warp_size == 64
    assert facts.corex_version == "4.4.0"
    assert facts.triton.version == "3.1.0+corex.4.4.0"
    assert facts.triton.backends == ("iluvatar",)


def test_tree_of_another_version_than_torch_is_told(tmp_path: Path) -> None:
    facts = probe(bi_v100(torch_version="2.7.1+corex.4.4.0").sources(tmp_path))
    assert any("CoreX 4.4.0" in note and "CoreX 3.2.3" in note for note in facts.notes)


def test_v100_of_the_same_capability_is_nvidia(tmp_path: Path) -> None:
    facts = probe(nvidia(devices=[V100]).sources(tmp_path))
    (device,) = facts.devices
    assert device.capability == (7, 0)
    assert (facts.vendor, device.vendor, device.warp_size) == ("nvidia", "nvidia", 32)


def test_driver_mismatch_is_not_called_no_gpu(tmp_path: Path) -> None:
    facts = probe(corex_driver_mismatch().sources(tmp_path), touch=True)
    assert facts.device_usable is False
    assert facts.devices[0].name == "Iluvatar BI-V100"  # as the library says
    assert any("driver and the SDK" in note and "counts 1" in note for note in facts.notes)


def test_driver_that_matches_has_no_such_note(tmp_path: Path) -> None:
    facts = probe(bi_v100().sources(tmp_path), touch=True)
    assert facts.device_usable is True
    assert facts.devices[0].multiprocessors == 16
    assert facts.devices[0].warp_size == 64  # torch 2.1 has no such property
    assert facts.device_source == "torch"
    assert not any("driver and the SDK" in note for note in facts.notes)


def test_driver_older_than_torch_is_told_without_touching_it(tmp_path: Path) -> None:
    facts = probe(nvidia(driver="535.1", driver_cuda="12.2").sources(tmp_path))
    assert any("12.2" in note and "13.0" in note for note in facts.notes)
    assert probe(nvidia().sources(tmp_path)).notes == ()


def test_corex_torch_says_10_2_and_its_driver_is_not_compared(tmp_path: Path) -> None:
    facts = probe(bi_v100(driver_cuda="8.0").sources(tmp_path))
    assert not any("at most" in note for note in facts.notes)


def test_an_answering_nvidia_smi_is_not_nvidia(tmp_path: Path) -> None:
    facts = probe(other_vendor().sources(tmp_path))
    assert (facts.vendor, facts.devices[0].vendor) == ("other", "other")
    assert facts.devices[0].warp_size is None
    unnamed = probe(other_vendor(devices=None).sources(tmp_path))
    assert unnamed.vendor == "other"  # by its torch
    plain = probe(other_vendor(devices=None, torch_version="2.6.0").sources(tmp_path))
    assert plain.vendor == "cpu"
    assert any("nvidia-smi is here" in note for note in plain.notes)


def test_rocm_is_another_vendor(tmp_path: Path) -> None:
    facts = probe(cpu_only(torch_version="2.6.0+rocm6.2", hip="6.2").sources(tmp_path))
    assert facts.vendor == "other"


def test_nvidia_without_the_library_is_unknown_until_first_use(tmp_path: Path) -> None:
    facts = probe(nvidia(devices=None).sources(tmp_path))
    assert (facts.vendor, facts.devices, facts.device_source) == ("nvidia", (), "unknown")
    assert any("unknown until the first use" in note for note in facts.notes)


def test_cpu_torch_on_an_nvidia_machine_is_told(tmp_path: Path) -> None:
    facts = probe(nvidia(torch_version="2.13.0+cpu", cuda=None).sources(tmp_path))
    assert (facts.vendor, facts.devices, facts.device_source) == ("cpu", (), "none")
    assert any("NVIDIA H200" in note and "CPU build" in note for note in facts.notes)


def test_nothing_at_all_is_worth_no_note(tmp_path: Path) -> None:
    assert probe(cpu_only().sources(tmp_path)).notes == ()


def test_software_alone_leaves_the_library_alone(tmp_path: Path) -> None:
    asked: list[object] = []

    def remember(libraries: object) -> Any:
        asked.append(libraries)
        raise OSError

    sources = replace(nvidia().sources(tmp_path), list_devices=remember)
    assert probe(sources, devices=False).vendor == "nvidia"
    assert asked == []


def test_cuda_that_is_initialised_gives_torchs_own_names(tmp_path: Path) -> None:
    facts = probe(nvidia(initialised=True).sources(tmp_path))
    assert facts.device_source == "torch"
    assert facts.devices[0].multiprocessors == 16


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("part", ["version", "entry_points", "package_dir", "list_devices"])
def test_source_that_raises_becomes_a_note(name: str, part: str, tmp_path: Path) -> None:
    def broken(*arguments: object) -> Any:
        raise OSError("broken on purpose")

    changes: dict[str, Any] = {part: broken}
    facts = probe(replace(PLATFORMS[name]().sources(tmp_path), **changes))
    # without Triton nobody asks for its entry points; a CPU build has no use for a device list
    unused = facts.triton.version is None and part == "entry_points"
    unused |= facts.vendor == "cpu" and part == "list_devices"
    assert any("broken on purpose" in note for note in facts.notes) != unused


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("part", ["cuda", "version", "__version__"])
def test_torch_that_lacks_a_part_is_survived(name: str, part: str, tmp_path: Path) -> None:
    sources = PLATFORMS[name]().sources(tmp_path)
    delattr(sources.torch, part)
    assert probe(sources, touch=True).python == "3.10.12"


def test_vendor_attribute_that_raises_becomes_a_note(tmp_path: Path) -> None:
    class Hostile:
        __version__ = "2.1.0"

        @property
        def corex(self) -> bool:
            raise RuntimeError("vendor code")

    sources = replace(cpu_only().sources(tmp_path), torch=Hostile())
    assert any("vendor code" in note for note in probe(sources).notes)


def test_opt_in_and_interpreter_are_read(tmp_path: Path) -> None:
    environ = {"PAGEDATTN_COREX_TRITON": "1", "TRITON_INTERPRET": "1"}
    facts = probe(cpu_only(environ=environ).sources(tmp_path))
    assert facts.corex_triton
    assert facts.triton.interpret
    plain = probe(cpu_only(environ={"PAGEDATTN_COREX_TRITON": "0"}).sources(tmp_path))
    assert not plain.corex_triton
    assert not plain.triton.interpret


def test_triton_without_metadata_goes_by_its_source(tmp_path: Path) -> None:
    sources = nvidia(installed={}).sources(tmp_path)
    assert probe(sources).triton.version == "unknown"
    (tmp_path / "site-packages/triton/__init__.py").write_text("__version__ = '3.1.0'\n")
    facts = probe(sources)
    assert facts.triton.version == "3.1.0"
    assert facts.triton.backends == ("amd", "nvidia")


def test_triton_backend_that_a_plugin_registers_counts(tmp_path: Path) -> None:
    sources = replace(nvidia().sources(tmp_path), entry_points=lambda group: ["iluvatar"])
    assert probe(sources).triton.backends == ("amd", "iluvatar", "nvidia")


def test_facts_are_kept_until_refreshed_or_cuda_is_initialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = nvidia().sources(tmp_path)
    monkeypatch.setattr(probe_module, "_this_machine", lambda: sources)
    monkeypatch.setattr(probe_module, "_facts", None)
    first = probe_module.facts()
    assert probe_module.facts() is first
    assert probe_module.facts(refresh=True) is not first
    sources.torch.cuda.initialised = True
    later = probe_module.facts()
    assert later.device_source == "torch"
    assert probe_module.facts() is later


def test_the_opt_in_counts_when_it_is_set_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ: dict[str, str] = {}
    sources = replace(nvidia().sources(tmp_path), environ=environ)
    monkeypatch.setattr(probe_module, "_this_machine", lambda: sources)
    monkeypatch.setattr(probe_module, "_facts", None)
    for value in ("", "1", "0"):
        environ["PAGEDATTN_COREX_TRITON"] = value
        assert probe_module.facts().corex_triton is (value == "1")


def test_driver_is_asked_once_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = corex_driver_mismatch().sources(tmp_path)
    monkeypatch.setattr(probe_module, "_this_machine", lambda: sources)
    monkeypatch.setattr(probe_module, "_facts", None)
    assert probe_module.facts().device_usable is None
    assert probe_module.facts(touch=True).device_usable is False


def test_machine_of_two_vendors_takes_the_careful_policy(tmp_path: Path) -> None:
    machine = nvidia(devices=[H200, BI_V100], environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    facts = probe(machine.sources(tmp_path))
    assert facts.vendor == "corex"
    assert [device.vendor for device in facts.devices] == ["nvidia", "corex"]
