"""The Triton kernels compiled for a named GPU, which need not be here."""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedattn.backends.protocol import KVLayout, Problem
from pagedattn.backends.triton import kernels, tuning

_TYPES = {torch.float16: ("fp16", tl.float16), torch.bfloat16: ("bf16", tl.bfloat16)}
EIGHT_BIT = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int8: "i8"}


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
        "OVERLAP": False, "CHUNKS": tiling.chunks,
    }  # fmt: skip


@functools.cache
def _process(capability: int) -> ProcessPoolExecutor:
    """One for each capability: how Triton converts the types of 8 bits it settles, in a process,
    for the GPU that it compiles for first."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def compile_for(
    kernel_name: str, p: Problem, queries: int, capability: int, tiling: tuning.Tiling,
    stage: str = "cubin",
) -> tuple[Any, int]:  # fmt: skip
    """A kernel for a GPU, as it is at one stage of compilation (bytes, or text before the last),
    and the bytes of shared memory that it takes."""
    arguments = (kernel_name, p, queries, capability, tiling, stage)
    if p.kv_dtype.itemsize > 1:
        return _compile(*arguments)
    return _process(capability).submit(_compile, *arguments).result()


def _compile(
    kernel_name: str, p: Problem, queries: int, capability: int, tiling: tuning.Tiling, stage: str
) -> tuple[Any, int]:
    kernel: Any = getattr(kernels, kernel_name)
    constants = {k: v for k, v in _constants(p, tiling, queries).items() if k in kernel.arg_names}
    name = _TYPES[p.dtype][0]
    signature: dict[str, str] = {}
    for parameter in kernel.arg_names:
        if parameter in constants:
            signature[parameter] = "constexpr"
        elif parameter in ("key_ptr", "value_ptr"):
            signature[parameter] = "*" + EIGHT_BIT.get(p.kv_dtype, name)
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
    return compiled.asm[stage], compiled.metadata.shared
