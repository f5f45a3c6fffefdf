"""What one binary is compiled for: a class of problems, as macros of the sources."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedattn.backends.errors import BuildError
from pagedattn.backends.protocol import KVLayout, Problem

#: a type's name on the command line -> its code in csrc/ (PAGEDATTN_QUERY_TYPE)
TYPE_CODES = {"fp16": 0, "bf16": 1, "fp32": 2, "int8": 3, "fp8_e4m3": 4, "fp8_e5m2": 5}
QUERY_TYPES = ("fp16", "bf16", "fp32")
QUANTISED_TYPES = ("int8", "fp8_e4m3", "fp8_e5m2")
_NAMES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "int8": "int8",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
BLOCK_SIZE_STEP = 8


@dataclass(frozen=True, order=True)
class Spec:
    """One binary's class. Layouts are strides, so they need no binary of their own.

    Attributes
    ----------
    dtype, kv_dtype : str
        Of the query and of the cache, as in `TYPE_CODES`.
    group : int
        Query heads per KV head.
    """

    dtype: str
    kv_dtype: str
    head_dim: int
    group: int
    block_size: int

    @property
    def name(self) -> str:
        """Fit for a file name: ``fp16-fp16-d256-g6-b16``."""
        sizes = f"d{self.head_dim}-g{self.group}-b{self.block_size}"
        return f"{self.dtype}-{self.kv_dtype}-{sizes}"

    def macros(self) -> tuple[str, ...]:
        """The ``-D`` options that choose this class in the sources."""
        values = {
            "QUERY_TYPE": TYPE_CODES[self.dtype],
            "KV_TYPE": TYPE_CODES[self.kv_dtype],
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
        }
        return tuple(f"-DPAGEDATTN_{name}={value}" for name, value in values.items())

    def options(self) -> str:
        """The options of ``pagedattn build`` that make it."""
        return (
            f"--dtype {self.dtype} --kv-dtype {self.kv_dtype} --head-dim {self.head_dim} "
            f"--group {self.group} --block-size {self.block_size}"
        )


def type_name(dtype: torch.dtype) -> str:
    """A type as the command line spells it; torch's own spelling for one we do not know."""
    plain = str(dtype).removeprefix("torch.")
    return _NAMES.get(plain, plain)


def spec_of(problem: Problem) -> Spec:
    """The binary that serves `problem`."""
    return Spec(
        type_name(problem.dtype),
        type_name(problem.kv_dtype),
        problem.head_dim,
        problem.group,
        problem.block_size,
    )


def unsupported_reasons(spec: Spec) -> list[str]:
    """Why the sources cannot be compiled for `spec`; empty if they can."""
    reasons = []
    if spec.dtype not in QUERY_TYPES:
        reasons.append(f"queries of {spec.dtype} (it takes {', '.join(QUERY_TYPES)})")
    if spec.kv_dtype not in (spec.dtype, *QUANTISED_TYPES):
        taken = ", ".join((spec.dtype, *QUANTISED_TYPES))
        reasons.append(
            f"a cache of {spec.kv_dtype} under queries of {spec.dtype} (it takes {taken})"
        )
    if spec.head_dim % HEAD_DIM_STEP or not 0 < spec.head_dim <= MAX_HEAD_DIM:
        reasons.append(
            f"head_dim is {spec.head_dim}, no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    if spec.block_size % BLOCK_SIZE_STEP or spec.block_size < 1:
        reasons.append(f"block_size is {spec.block_size}, no multiple of {BLOCK_SIZE_STEP}")
    if spec.group < 1:
        reasons.append(f"group is {spec.group}, less than 1")
    return reasons


def untuned_reason(spec: Spec, kv_layout: KVLayout) -> str | None:
    """Why the tuned kernel does not serve a class well, as csrc/tuned.cuh has it; None: it does."""
    if "fp32" in (spec.dtype, spec.kv_dtype):
        return "fp32 does not go to the tensor cores"
    if spec.head_dim % 16:
        return f"head_dim is {spec.head_dim}, no multiple of 16"
    narrow = spec.kv_dtype in QUANTISED_TYPES
    if kv_layout == "packed" and narrow and spec.block_size % 16:
        return f"packed blocks of {spec.block_size} tokens cannot be copied as they lie"
    if spec.group > 8:
        return f"{spec.group} rows share a KV head, and a tile has 8"
    return None


def check(spec: Spec) -> None:
    """Raise `BuildError` with every reason if the sources cannot be compiled for `spec`."""
    reasons = unsupported_reasons(spec)
    if reasons:
        raise BuildError(f"{spec.name} cannot be built: {'; '.join(reasons)}", spec)
