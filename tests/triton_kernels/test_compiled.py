"""The kernels compiled for GPUs that are not here: the registers and shared memory they take."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.backends.compiler", reason="compiles for a named GPU from Triton 3 on")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch
from _triton_compile import EIGHT_BIT, compile_for

from pagedattn.backends.protocol import KVLayout, Problem
from pagedattn.backends.triton import tuning

# bytes of shared memory that a block may have
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
# bytes of stack at most: a few registers; what spills in earnest takes hundreds
STACK_LIMIT = {80: 32, 86: 32, 89: 32, 90: 8}


def _compile_decode(p: Problem, queries: int, capability: int, work: int) -> tuple[int, int]:
    """Bytes of stack (spills) and of shared memory that the kernel takes."""
    with _roomy(capability):
        tiling = tuning.decode_tiling(p, tuning.rows(p.group, queries), work)
    cubin, shared = compile_for("decode", p, queries, capability, tiling)
    return _stack(cubin), shared


def _compile_prefill(p: Problem, capability: int) -> tuple[bytes, int]:
    """The kernel, and the bytes of shared memory that it takes."""
    with _roomy(capability):
        tiling, queries = tuning.prefill_tiling(p), tuning.prefill_queries(p)
    return compile_for("prefill", p, queries, capability, tiling)


@contextlib.contextmanager
def _roomy(capability: int) -> Iterator[None]:
    """`tuning` would ask a device that is here; the one meant is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "roomy", lambda _: capability in (80, 90))
        patch.setattr(tuning, "hopper", lambda _: capability >= 90)
        yield


def _told(cubin: bytes, tool: str, option: str) -> str:
    path = Path(os.environ["PAGEDATTN_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    program = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / tool
    command = [str(program), option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _stack(cubin: bytes) -> int:
    """Bytes of stack that a kernel takes, which are its spills."""
    told = _told(cubin, "cuobjdump", "--dump-resource-usage")
    found = re.search(r"STACK:(\d+)", told)
    assert found, told
    return int(found[1])


def _pipelined_loops(cubin: bytes) -> list[str]:
    """The instructions of each loop that copies to shared memory ahead of use."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in _told(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", code[-1])
            if back and back[1] in labels:  # known: it lies before
                loops.append("\n".join(code[labels[back[1]] :]))
    return [loop for loop in loops if "LDGSTS" in loop]


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("work", [4096, 32768, 1 << 20], ids=["small", "middle", "large"])
def test_reference_problem_fits_and_hardly_spills(
    capability: int, layout: KVLayout, queries: int, work: int
) -> None:
    if capability not in (80, 90) and work < 1 << 20:
        pytest.skip("the largest tiles are the large work's")
    problem = Problem("cuda:0", torch.float16, torch.float16, 24, 4, 256, 16, kv_layout=layout)
    stack, shared = _compile_decode(problem, queries, capability, work)
    assert stack <= STACK_LIMIT[capability]
    assert shared <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("kv_dtype", EIGHT_BIT, ids=str)
def test_eight_bit_caches_fit_and_hardly_spill(
    capability: int, layout: KVLayout, kv_dtype: torch.dtype
) -> None:
    if capability == 80 and kv_dtype == torch.float8_e4m3fn:
        pytest.skip("Triton has the type from 8.9 on")
    problem = Problem("cuda:0", torch.float16, kv_dtype, 24, 4, 256, 16, kv_layout=layout)
    stack, shared = _compile_decode(problem, 1, capability, 1 << 20)
    assert stack <= 32
    assert shared <= 44 << 10  # four programs fit a multiprocessor of 9.0


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "queries", "features"),
    [(256, 1, ("window", "softcap", "alibi")), (128, 1, ()), (256, 4, ("sinks",))],
)
def test_packed_eight_bit_keys_are_copied_ahead_of_use(
    head_dim: int, queries: int, features: tuple[str, ...], kv_dtype: torch.dtype
) -> None:
    wanted: dict[str, Any] = dict.fromkeys(features, True)
    problem = Problem("cuda:0", torch.bfloat16, kv_dtype, 24, 4, head_dim, 16, **wanted)
    with _roomy(90):
        tiling = tuning.decode_tiling(problem, tuning.rows(problem.group, queries), 1 << 20)
    assert tiling.chunks == 1
    code, shared = compile_for("decode", problem, queries, 90, tiling, "ttgir")
    chunks = f"tensor<{head_dim // 16}x{tiling.tile}x16x!tt.ptr<"
    copies = [line for line in code.splitlines() if "async_copy_global_to_local" in line]
    assert any(chunks in line for line in copies)
    assert all("contiguity = 16" in line for line in copies)  # all are as wide as they can be
    assert shared * tiling.programs_per_sm <= SHARED_LIMIT[90]


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_other_head_sizes_fit(capability: int, head_dim: int) -> None:
    problem = Problem(
        "cuda:0", torch.bfloat16, torch.bfloat16, 32, 8, head_dim, 16, kv_layout="NHD", window=True
    )
    _, shared = _compile_decode(problem, 1, capability, 1 << 20)
    assert shared <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_prefill_fits(capability: int, layout: KVLayout, kv_dtype: torch.dtype) -> None:
    problem = Problem(
        "cuda:0", torch.bfloat16, kv_dtype, 24, 4, 256, 16, kv_layout=layout, varlen_query=True
    )
    cubin, shared = _compile_prefill(problem, capability)
    if capability == 90:
        assert _stack(cubin) <= 128
    assert shared <= SHARED_LIMIT[capability]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        (256, ()),
        (256, ("alibi", "sinks", "return_lse")),
        (128, ("window", "softcap")),
        (64, ("window", "softcap", "alibi")),
    ],
)
def test_keys_loaded_ahead_do_not_spill_in_the_loop(
    head_dim: int, features: tuple[str, ...], dtype: torch.dtype
) -> None:
    wanted: dict[str, Any] = dict.fromkeys(features, True)
    problem = Problem("cuda:0", dtype, dtype, 24, 4, head_dim, 16, varlen_query=True, **wanted)
    with _roomy(90):
        assert tuning.prefill_tiling(problem).chunks == 2
    cubin, shared = _compile_prefill(problem, 90)
    (loop,) = _pipelined_loops(cubin)
    assert "HGMMA" in loop
    assert not re.search(r"\b(LDL|STL)\b", loop)
    assert shared <= SHARED_LIMIT[90]
