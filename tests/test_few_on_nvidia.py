"""Speculative tokens on NVIDIA's devices: `cuda` takes calls of few a sequence, once it is built,
and `triton` the others."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _backends import fresh_chain as fresh_chain
from _backends import small_problem
from _platforms import PLATFORMS

from pagedattn import chain, registry, verify
from pagedattn.backends.cuda import binary_cache, compile
from pagedattn.backends.cuda.abi import ABI
from pagedattn.backends.cuda.backend import CudaBackend
from pagedattn.backends.cuda.binary_cache import Binary
from pagedattn.backends.cuda.spec import spec_of
from pagedattn.backends.cuda.toolchain import Toolchain
from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.facts import CompilerFacts, Facts
from pagedattn.backends.protocol import Built, Problem, Runner
from pagedattn.probe import probe
from pagedattn.record import Binding
from pagedattn.request import Request

pytestmark = pytest.mark.usefixtures("fresh_chain")
HALF: dict[str, Any] = {"dtype": torch.float16, "kv_dtype": torch.float16, "head_dim": 64}
ON_NVIDIA = small_problem(device="cuda:0", varlen_query=True, **HALF)


def _facts(tmp_path: Path, platform: str = "nvidia") -> Facts:
    return probe(PLATFORMS[platform]().sources(tmp_path))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"num_heads": 24, "num_kv_heads": 4}, 4),
        ({"num_heads": 24, "num_kv_heads": 4, "head_dim": 256}, 4),
        ({"num_heads": 24, "num_kv_heads": 4, "head_dim": 256, "kv_layout": "NHD"}, 1),
        ({"num_heads": 10, "head_dim": 144, "kv_layout": "HND"}, 1),
        ({"head_dim": 256, "kv_layout": "HND"}, 4),
        ({"head_dim": 128, "kv_layout": "NHD"}, 12),
        ({"num_heads": 2}, 24),
        ({"num_heads": 10}, 4),
        ({"num_heads": 16}, 3),
        ({"num_heads": 24}, 0),  # 12 rows share a KV head
        ({"varlen_query": False}, 0),
        ({"query_part": "short"}, 0),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, 0),
        ({"head_dim": 72}, 0),
        ({"kv_dtype": torch.int8, "block_size": 8}, 0),
        ({"device": "cuda:7"}, 0),  # of which nothing is known
    ],
)
def test_cuda_names_as_many_as_share_a_read(
    changes: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    problem = replace(ON_NVIDIA, **changes)
    assert CudaBackend().few_queries(problem, _facts(tmp_path)) == limit
    assert CudaBackend().few_queries(problem, _facts(tmp_path / "corex", "bi_v100")) == 0


def test_tiles_share_a_read_where_they_were_measured(tmp_path: Path) -> None:
    """On an A100 Triton keeps what takes more than one tile of rows."""
    facts = _facts(tmp_path)
    (device, *_) = facts.devices
    facts = replace(facts, devices=(replace(device, capability=(8, 0)),))
    problem = replace(ON_NVIDIA, num_heads=24, num_kv_heads=4)
    assert CudaBackend().few_queries(problem, facts) == 1
    assert CudaBackend().few_queries(replace(problem, num_heads=4), facts) == 8


def test_a_library_without_tuned_kernels_leaves_calls_to_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an nvcc before CUDA 12 makes it."""
    facts, cuda = _facts(tmp_path), CudaBackend()
    decode = replace(ON_NVIDIA, varlen_query=False)
    for version, told in (("12.0", None), ("11.8", "CUDA before 12"), ("13.0", None)):
        compiler = CompilerFacts("nvcc", "/usr/bin/nvcc", version=version)
        key = compile.key_of(Toolchain(compiler, "sm_90"), spec_of(ON_NVIDIA), ABI)
        kept = Binary(tmp_path / "kernels.so", key.made_of(), "today", 1.0)
        monkeypatch.setattr(binary_cache, "listing", lambda kept=kept: [kept])
        reason = cuda.step_back_reason(decode, facts)
        assert (reason is None) if told is None else (told in str(reason))
        assert (cuda.few_queries(ON_NVIDIA, facts) > 0) == (told is None)


def _resolve(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, built: bool,
    loads: bool = True, platform: str = "nvidia",
) -> Binding:  # fmt: skip
    """Resolve with the real backends; only what would touch a device is left out."""

    def load(backend: Any, problem: Problem, facts: Facts) -> Runner:
        if backend.name == "cuda" and not loads:
            raise BackendUnavailable("nothing is built for this class")
        return lambda call: None

    binaries = [Built("fp16", "/a/library", "nvcc", "today", 1.0)] if built else []
    monkeypatch.setattr(CudaBackend, "built", lambda self: binaries)
    monkeypatch.setattr(verify, "load_and_verify", load)
    monkeypatch.setitem(registry._instances, "cuda", CudaBackend())  # asked nothing yet
    return chain.resolve(problem, Request(None, "the automatic chain"), _facts(tmp_path, platform))


def _told(caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    (record,) = caplog.records
    return record.levelname, record.getMessage()


def test_on_nvidia_cuda_takes_speculative_tokens_and_triton_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = replace(ON_NVIDIA, num_heads=24, num_kv_heads=4)
    with caplog.at_level(logging.INFO, "pagedattn"):
        binding = _resolve(problem, tmp_path, monkeypatch, built=True)
    assert binding.parts == {"few": "cuda", "more": "triton"}
    assert _told(caplog) == (
        "INFO",
        "cuda+triton serves cuda:0 (the automatic chain): cuda in calls of up to 4 query tokens a "
        "sequence, triton in the others",
    )


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    ("built", "level", "told"),
    [
        (False, "INFO", "nothing is built yet, and here only `pagedattn build` compiles"),
        (True, "WARNING", "nothing is built for this class"),
    ],
)
def test_where_cuda_is_not_built_triton_serves_alone(
    varlen: bool, built: bool, level: str, told: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    problem = replace(ON_NVIDIA, varlen_query=varlen)
    with caplog.at_level(logging.INFO, "pagedattn"):
        binding = _resolve(problem, tmp_path, monkeypatch, built=built, loads=False)
    assert binding.parts == {"all": "triton"}
    assert _told(caplog) == (
        level,
        f"triton serves cuda:0 (the automatic chain); passed over: cuda: {told}",
    )


def test_on_corex_calls_are_shared_by_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = _resolve(ON_NVIDIA, tmp_path, monkeypatch, built=True, platform="bi_v100")
    assert binding.parts == {"short": "cuda", "long": "torch"}
