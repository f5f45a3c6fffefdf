"""The oldest Triton that is served takes the kernels' source, down to the assembly of a GPU.

It has no interpreter, so that whether they are right there only a GPU can tell.
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if not triton.__version__.startswith("2.1."):
    pytest.skip("it calls the stages of Triton 2.1's compiler", allow_module_level=True)

import triton.language as tl
from triton.compiler import compiler
from triton.compiler.code_generator import ast_to_ttir

from pagedattn.backends.triton import kernels

CAPABILITY = 80
HALVES = ("query_ptr", "key_ptr", "value_ptr", "out_ptr")
D, BLOCK, KV_HEADS, GROUP = 64, 16, 2, 6
CONSTANTS: dict[str, Any] = {
    "NUM_HEADS": KV_HEADS * GROUP, "BLOCK_SIZE": BLOCK, "TILE": 64, "D": D, "D_PAD": D,
    "GROUP": GROUP, "ROWS": 32, "TILE_QUERIES": 5, "VARLEN": True, "HAS_WINDOW": True,
    "HAS_SOFTCAP": True, "HAS_ALIBI": True, "HAS_SINKS": True, "K_SCALES": 1, "V_SCALES": 2,
    "HAS_LSE": True, "PARTIAL": True, "DOT_TYPE": tl.float16, "WORDS": False, "OVERLAP": False,
    "CHUNKS": 0,
    "DIMS": D, "SPLITS": 16,
}  # fmt: skip
LAYOUTS = {
    "packed": {
        "K_BLOCK": KV_HEADS * D * BLOCK, "K_HEAD": D * BLOCK, "K_TOKEN": 8, "K_CHUNK": BLOCK * 8,
        "X": 8, "V_BLOCK": KV_HEADS * D * BLOCK, "V_HEAD": D * BLOCK, "V_TOKEN": 1,
        "V_DIM": BLOCK, "V_RUN": 8, "K_PARTS": 4,
    },
    "NHD": {
        "K_BLOCK": KV_HEADS * D * BLOCK, "K_HEAD": D, "K_TOKEN": KV_HEADS * D, "K_CHUNK": 0,
        "X": D, "V_BLOCK": KV_HEADS * D * BLOCK, "V_HEAD": D, "V_TOKEN": KV_HEADS * D,
        "V_DIM": 1, "V_RUN": 1, "K_PARTS": 1,
    },
}  # fmt: skip
Alignment = namedtuple(
    "Alignment", ["divisible_by_16", "equal_to_1", "ids_of_folded_args", "divisible_by_8"]
)


def _type(kernel: Any, parameter: str) -> str:
    floats = ("scale", "softcap", "v_scale")
    if parameter == "partial_ptr" or (parameter == "out_ptr" and kernel is kernels.decode):
        return "*fp32"
    if parameter in HALVES:
        return "*fp16"
    if parameter.endswith("_ptr"):
        return "*i32" if parameter in ("tables_ptr", "lens_ptr", "starts_ptr") else "*fp32"
    return "fp32" if parameter in floats else "i32"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["decode", "prefill", "merge"])
def test_kernels_become_assembly(name: str, layout: str) -> None:
    kernel = getattr(kernels, name)
    names = kernel.arg_names
    given = {n: v for n, v in (CONSTANTS | LAYOUTS[layout]).items() if n in names}
    signature = {i: _type(kernel, n) for i, n in enumerate(names) if n not in given}
    aligned = tuple(i for i, n in enumerate(names) if n in HALVES)
    module = ast_to_ttir(
        kernel, signature, Alignment(aligned, (), (), ()),
        {names.index(n): v for n, v in given.items()}, debug=False, arch=CAPABILITY,
    )  # fmt: skip
    module = compiler.ttir_to_ttgir(compiler.optimize_ttir(module, CAPABILITY), 4)
    module = compiler.optimize_ttgir(module, 2, CAPABILITY)
    device_functions = Path(triton.__path__[0]) / "third_party/cuda/lib/libdevice.10.bc"
    module = compiler.ttgir_to_llir(module, {"libdevice": str(device_functions)}, CAPABILITY)
    assembly = str(compiler.llir_to_ptx(module, CAPABILITY, 81))
    assert f".entry {name}" in assembly
    assert ("mma.sync" in assembly) == (name != "merge")
