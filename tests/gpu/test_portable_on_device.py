"""The portable kernels on hard problems, on a GPU that would be given the tuned ones too.

The emulation shows what the sources say; only a GPU shows what a compiler made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _on_device import loaded
from _places import every_layout

from pagedattn import verify
from pagedattn.backends.cuda.abi import require_success
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, Problem

pytestmark = pytest.mark.gpu
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
CLASSES = [
    (HALF, HALF, 256, 6, 16),
    (HALF, E4M3, 256, 6, 16),
    (BF16, BF16, 128, 4, 16),
    (BF16, INT8, 80, 7, 24),
    (HALF, E5M2, 64, 1, 32),
    (HALF, HALF, 32, 8, 8),
    (BF16, BF16, 96, 5, 144),
    (HALF, HALF, 40, 12, 16),
    (FP32, FP32, 64, 3, 16),
    (FP32, INT8, 128, 2, 64),
]
FEATURES: dict[str, dict[str, Any]] = {
    "decode": {},
    "invariant": {"batch_invariant": True},
    "all": {"varlen_query": True, "window": True, "softcap": True, "alibi": True, "sinks": True},
}


def _running(runner: CudaRunner, launch: Callable[[Call], int]) -> Callable[[Call], None]:
    return lambda call: require_success(runner._library, launch(call))


@every_layout
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "group", "block_size"),
    CLASSES,
    ids=["-".join(str(x).removeprefix("torch.") for x in c) for c in CLASSES],
)
def test_hard_problems(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int, block_size: int,
    features: str, layout: Any, pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    sizes = (2 * group, 2, head_dim, block_size)
    problem = Problem("cuda:0", dtype, kv_dtype, *sizes, return_lse=True, kv_layout=layout)
    problem = replace(problem, **FEATURES[features])
    runner = loaded(problem, pytestconfig)
    verdict = verify.judge(_running(runner, runner.portable), problem)
    assert verdict.outcome == "ok", verdict.detail
