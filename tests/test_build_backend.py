"""The CUDA backend in the chain: when it is there, when it compiles, and how it fails."""

from __future__ import annotations

import math
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _backends import fresh_chain as fresh_chain
from _backends import small_problem
from _build_fixtures import cache as cache
from _build_fixtures import needs_gcc
from _build_fixtures import tree as tree
from _build_fixtures import tree_template as tree_template
from _fake_corex import CudaOnCpu, EmulatedCuda, compiled, emulate, facts_of, set_mode
from _platforms import bi_v100, cpu_only, nvidia, nvidia_without_nvcc

from pagedattn import chain, policy, register_backend, registry, verify, verify_child
from pagedattn.backends.cuda import binary_cache, source
from pagedattn.backends.cuda.backend import CudaBackend
from pagedattn.backends.errors import BackendUnavailable, BuildError, VerificationError
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Buildable, BuildOptions
from pagedattn.hard_problems import make_call
from pagedattn.probe import probe
from pagedattn.request import Request

pytestmark = [needs_gcc, pytest.mark.usefixtures("fresh_chain", "cache")]
ASKED = BuildOptions(dtypes=("fp32",), head_dims=(32,), groups=(2,))  # small_problem()'s class


@pytest.fixture
def facts(tree: Path, tmp_path: Path) -> Facts:
    return facts_of(tree, tmp_path / "machine")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version that has sources, whichever this one has."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / source.ENTRY).write_text("// none of its lines is read")
    monkeypatch.setattr(source, "folder", lambda: folder)
    return folder


def build(backend: CudaBackend, facts: Facts, options: BuildOptions = ASKED) -> None:
    for job in backend.build_jobs(facts, options).values():
        job(threading.Event())


def test_it_can_be_built() -> None:
    assert isinstance(CudaBackend(), Buildable)


def test_nothing_missing_on_a_bi_v100(facts: Facts, sources: Path) -> None:
    assert CudaOnCpu().not_present_reasons(facts) == []


def test_every_thing_missing_is_said(tmp_path: Path, sources: Path) -> None:
    (sources / source.ENTRY).unlink()
    reasons = CudaOnCpu().not_present_reasons(probe(cpu_only().sources(tmp_path)))
    assert [r.split(",")[0] for r in reasons] == [
        "no GPU was found",
        "this version of pagedattn holds no CUDA kernel",
        "no CUDA compiler was found",
    ]


def test_decoy_nvcc_only(tmp_path: Path, sources: Path) -> None:
    files = {"/usr/local/corex/bin/nvcc": b"#!/bin/sh\nexit 0\n"}
    facts = probe(bi_v100(files=files).sources(tmp_path))
    reasons = CudaOnCpu().not_present_reasons(facts)
    assert any("bin/nvcc: a decoy" in reason for reason in reasons)


def test_build_never(
    facts: Facts, sources: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_BUILD", "never")
    backend = CudaOnCpu()
    (reason,) = backend.not_present_reasons(facts)
    assert reason == "PAGEDATTN_BUILD=never, and nothing is built yet"
    with pytest.raises(BackendUnavailable, match="PAGEDATTN_BUILD=never") as caught:
        backend.load(small_problem())
    assert compiled(tree) == 0
    line = str(caught.value)
    assert line.endswith(
        "pagedattn build --arch ivcore10 --dtype fp32 --kv-dtype fp32 --head-dim 32 --group 2 "
        "--block-size 16"
    )
    build(backend, facts)  # the command compiles all the same
    assert backend.not_present_reasons(facts) == []
    backend.load(small_problem())


def test_nvidia_waits_for_the_command(tmp_path: Path, sources: Path) -> None:
    facts = probe(nvidia().sources(tmp_path))
    backend = CudaOnCpu()
    (reason,) = backend.not_present_reasons(facts)
    assert "only `pagedattn build` compiles" in reason
    assert backend.remedy(facts) == "pagedattn build"
    with pytest.raises(BackendUnavailable, match="to build it: pagedattn build --arch sm_90 "):
        backend.load(small_problem())


def test_build_always(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BUILD", "always")
    facts = probe(nvidia().sources(tmp_path))
    backend = CudaOnCpu()
    assert backend.not_present_reasons(facts) == []
    assert backend.remedy(facts) is None


def test_built_elsewhere_and_no_compiler_here(facts: Facts, sources: Path, tmp_path: Path) -> None:
    build(CudaOnCpu(), facts)
    bare = replace(facts, compiler=probe(nvidia_without_nvcc().sources(tmp_path / "m")).compiler)
    backend = CudaOnCpu()
    assert backend.not_present_reasons(bare) == []
    backend.load(small_problem())
    with pytest.raises(BuildError, match="no CUDA compiler"):
        backend.load(small_problem(head_dim=64))


def test_first_use_compiles_once_and_says_so(
    facts: Facts, sources: Path, tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = CudaOnCpu()
    assert backend.not_present_reasons(facts) == []
    for _ in range(2):
        verify.judge(backend.load(small_problem()), small_problem())
    assert compiled(tree) == 1
    assert len([r for r in caplog.records if "compiling" in r.getMessage()]) == 1


def test_stale_binary_is_listed_and_not_loaded(
    facts: Facts, sources: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CudaOnCpu(facts)
    build(backend, facts)
    (sources / "new.cuh").write_text("")
    source._hash.cache_clear()
    assert [one.current for one in backend.built()] == [False]
    monkeypatch.setenv("PAGEDATTN_BUILD", "never")
    with pytest.raises(BackendUnavailable, match="nothing is built"):
        backend.load(small_problem())


def test_cache_that_cannot_be_written(
    facts: Facts, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(BuildError, match=r"cannot be kept.*PAGEDATTN_CACHE_DIR"):
        CudaOnCpu(facts).load(small_problem())


def test_damaged_binary_says_what_to_delete(facts: Facts, sources: Path) -> None:
    backend = CudaOnCpu(facts)
    build(backend, facts)
    (binary,) = binary_cache.listing()
    binary.path.write_bytes(binary.path.read_bytes()[:100])
    with pytest.raises(BackendUnavailable, match="delete") as caught:
        backend.load(small_problem())
    assert str(binary.path.parent) in str(caught.value)
    shutil.rmtree(binary.path.parent)
    backend.load(small_problem())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "float64"),
        ({"head_dim": 36}, "head_dim is 36"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"block_size": 12}, "block_size is 12"),
        ({"device": "cpu"}, "the tensors are on a CPU"),
        ({"kv_dtype": torch.float16}, "a cache of fp16"),
        ({"varlen_query": True, "query_part": "long"}, "it is made for decode"),
    ],
)
def test_what_it_cannot_do(changes: dict[str, object], told: str) -> None:
    problem = small_problem(**{"device": "cuda:0", **changes})
    (reason,) = CudaBackend().not_supported_reasons(problem)
    assert told in reason


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"kv_dtype": torch.int8, "block_size": 32, "head_dim": 80}, None),
        ({"block_size": 8}, None),
        ({"kv_layout": "NHD", "block_size": 24}, None),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "fp32"),
        ({"head_dim": 72}, "head_dim is 72"),
        ({"block_size": 24}, None),
        ({"kv_dtype": torch.int8, "block_size": 8}, "packed blocks of 8"),
        ({"num_heads": 24}, "12 rows share a KV head"),
        ({"varlen_query": True}, "more rows than share a read"),
    ],
)
def test_on_nvidia_it_steps_back_where_triton_serves_better(
    tmp_path: Path,
    changes: dict[str, object],
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = {"dtype": torch.float16, "kv_dtype": torch.float16, "kv_layout": "packed"}
    problem = small_problem(**{"device": "cuda:0", "head_dim": 64, **half, **changes})
    facts = probe(nvidia().sources(tmp_path))
    backend = CudaBackend()  # of a process that has asked it nothing yet
    monkeypatch.setitem(registry._instances, "cuda", backend)
    reason = backend.step_back_reason(problem, facts)
    assert (reason is None) == (told is None)
    assert told is None or told in str(reason)
    order = chain.automatic_order(problem, facts)
    assert order == (("cuda", "triton", "torch") if told is None else ("triton", "cuda", "torch"))


def test_on_corex_it_never_steps_back(facts: Facts) -> None:
    problem = small_problem(device="cuda:0", varlen_query=True)
    assert chain.automatic_order(problem, facts) == ("cuda", "triton", "torch")


def test_what_it_can_do() -> None:
    problem = small_problem(device="cuda:0", kv_dtype=torch.int8, alibi=True, sinks=True)
    assert CudaBackend().not_supported_reasons(problem) == []
    problem = replace(problem, varlen_query=True, query_part="short")
    assert CudaBackend().not_supported_reasons(problem) == []


def test_right_in_a_child(facts: Facts, tree: Path) -> None:
    verify.load_and_verify(CudaOnCpu(facts), small_problem(), facts)
    assert compiled(tree) == 1  # the child found what this process had compiled


@pytest.mark.parametrize(
    ("mode", "told"),
    [("crashes", "died of SIGSEGV"), ("hangs", "no answer within 8 s"), ("good", "wrong numbers")],
)
def test_library_that_fails_when_called(
    mode: str, told: str, facts: Facts, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process dies or hangs of it. The last is a wrong architecture's zeros."""
    monkeypatch.setattr(verify_child, "DEADLINE_S", 8.0)
    set_mode(tree, mode)
    backend = CudaOnCpu(facts, "ivcore11" if mode == "good" else None)
    began = time.monotonic()
    with pytest.raises(VerificationError, match=told):
        verify.load_and_verify(backend, small_problem(), facts)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("mode", ["silent", "error", "needs", "abi"])
def test_chain_ends_on_torch_with_the_reason(
    mode: str, facts: Facts, sources: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")  # of torch, which has tests of its own
    set_mode(tree, mode)
    register_backend(CudaOnCpu())
    request = Request(("fakecuda", "torch"), "a test")
    for _ in range(2):
        chain.reset()  # as another process would start
        binding = chain.resolve(small_problem(), request, facts)
        assert binding.backend == "torch"
        lost = binding.candidates[0]
        assert (lost.present, lost.loadable, lost.selected) == (True, False, False)
        assert "corex-3.2.3/bin/clang++ for ivcore10" in lost.reasons[0]
    assert compiled(tree) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_the_whole_road_with_the_real_kernels(
    layout: str, facts: Facts, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, compiled, loaded in a child, proved there on a hard problem, and selected."""
    monkeypatch.setattr(source, "entry", lambda: source.folder() / source.ENTRY)
    emulate(tree)
    register_backend(EmulatedCuda())
    problem = small_problem(kv_layout=layout, return_lse=True)
    binding = chain.resolve(problem, Request(("emulatedcuda", "torch"), "a test"), facts)
    assert binding.backend == "emulatedcuda", binding.candidates
    assert binding.candidates[0].verified
    assert compiled(tree) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_long_sequences_go_to_torch_in_the_same_call(
    facts: Facts, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "entry", lambda: source.folder() / source.ENTRY)
    monkeypatch.setitem(policy.SHORT_FIRST, EmulatedCuda.name, "a test")
    emulate(tree)
    register_backend(EmulatedCuda())
    problem = small_problem(varlen_query=True, return_lse=True)
    binding = chain.resolve(problem, Request(("emulatedcuda", "torch"), "a test"), facts)
    assert binding.parts == {"short": "emulatedcuda", "long": "torch"}, binding.candidates
    both = replace(make_call(replace(problem, query_part="long")), query_part="all")
    both.out.fill_(math.nan)
    binding.run(both)
    both.query_part = "all"
    error, lse_error = verify.errors(both, verify.oracle(both, problem))
    assert error <= 1e-5
    assert lse_error <= 1e-4
