"""On a GPU of sm_90: partitions that their own blocks merge, as a cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from _emulated_calls import long_call
from _on_device import loaded
from _places import every_layout
from torch import Tensor

from pagedattn import verify
from pagedattn.backends.cuda.abi import require_success
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.hard_problems import on_device

pytestmark = pytest.mark.gpu
HALF, E4M3 = torch.float16, torch.float8_e4m3fn


def _results(runner: CudaRunner, call: Call) -> tuple[Tensor, Tensor]:
    """Of one more run, into tensors that hold NaN."""
    assert call.lse is not None
    again = replace(call, out=torch.full_like(call.out, math.nan), lse=call.lse.clone())
    assert again.lse is not None
    again.lse.fill_(math.nan)
    require_success(runner._library, runner.tuned(again))
    return again.out, again.lse


@every_layout
@pytest.mark.parametrize("kv_dtype", [HALF, E4M3], ids=["fp16", "e4m3"])
@pytest.mark.parametrize(
    "lengths",
    [[1024], [1, 0, 1017], [700, 16, 33, 1024] * 2, [500] * 16, [4000, 1, 4096, 2049]],
    ids=["one", "three", "eight", "sixteen", "longer"],
)
def test_results_are_right_and_the_same_bits_each_time(
    lengths: list[int],
    kv_dtype: torch.dtype,
    layout: KVLayout,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem("cuda:0", HALF, kv_dtype, 24, 4, 256, 16, layout, return_lse=True)
    runner = loaded(problem, pytestconfig)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only sm_90 has kernels that form clusters")
    call = on_device(long_call(problem, lengths), problem.device)
    if not runner._plan(call, "tuned").params.clustered:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        assert len(lengths) > 1 or processors < 100, "a whole device has room for four clusters"
        pytest.skip("this device has no room for so many clusters, or they are no faster")
    first, lse = _results(runner, call)
    for _ in range(100):
        again = _results(runner, call)
        assert torch.equal(again[0], first)
        assert torch.equal(again[1], lse)
    call.out.copy_(first)
    assert call.lse is not None
    call.lse.copy_(lse)
    error, lse_error = verify.errors(call, verify.oracle(call, problem))
    assert error <= verify.TOLERANCE[HALF] / 2
    assert lse_error <= 1e-4
    monkeypatch.setattr(CudaRunner, "_clustered", lambda *_: None)
    merged, _ = _results(runner, call)
    torch.testing.assert_close(first, merged, rtol=0, atol=2e-3)
