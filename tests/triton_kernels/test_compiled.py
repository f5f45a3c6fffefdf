"""The kernels compiled for GPUs that are not here: the registers and shared memory they take."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.backends.compiler", reason="compiles for a named GPU from Triton 3 on")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedattn.backends.protocol import KVLayout, Problem
from pagedattn.backends.triton import kernels, tuning

# bytes of shared memory that a block may have
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
# bytes of stack at most: a few registers; what spills in earnest takes hundreds
STACK_LIMIT = {80: 32, 86: 32, 89: 32, 90: 8}
_TYPES = {torch.float16: ("fp16", tl.float16), torch.bfloat16: ("bf16", tl.bfloat16)}
_EIGHT_BIT = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int8: "i8"}


def _strides(layout: KVLayout, p: Problem) -> dict[str, int]:
    kv, d, bs = p.num_kv_heads, p.head_dim, p.block_size
    x = 16 // p.kv_dtype.itemsize
    if layout == "packed":
        return {
            "K_BLOCK": kv * d * bs, "K_HEAD": d * bs, "K_TOKEN": x, "K_CHUNK": bs * x, "X": x,
            "V_BLOCK": kv * d * bs, "V_HEAD": d * bs, "V_TOKEN": 1, "V_DIM": bs,
        }  # fmt: skip
    return {
        "K_BLOCK": kv * d * bs, "K_HEAD": d, "K_TOKEN": kv * d, "K_CHUNK": 0, "X": d,
        "V_BLOCK": kv * d * bs, "V_HEAD": d, "V_TOKEN": kv * d, "V_DIM": 1,
    }  # fmt: skip


def _constants(p: Problem, tiling: tuning.Tiling, queries: int) -> dict[str, Any]:
    return {
        "NUM_HEADS": p.num_heads, **_strides(p.kv_layout, p), "BLOCK_SIZE": p.block_size,
        "TILE": tiling.tile, "D": p.head_dim, "D_PAD": tuning.padded(p.head_dim),
        "GROUP": p.group, "ROWS": tuning.rows(p.group, queries), "TILE_QUERIES": queries,
        "VARLEN": queries > 1, "HAS_WINDOW": p.window, "HAS_SOFTCAP": p.softcap,
        "HAS_ALIBI": p.alibi, "HAS_SINKS": p.sinks, "K_SCALES": 0, "V_SCALES": 0,
        "HAS_LSE": p.return_lse, "PARTIAL": True,
        "V_RUN": 16 // p.kv_dtype.itemsize if p.kv_layout == "packed" else 1,
        "DOT_TYPE": _TYPES[p.dtype][1], "K_PARTS": tiling.key_parts, "WORDS": tiling.words,
        "OVERLAP": False, "AHEAD": tiling.ahead,
    }  # fmt: skip


def _compile_decode(p: Problem, queries: int, capability: int, work: int) -> tuple[int, int]:
    """Bytes of stack (spills) and of shared memory that the kernel takes."""
    with _roomy(capability):
        tiling = tuning.decode_tiling(p, tuning.rows(p.group, queries), work)
    if p.kv_dtype.itemsize == 1:
        cubin, shared = _process(capability).submit(
            _compile, "decode", p, queries, capability, tiling
        ).result()  # fmt: skip
    else:
        cubin, shared = _compile("decode", p, queries, capability, tiling)
    return _stack(cubin), shared


@functools.cache
def _process(capability: int) -> ProcessPoolExecutor:
    """One for each capability: how Triton converts the types of 8 bits it settles, in a process,
    for the GPU that it compiles for first."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _compile_prefill(p: Problem, capability: int) -> tuple[bytes, int]:
    """The kernel, and the bytes of shared memory that it takes."""
    with _roomy(capability):
        tiling, queries = tuning.prefill_tiling(p), tuning.prefill_queries(p)
    return _compile("prefill", p, queries, capability, tiling)


@contextlib.contextmanager
def _roomy(capability: int) -> Iterator[None]:
    """`tuning` would ask a device that is here; the one meant is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "roomy", lambda _: capability in (80, 90))
        patch.setattr(tuning, "hopper", lambda _: capability >= 90)
        yield


def _compile(
    kernel_name: str, p: Problem, queries: int, capability: int, tiling: tuning.Tiling
) -> tuple[bytes, int]:
    """A kernel for a GPU, and the bytes of shared memory that it takes."""
    kernel: Any = getattr(kernels, kernel_name)
    constants = {k: v for k, v in _constants(p, tiling, queries).items() if k in kernel.arg_names}
    name = _TYPES[p.dtype][0]
    signature: dict[str, str] = {}
    for parameter in kernel.arg_names:
        if parameter in constants:
            signature[parameter] = "constexpr"
        elif parameter in ("key_ptr", "value_ptr"):
            signature[parameter] = "*" + _EIGHT_BIT.get(p.kv_dtype, name)
        elif parameter == "query_ptr":
            signature[parameter] = f"*{name}"
        elif parameter == "out_ptr":
            signature[parameter] = "*fp32" if kernel is kernels.decode else f"*{name}"
        else:
            floats = ("scale", "softcap", "v_scale")
            kind = "fp32" if parameter in floats else "i32"
            signature[parameter] = "*i32" if parameter.endswith("_ptr") else kind
    names = list(signature)
    aligned = ("query_ptr", "key_ptr", "value_ptr", "out_ptr")
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k in aligned},
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


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
@pytest.mark.parametrize("kv_dtype", _EIGHT_BIT, ids=str)
def test_eight_bit_caches_fit_and_hardly_spill(
    capability: int, layout: KVLayout, kv_dtype: torch.dtype
) -> None:
    if capability == 80 and kv_dtype == torch.float8_e4m3fn:
        pytest.skip("Triton has the type from 8.9 on")
    problem = Problem("cuda:0", torch.float16, kv_dtype, 24, 4, 256, 16, kv_layout=layout)
    stack, shared = _compile_decode(problem, 1, capability, 1 << 20)
    assert stack <= 32
    assert shared <= 44 << 10  # four programs fit a multiprocessor of 9.0


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
        assert tuning.prefill_tiling(problem).ahead
    cubin, shared = _compile_prefill(problem, 90)
    (loop,) = _pipelined_loops(cubin)
    assert "HGMMA" in loop
    assert not re.search(r"\b(LDL|STL)\b", loop)
    assert shared <= SHARED_LIMIT[90]
