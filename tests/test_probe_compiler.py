"""Which compiler is found, which are rejected and why, and what confirming one does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from _platforms import (
    ELF,
    SCRIPT,
    bi_v100,
    bi_v150,
    corex_tree,
    cpu_only,
    nvidia,
    nvidia_without_nvcc,
    other_vendor,
)

from pagedattn.backends.cuda.confirm import confirm_compiler
from pagedattn.backends.facts import CompilerFacts
from pagedattn.probe import probe


def test_corex_takes_clang_and_calls_nvcc_a_decoy(tmp_path: Path) -> None:
    compiler = probe(bi_v100().sources(tmp_path)).compiler
    assert compiler.kind == "clang++"
    assert compiler.path == "/usr/local/corex/bin/clang++"
    assert compiler.root == "/usr/local/corex"
    assert compiler.confirmed is None
    (line,) = compiler.rejected
    assert line.startswith("/usr/local/corex/bin/nvcc: a decoy")


def test_corex_prefers_ixcc(tmp_path: Path) -> None:
    files = {**corex_tree("4.4.0"), "/usr/local/corex-4.4.0/bin/ixcc": ELF}
    assert probe(bi_v150(files=files).sources(tmp_path)).compiler.kind == "ixcc"


def test_corex_passes_over_an_ixcc_that_is_a_script(tmp_path: Path) -> None:
    files = {**corex_tree("4.4.0"), "/usr/local/corex-4.4.0/bin/ixcc": SCRIPT}
    compiler = probe(bi_v150(files=files).sources(tmp_path)).compiler
    assert compiler.kind == "clang++"
    assert any("ixcc: a script" in line for line in compiler.rejected)


def test_corex_takes_no_clang_from_elsewhere(tmp_path: Path) -> None:
    files = {**corex_tree("3.2.3"), "/usr/bin/clang++": ELF}
    del files["/usr/local/corex-3.2.3/bin/clang++"]
    assert probe(bi_v100(files=files).sources(tmp_path)).compiler.path is None


def test_corex_has_no_use_for_a_real_nvcc(tmp_path: Path) -> None:
    files = {**corex_tree("3.2.3"), "/usr/local/cuda/bin/nvcc": ELF}
    machine = bi_v100(files=files, environ={"PATH": "/usr/local/cuda/bin"})
    compiler = probe(machine.sources(tmp_path)).compiler
    assert compiler.kind == "clang++"
    assert any("builds for NVIDIA" in line for line in compiler.rejected)


def test_corex_without_a_tree_says_what_to_set(tmp_path: Path) -> None:
    compiler = probe(bi_v100(files={}, devices=None).sources(tmp_path)).compiler
    assert compiler.path is None
    assert any("COREX_HOME" in line for line in compiler.rejected)


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({}, "/usr/local/corex"),
        ({"COREX_HOME": "/opt/a", "COREX_PATH": "/opt/b"}, "/opt/a"),
        ({"COREX_PATH": "/opt/b/", "COREX_ROOT": "/opt/c"}, "/opt/b"),
        ({"COREX_ROOT": "/opt/c", "CUDA_HOME": "/opt/corex-9"}, "/opt/c"),
        ({"CUDA_HOME": "/opt/corex-9"}, "/opt/corex-9"),
        ({"CUDA_HOME": "/opt/sdk"}, "/opt/sdk"),  # it has ixsmi
        ({"CUDA_HOME": "/opt/cuda-12"}, "/usr/local/corex"),
        ({"COREX_HOME": "/opt/gone", "COREX_ROOT": "/opt/c"}, "/opt/c"),
    ],
)
def test_order_of_the_search_for_the_tree(
    environ: dict[str, str], root: str, tmp_path: Path
) -> None:
    files: dict[str, bytes | str] = {
        f"/opt/{name}/bin/clang++": ELF for name in ("a", "b", "c", "corex-9", "cuda-12")
    }
    files["/opt/sdk/bin/ixsmi"] = ELF
    machine = bi_v100(files={**corex_tree("3.2.3"), **files}, environ=environ)
    assert probe(machine.sources(tmp_path)).corex_root == root


def test_variable_that_names_no_folder_is_told(tmp_path: Path) -> None:
    facts = probe(bi_v100(environ={"COREX_HOME": "/opt/gone"}).sources(tmp_path))
    assert "COREX_HOME=/opt/gone is not a folder" in facts.notes


def test_nvcc_of_the_path_and_its_tree(tmp_path: Path) -> None:
    compiler = probe(nvidia().sources(tmp_path)).compiler
    assert (compiler.kind, compiler.path) == ("nvcc", "/usr/local/cuda/bin/nvcc")
    assert compiler.root == "/usr/local/cuda"
    assert compiler.note is None


def test_nvcc_of_cuda_home_comes_first(tmp_path: Path) -> None:
    machine = nvidia(environ={"CUDA_HOME": "/opt/cuda"})
    machine.files = {**machine.files, "/opt/cuda/bin/nvcc": ELF, "/opt/cuda/targets/x": b""}
    compiler = probe(machine.sources(tmp_path)).compiler
    assert (compiler.path, compiler.root) == ("/opt/cuda/bin/nvcc", "/opt/cuda")


def test_nvcc_off_the_path_is_found_in_its_usual_place(tmp_path: Path) -> None:
    compiler = probe(nvidia(environ={"PATH": "/usr/bin"}).sources(tmp_path)).compiler
    assert compiler.path == "/usr/local/cuda/bin/nvcc"


def test_nvcc_that_is_a_wrapper_is_accepted_with_a_note(tmp_path: Path) -> None:
    machine = nvidia(environ={"PATH": "/opt/conda/bin"})
    machine.files = {**machine.files, "/opt/conda/bin/nvcc": SCRIPT}
    compiler = probe(machine.sources(tmp_path)).compiler
    assert compiler.path == "/opt/conda/bin/nvcc"
    assert compiler.root == "/usr/local/cuda"  # where the headers are
    assert compiler.note is not None
    assert "script" in compiler.note


def test_nvcc_that_is_neither_is_rejected_and_the_next_taken(tmp_path: Path) -> None:
    machine = nvidia(environ={"CUDA_HOME": "/opt/cuda"})
    machine.files = {**machine.files, "/opt/cuda/bin/nvcc": b"garbage"}
    compiler = probe(machine.sources(tmp_path)).compiler
    assert compiler.path == "/usr/local/cuda/bin/nvcc"
    assert compiler.rejected == ("/opt/cuda/bin/nvcc: not an ELF program",)


def test_nvidia_without_nvcc(tmp_path: Path) -> None:
    assert probe(nvidia_without_nvcc().sources(tmp_path)).compiler == CompilerFacts()


def test_decoy_on_the_path_of_a_machine_that_is_not_corex(tmp_path: Path) -> None:
    compiler = probe(cpu_only(files=corex_tree("3.2.3")).sources(tmp_path)).compiler
    assert compiler.path is None
    assert any("a decoy" in line for line in compiler.rejected)


def test_no_compiler_is_taken_for_another_vendor(tmp_path: Path) -> None:
    assert probe(other_vendor().sources(tmp_path)).compiler.path is None


def test_file_that_may_not_be_run_is_not_taken(tmp_path: Path) -> None:
    sources = nvidia().sources(tmp_path)
    (tmp_path / "usr/local/cuda-13.0/bin/nvcc").chmod(0o644)
    compiler = probe(sources).compiler
    assert compiler.path is None
    assert compiler.rejected == ("/usr/local/cuda/bin/nvcc: not executable",)


class Runner:
    """Stands in for `subprocess.run`; answers by the command's last argument."""

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        self.answers = answers
        self.options: dict[str, Any] = {}

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.options = options
        code, out, err = self.answers[command[-1].strip("-").replace("-", "_")]
        return subprocess.CompletedProcess(command, code, out, err)


TARGETS = "  Registered Targets:\n    bi         - Iluvatar BI\n    x86-64     - 64-bit X86\n"
CLANG = (0, "clang version 16.0.0 (corex)\nTarget: x86_64\n", "")


def _confirm(tmp_path: Path, run: Any, machine: Any = None) -> CompilerFacts:
    facts = probe((machine or bi_v100()).sources(tmp_path))
    return confirm_compiler(facts, run, environ={"LD_LIBRARY_PATH": "/x"})


def test_clang_that_lists_bi_is_confirmed(tmp_path: Path) -> None:
    run = Runner(version=CLANG, print_targets=(0, TARGETS, ""))
    compiler = _confirm(tmp_path, run)
    assert compiler.confirmed is True
    assert compiler.version == "clang version 16.0.0 (corex)"
    libraries = "/usr/local/corex/lib:/usr/local/corex/lib64:/x"
    assert run.options["env"]["LD_LIBRARY_PATH"] == libraries
    assert run.options["timeout"] > 0


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"version": CLANG, "print_targets": (0, TARGETS.replace(" bi ", " bpf "), "")}, "list bi"),
        ({"version": CLANG, "print_targets": (1, TARGETS, "")}, "list bi"),
        ({"version": (127, "", "libLLVM.so: not found\n")}, "libLLVM.so: not found"),
        ({"version": (0, "", "")}, "printed nothing"),
    ],
)
def test_clang_that_is_none_is_not_confirmed(
    answers: dict[str, tuple[int, str, str]], reason: str, tmp_path: Path
) -> None:
    compiler = _confirm(tmp_path, Runner(**answers))
    assert compiler.confirmed is False
    assert reason in compiler.rejected[-1]


@pytest.mark.parametrize(
    "error", [OSError("exec format error"), subprocess.TimeoutExpired("clang++", 20.0)]
)
def test_compiler_that_cannot_run_or_hangs(error: Exception, tmp_path: Path) -> None:
    def run(*arguments: Any, **options: Any) -> Any:
        raise error

    compiler = _confirm(tmp_path, run)
    assert compiler.confirmed is False
    assert type(error).__name__ in compiler.rejected[-1]


def test_nvcc_is_confirmed_by_its_release(tmp_path: Path) -> None:
    run = Runner(version=(0, "Cuda compilation tools, release 13.0, V13.0.88\n", ""))
    compiler = _confirm(tmp_path, run, nvidia())
    assert (compiler.confirmed, compiler.version) == (True, "13.0")
    assert _confirm(tmp_path, Runner(version=(0, "hello", "")), nvidia()).confirmed is False


def test_nothing_to_confirm(tmp_path: Path) -> None:
    facts = probe(cpu_only().sources(tmp_path))
    assert confirm_compiler(facts, Runner()) == facts.compiler
