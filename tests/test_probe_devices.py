"""Which devices CUDA would show, read from the management library's list."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from _platforms import BI_V100, BI_V150, H200, V100, bi_v100, nvidia

from pagedattn.probe import probe
from pagedattn.probe_devices import visible_devices
from pagedattn.probe_nvml import NvmlError, RawDevice, list_devices

A, B, C = (RawDevice("NVIDIA H200", f"GPU-{letter}000") for letter in "abc")


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("1", [B]),
        ("2, 0", [C, A]),
        ("0,9,1", [A]),
        ("0,-1,1", [A]),
        ("0,0", []),
        ("GPU-b000", [B]),
        ("GPU-c", [C]),
        ("GPU-", []),
        ("GPU-a,1", [A, B]),
        ("nonsense", []),
    ],
)
def test_visible_devices(setting: str | None, shown: list[RawDevice]) -> None:
    assert visible_devices([A, B, C], setting) == shown


def test_indices_are_those_of_torch(tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    facts = probe(bi_v100(devices=[BI_V100, BI_V150], environ=environ).sources(tmp_path))
    assert [(d.index, d.name) for d in facts.devices] == [(0, "Iluvatar BI-V150")]
    assert any("shows 1 of 2" in note for note in facts.notes)


def test_hidden_devices_leave_the_vendor(tmp_path: Path) -> None:
    facts = probe(nvidia(environ={"CUDA_VISIBLE_DEVICES": ""}).sources(tmp_path))
    assert (facts.vendor, facts.devices) == ("nvidia", ())


def test_mixed_devices_in_cudas_own_order_are_not_guessed(tmp_path: Path) -> None:
    facts = probe(nvidia(devices=[V100, H200]).sources(tmp_path))
    assert (facts.vendor, facts.devices, facts.device_source) == ("nvidia", (), "unknown")
    by_uuid = {"CUDA_VISIBLE_DEVICES": "GPU-h2"}
    facts = probe(nvidia(devices=[V100, H200], environ=by_uuid).sources(tmp_path))
    assert [d.name for d in facts.devices] == ["NVIDIA H200"]


def test_divided_devices_are_not_guessed(tmp_path: Path) -> None:
    divided = RawDevice("NVIDIA H200", "GPU-a", (9, 0), partitioned=True)
    facts = probe(nvidia(devices=[divided]).sources(tmp_path))
    assert facts.devices == ()
    assert any("MIG" in note for note in facts.notes)


# A management library of two devices with the signatures of NVIDIA's header.
FAKE_NVML = r"""
#include <string.h>
typedef void *handle;
static int opened;
int nvmlInit_v2(void) { opened = 1; return REFUSAL; }
int nvmlShutdown(void) { opened = 0; return 0; }
const char *nvmlErrorString(int s) { return s == 9 ? "Driver Not Loaded" : "error"; }
int nvmlSystemGetDriverVersion(char *b, unsigned n) { strncpy(b, "580.65", n); return !opened; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13020; return !opened; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return !opened; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *h) {
  *h = (handle)(0x7fff00000001ul + i); return i > 1; }
static long index_of(handle h) { return (long)h - 0x7fff00000001l; }
int nvmlDeviceGetName(handle h, char *b, unsigned n) {
  strncpy(b, index_of(h) == 0 ? "NVIDIA H200" : "Tesla V100", n);
  return index_of(h) > 1 || index_of(h) < 0; }
int nvmlDeviceGetUUID(handle h, char *b, unsigned n) {
  strncpy(b, "GPU-1", n); return index_of(h); }
int nvmlDeviceGetCudaComputeCapability(handle h, int *a, int *b) {
  *a = index_of(h) ? 7 : 9; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(handle h, unsigned long long *m) {
  m[0] = 5ull << 32; m[1] = 1; m[2] = 2; return 0; }
int nvmlDeviceGetMigMode(handle h, unsigned *now, unsigned *next) {
  *now = 1; *next = 0; return index_of(h) ? 3 : 0; }
"""


def _library(folder: Path, source: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "nvml.c").write_text(source, encoding="utf-8")
    path = folder / "libfake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "nvml.c"], check=True)
    return str(path)


def test_management_library_is_read_as_its_header_says(tmp_path: Path) -> None:
    library = _library(tmp_path, "#define REFUSAL 0" + FAKE_NVML)
    listing = list_devices([str(tmp_path / "missing.so"), library])
    assert (listing.driver, listing.driver_cuda) == ("580.65", "13.2")
    assert listing.devices == (
        RawDevice("NVIDIA H200", "GPU-1", (9, 0), 5 << 32, partitioned=True),
        RawDevice("Tesla V100", None, (7, 0), 5 << 32, partitioned=False),
    )


def test_library_that_refuses_says_why(tmp_path: Path) -> None:
    library = _library(tmp_path, "#define REFUSAL 9" + FAKE_NVML)
    with pytest.raises(NvmlError, match=r"nvmlInit_v2 failed: Driver Not Loaded \(status 9\)"):
        list_devices([library])


def test_another_library_of_that_name_is_passed_over(tmp_path: Path) -> None:
    library = _library(tmp_path, "int ixmlParseBuffer(void) { return 0; }")
    with pytest.raises(NvmlError, match="nvmlInit_v2"):
        list_devices([library])


def test_no_library_at_all() -> None:
    with pytest.raises(NvmlError, match="no management library"):
        list_devices([])


@pytest.mark.gpu
def test_library_and_torch_agree_on_this_machine() -> None:
    listed = probe()
    used = probe(touch=True)
    assert used.device_source == "torch"
    assert used.devices
    if listed.device_source != "torch":  # an earlier test may have initialised CUDA
        assert listed.device_source in ("nvml", "ixml")
    for one, other in zip(listed.devices, used.devices, strict=True):
        assert (one.index, one.name, one.capability) == (other.index, other.name, other.capability)
        assert (one.warp_size, one.uuid) == (other.warp_size, other.uuid or one.uuid)
