"""The calls that prove the backend for few query tokens a sequence, on the emulated kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from _emulation import TUNED_ALONE, Libraries, tuned

from pagedattn import verify
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.cuda.partition import SHARING_ROWS
from pagedattn.backends.protocol import Call, KVLayout, Problem

HALF = torch.float16
BASE = Problem("cpu", HALF, HALF, 6, 1, 64, 16, varlen_query=True, return_lse=True)


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("group", [3, 6, 8])
def test_the_tuned_kernels_pass_it(libraries: Libraries, layout: KVLayout, group: int) -> None:
    problem = replace(
        BASE, num_heads=group, kv_layout=layout, few_queries=SHARING_ROWS // group, sinks=True
    )
    library = libraries.of(problem, *tuned(90), "-O1", source=TUNED_ALONE)
    library.emulation_capability(9)
    runner = CudaRunner(library, problem)

    def run(call: Call) -> None:
        assert runner.tuned(call) == 0

    verdict = verify.judge(run, problem)
    assert verdict.outcome == "ok", verdict.detail
