"""The cache write on a GPU, whichever implementation the chain has for it, and shared calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from _places import every_layout

import pagedattn
from pagedattn import hard_problems, hard_writes, registry, use_backend, verify, writers
from pagedattn.backends import kv_write
from pagedattn.backends.protocol import KVLayout, Problem
from pagedattn.composition import Composed
from pagedattn.probe import facts

pytestmark = pytest.mark.gpu
HALF = torch.float16
CLASS = Problem("cuda:0", HALF, HALF, 24, 4, 256, 16)
WRITE = replace(CLASS, num_heads=4)


@every_layout
@pytest.mark.parametrize("scales", ["none", "per_head"])
@pytest.mark.parametrize("chain", ["torch", "cuda"])
def test_it_writes_what_torch_writes_on_a_cpu(layout: KVLayout, scales: Any, chain: str) -> None:
    problem = replace(WRITE, kv_layout=layout, kv_scales=scales)
    with use_backend(chain):
        writer = writers.writer_for(problem)
    assert hard_writes.judge(writer, problem)[0] == "ok"


@every_layout
@pytest.mark.parametrize("chain", ["torch", "cuda"])
def test_a_captured_write_follows_the_slots_of_the_replay(layout: KVLayout, chain: str) -> None:
    w = hard_writes.make_write(replace(WRITE, kv_layout=layout))
    arguments = w._asdict()
    with use_backend(chain):
        pagedattn.write_kv(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pagedattn.write_kv(**arguments)
    w.slot_mapping.copy_(w.slot_mapping.flip(0))
    for cache in (w.key_cache, w.value_cache):
        cache.zero_()
    right = hard_writes.on_device(w, "cpu")
    kv_write.write(right)
    graph.replay()
    assert torch.equal(w.key_cache.cpu(), right.key_cache)
    assert torch.equal(w.value_cache.cpu(), right.value_cache)


@every_layout
@pytest.mark.parametrize("chain", ["cuda,torch", "cuda,triton,torch"])
def test_a_captured_call_that_two_backends_share(layout: KVLayout, chain: str) -> None:
    """Sequences that are short when it is captured are long in a replay."""
    if absent := registry.get("cuda").not_present_reasons(facts()):
        pytest.skip("; ".join(absent))
    problem = replace(CLASS, kv_layout=layout, varlen_query=True)
    binding = pagedattn.bind(
        "cuda:0", kv_layout=layout, varlen_query=True, dtype=HALF, backend=chain
    )
    assert isinstance(binding.runner, Composed), binding.candidates
    call = replace(
        hard_problems.make_call(replace(problem, query_part="long")),
        query_part="all", max_query_len=64,
    )  # fmt: skip
    starts = call.query_start_loc
    assert starts is not None
    mixed = starts.clone()
    starts.copy_(torch.arange(len(starts), device="cuda"))  # one query token each
    binding.run(replace(call))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run(replace(call))
    for now in (starts.clone(), mixed):
        starts.copy_(now)
        call.out.fill_(math.nan)
        graph.replay()
        error, _ = verify.errors(call, verify.oracle(call, problem))
        assert error <= verify.TOLERANCE[HALF]
