"""Architectures and command lines, for each vendor, with a GPU in sight and without."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _platforms import bi_v100, bi_v150, cpu_only, nvidia, nvidia_without_nvcc, other_vendor

from pagedattn.backends.cuda import toolchain as toolchains
from pagedattn.backends.cuda.spec import Spec, unsupported_reasons
from pagedattn.backends.cuda.toolchain import Toolchain
from pagedattn.backends.errors import BuildError
from pagedattn.backends.facts import CompilerFacts
from pagedattn.probe import probe

SPEC = Spec("fp16", "fp8_e4m3", 128, 4, 32)
MACROS = [
    "-DPAGEDATTN_QUERY_TYPE=0", "-DPAGEDATTN_KV_TYPE=4", "-DPAGEDATTN_HEAD_DIM=128",
    "-DPAGEDATTN_GROUP=4", "-DPAGEDATTN_BLOCK_SIZE=32",
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "archs"),
    [(bi_v100, ("ivcore10",)), (bi_v150, ("ivcore11",)), (nvidia, ("sm_90",))],
)
def test_arch_of_the_device(machine: Any, archs: tuple[str, ...], tmp_path: Path) -> None:
    facts = probe(machine().sources(tmp_path))
    assert toolchains.chosen_archs(facts) == archs
    assert toolchains.chosen_archs(facts, ["sm_80", "sm_80"]) == ("sm_80",)


def test_no_gpu_and_no_arch_says_which_option_to_give(tmp_path: Path) -> None:
    for machine in (cpu_only(), nvidia(devices=[]), bi_v100(devices=None)):
        facts = probe(machine.sources(tmp_path))
        with pytest.raises(BuildError, match=r"no GPU is in sight.*--arch sm_90"):
            toolchains.chosen_archs(facts)
        assert toolchains.chosen_archs(facts, ["sm_90a"]) == ("sm_90a",)


def test_device_of_another_vendor_has_no_arch(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"MetaX C500 is not known.*--arch"):
        toolchains.chosen_archs(probe(other_vendor().sources(tmp_path)))


@pytest.mark.parametrize("arch", ["90", "sm90", "compute_90", "sm_90 -x", "gfx942", ""])
def test_arch_spelt_as_none_is(arch: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is no architecture"):
        toolchains.chosen_archs(probe(nvidia().sources(tmp_path)), [arch])


def test_corex_command_line(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    compiler = CompilerFacts("clang++", f"{tmp_path}/bin/clang++", str(tmp_path), confirmed=True)
    command = Toolchain(compiler, "ivcore10").command(SPEC, Path("/s/p.cu"), Path("/o/x.so"))
    assert command[0] == f"{tmp_path}/bin/clang++"
    for part in (
        "-std=c++17", "-O3", "-shared", "-fPIC", f"--cuda-path={tmp_path}",
        "--cuda-gpu-arch=ivcore10", "--no-cuda-version-check", "-I/s", "/s/p.cu",
        f"-L{tmp_path}/lib64", "-lcudart", f"-Wl,-rpath,{tmp_path}/lib64", *MACROS,
    ):  # fmt: skip
        assert part in command
    assert command[command.index("-o") + 1] == "/o/x.so"
    # what the vendor's compiler does not take
    refused = ("-gencode", "-Xcompiler", "-Xptxas", "-lineinfo", "--use_fast_math", "--expt")
    assert not [part for part in command if part.startswith(refused) or "static" in part]


def test_nvcc_command_line() -> None:
    compiler = CompilerFacts("nvcc", "/c/bin/nvcc", "/c", confirmed=True)
    command = Toolchain(compiler, "sm_90a").command(SPEC, Path("/s/p.cu"), Path("/o/x.so"))
    joined = " ".join(command)
    assert "-Xcompiler -fPIC -gencode arch=compute_90a,code=sm_90a" in joined
    assert {"-shared", "-O3", "-I/s", "/s/p.cu", *MACROS} <= set(command)
    assert not [part for part in command if part.startswith("--cuda-")]


@pytest.mark.parametrize(
    ("arch", "version", "tuned"),
    [
        ("sm_80", "12.0", "80"), ("sm_90", "13.0", "90"), ("sm_90a", "12.4", "90"),
        ("sm_80", "11.8", ""), ("sm_90", "11.8", ""), ("sm_86", "13.0", ""),
        ("sm_100", "13.0", ""), ("sm_120", "13.0", ""), ("sm_75", "12.0", ""),
    ],
)  # fmt: skip
def test_tuned_kernels_where_device_and_compiler_have_the_instructions(
    arch: str, version: str, tuned: str
) -> None:
    compiler = CompilerFacts("nvcc", "/c/bin/nvcc", "/c", version=version, confirmed=True)
    flags = Toolchain(compiler, arch).flags(SPEC)
    found = [flag.partition("=")[2] for flag in flags if flag.startswith("-DPAGEDATTN_TUNED")]
    assert found == [tuned] * bool(tuned)


def test_compiler_for_other_devices(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="ivcore10 is an Iluvatar"):
        toolchains.find(probe(nvidia().sources(tmp_path)), "ivcore10")
    with pytest.raises(BuildError, match="sm_90 is an NVIDIA"):
        toolchains.find(probe(bi_v100().sources(tmp_path)), "sm_90")


def test_no_compiler_says_what_was_passed_over(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no CUDA compiler"):
        toolchains.find(probe(nvidia_without_nvcc().sources(tmp_path)), "sm_90")
    decoy_only = {"/usr/local/corex/bin/nvcc": b"#!/bin/sh\nexit 0\n"}
    with pytest.raises(BuildError, match=r"bin/nvcc: a decoy"):
        toolchains.find(probe(bi_v100(files=decoy_only).sources(tmp_path)), "ivcore10")


@pytest.mark.parametrize("mode", ["broken", "foreign"])
def test_compiler_that_is_none(mode: str, tmp_path: Path) -> None:
    """It is started before it is believed."""
    program = tmp_path / "clang++"
    answers = {"broken": "exit 127", "foreign": "echo clang 16"}
    program.write_text(f"#!/bin/sh\n{answers[mode]}\n")
    program.chmod(0o755)
    facts = probe(bi_v100().sources(tmp_path / "machine"))
    facts = replace(facts, compiler=replace(facts.compiler, path=str(program)))
    told = {"broken": "--version failed", "foreign": "does not list bi"}[mode]
    with pytest.raises(BuildError, match=told):
        toolchains.find(facts, "ivcore10")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (Spec("float64", "float64", 64, 1, 16), "queries of float64"),
        (Spec("fp16", "bf16", 64, 1, 16), "a cache of bf16"),
        (Spec("fp16", "fp16", 100, 1, 16), "head_dim is 100"),
        (Spec("fp16", "fp16", 264, 1, 16), "head_dim is 264"),
        (Spec("fp16", "fp16", 64, 1, 12), "block_size is 12"),
    ],
)
def test_classes_that_are_not_compiled(spec: Spec, told: str) -> None:
    (reason,) = unsupported_reasons(spec)
    assert told in reason


def test_classes_that_are_compiled() -> None:
    for dtype in ("fp16", "bf16", "fp32"):
        for kv in (dtype, "int8", "fp8_e4m3", "fp8_e5m2"):
            assert unsupported_reasons(Spec(dtype, kv, 80, 7, 8)) == []


@pytest.mark.skipif(
    shutil.which("nvcc") is None,
    reason="needs nvcc",
)
def test_nvcc_takes_the_command_line(tmp_path: Path) -> None:
    from pagedattn.backends.cuda import compile
    from pagedattn.probe_cuda import find_nvcc
    from pagedattn.probe_sources import Notes, this_machine

    compiler = find_nvcc(this_machine(), Notes())
    text = "\n".join(
        f'extern "C" int {name}() {{ return PAGEDATTN_HEAD_DIM; }}' for name in compile._SYMBOLS
    )
    (tmp_path / "p.cu").write_text(f"__global__ void kernel() {{}}\n{text}\n")
    toolchain = Toolchain(compiler, "sm_80")
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "x.so"
    subprocess.run(toolchain.command(SPEC, tmp_path / "p.cu", output), check=True, timeout=120)
    compile._require_library(toolchain, output, SPEC.head_dim)
