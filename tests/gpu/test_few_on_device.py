"""On a GPU: calls of few query tokens a sequence are `cuda`'s, and the others `triton`'s."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from _places import every_layout

import pagedattn
from pagedattn import hard_problems, registry, verify
from pagedattn.backends.protocol import KVLayout, Problem, ServesFew
from pagedattn.probe import facts

pytestmark = pytest.mark.gpu
HALF = torch.float16
CLASS = Problem("cuda:0", HALF, HALF, 24, 4, 256, 16, varlen_query=True)


@every_layout
@pytest.mark.parametrize("count", [1, 2, 4, 5, 17])
def test_a_captured_call_is_one_backends_whole(layout: KVLayout, count: int) -> None:
    cuda, problem = registry.get("cuda"), replace(CLASS, kv_layout=layout)
    assert isinstance(cuda, ServesFew)
    if absent := cuda.not_present_reasons(facts()):
        pytest.skip("; ".join(absent))
    limit = cuda.few_queries(problem, facts())
    if limit == 0:
        pytest.skip("there is no tuned kernel for this device")
    binding = pagedattn.bind("cuda:0", kv_layout=layout, varlen_query=True, dtype=HALF)
    assert binding.parts == {"few": "cuda", "more": "triton"}, binding.candidates
    assert binding.few_queries == limit
    call = hard_problems.make_call(replace(problem, few_queries=count))
    call.plans = {}
    binding.run(replace(call))
    runners = {type(key[0]).__name__ for key in call.plans}
    assert runners == {"CudaRunner" if count <= limit else "TritonRunner"}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run(replace(call))
    call.out.fill_(math.nan)
    graph.replay()
    error, _ = verify.errors(call, verify.oracle(call, problem))
    assert error <= verify.TOLERANCE[HALF]
