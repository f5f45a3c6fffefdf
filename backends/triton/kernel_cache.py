"""Kernels with their constants filled in, kept by what those depend on beside the problem."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from pagedattn.backends.protocol import Call, Problem
from pagedattn.backends.triton import kernels, tuning
from pagedattn.backends.triton.fast_launch import FastKernel
from pagedattn.backends.triton.strides import cache_strides, takes_words, value_run

_DOT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
if os.environ.get("TRITON_INTERPRET") == "1":  # which multiplies bf16 as if its bits were integers
    _DOT_TYPES[torch.bfloat16] = tl.float32


class KernelCache:
    """The kernels of one class of problems.

    Lengths, batch sizes and numbers of blocks are no part of any key: they never compile anew.
    """

    def __init__(self, problem: Problem, overlap: bool) -> None:
        self._problem = problem
        self._overlap = overlap
        self._kernels: dict[Any, FastKernel] = {}

    def decode(
        self, call: Call, tiling: tuning.Tiling, num_rows: int, queries: int, partial: bool
    ) -> FastKernel:
        varlen = call.query_start_loc is not None
        key = (tiling, num_rows, queries, varlen, partial, _cache_key(call))
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = FastKernel(
                kernels.decode,
                {
                    **self._attend(call, tiling, num_rows, queries),
                    "VARLEN": varlen,
                    "PARTIAL": partial,
                    "OVERLAP": partial and self._overlap,
                },
                _options(tiling),
            )
        return found

    def prefill(self, call: Call, tiling: tuning.Tiling, queries: int) -> FastKernel:
        key = (tiling, queries, _cache_key(call))
        found = self._kernels.get(key)
        if found is None:
            num_rows = tuning.rows(self._problem.group, queries)
            constants = self._attend(call, tiling, num_rows, queries)
            found = self._kernels[key] = FastKernel(kernels.prefill, constants, _options(tiling))
        return found

    def merge(self, lanes: int, dims: int, tile: int, varlen: bool) -> FastKernel:
        key = (lanes, dims, tile, varlen)
        found = self._kernels.get(key)
        if found is None:
            p = self._problem
            constants = {
                "NUM_HEADS": p.num_heads, "TILE": tile, "D": p.head_dim, "DIMS": dims,
                "SPLITS": lanes, "VARLEN": varlen, "HAS_WINDOW": p.window, "HAS_SINKS": p.sinks,
                "HAS_LSE": p.return_lse, "OVERLAP": self._overlap,
            }  # fmt: skip
            options = {"num_warps": 4} | ({"launch_pdl": True} if self._overlap else {})
            found = self._kernels[key] = FastKernel(kernels.merge, constants, options)
        return found

    def _attend(
        self, call: Call, tiling: tuning.Tiling, num_rows: int, queries: int
    ) -> dict[str, Any]:
        """The constants that the decode and the prefill kernel share."""
        p = self._problem
        return {
            "NUM_HEADS": p.num_heads, **cache_strides(call), "BLOCK_SIZE": p.block_size,
            "TILE": tiling.tile, "D": p.head_dim, "D_PAD": tuning.padded(p.head_dim),
            "GROUP": p.group, "ROWS": num_rows, "TILE_QUERIES": queries,
            "HAS_WINDOW": p.window, "HAS_SOFTCAP": p.softcap, "HAS_ALIBI": p.alibi,
            "HAS_SINKS": p.sinks, "K_SCALES": _count(call.k_scale),
            "V_SCALES": _count(call.v_scale), "HAS_LSE": p.return_lse,
            "V_RUN": value_run(call, tiling.tile), "DOT_TYPE": _DOT_TYPES[p.dtype],
            "K_PARTS": tiling.key_parts, "CHUNKS": tiling.chunks,
            "WORDS": tiling.words and takes_words(call),
        }  # fmt: skip


def _cache_key(call: Call) -> tuple[Any, ...]:
    """What `_attend` reads of a call."""
    values = call.value_cache
    return (
        call.key_cache.stride(), values.stride(), call.key_cache.data_ptr() % 2,
        values.data_ptr() % 16,
        _count(call.k_scale), _count(call.v_scale),
    )  # fmt: skip


def _options(tiling: tuning.Tiling) -> dict[str, int]:
    return {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}


def _count(scale: float | Tensor | None) -> int:
    """How many elements a scale tensor has; 0 for a number or none."""
    return scale.numel() if isinstance(scale, Tensor) else 0
