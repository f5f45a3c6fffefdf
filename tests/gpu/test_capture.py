"""What only a GPU shows: captured graphs, streams, real 32-bit offsets, TF32.

One process holds the device for all of it; nothing here needs more than 20 GB.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _judge import assert_right, truth
from _places import PLACES, every_dtype, every_layout
from _scene import INT_MAX, Paged, Result, Scene, make_scene, run
from torch import Tensor

import pagedattn
from pagedattn.backends.protocol import KVLayout

pytestmark = pytest.mark.gpu

_GPU = [p for p in PLACES if p.device == "cuda"]
# without a GPU one placeholder remains, so that the report counts what was skipped
every_gpu_place = pytest.mark.parametrize("place", _GPU or [None], ids=lambda p: p and p.backend)


class Static:
    """Tensors at fixed addresses, as a captured decode step has them: 4 sequences, 4096 each."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype) -> None:
        self.scene = make_scene([4096] * 4, heads=24, kv_heads=4, head_dim=256, dtype=dtype)
        self.paged = self.scene.page(layout, device="cuda")
        self.query = self.scene.query.cuda()
        self.out = torch.full_like(self.query, math.nan)
        self.table = self.paged.block_tables.clone()

    def call(self, place: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = {**vars(self.paged), "backend": place.backend, **options}
        out, lse = pagedattn.paged_attention(self.query, out=self.out, return_lse=True, **given)
        return out, lse

    def set_lengths(self, lengths: list[int]) -> Scene:
        """New lengths, padding behind them, in the same memory; the scene that is right now."""
        self.paged.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.paged.block_tables.copy_(self.table)
        for row, length in enumerate(lengths):
            self.paged.block_tables[row, -(-length // 16) :] = INT_MAX
        return Scene(
            self.scene.query,
            [t[:n] for t, n in zip(self.scene.keys, lengths, strict=True)],
            [t[:n] for t, n in zip(self.scene.values, lengths, strict=True)],
            self.scene.kv_dtype,
        )

    def capture(self, place: Any, **options: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.call(place, **options)  # binds, and allocates what is kept
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, lse = self.call(place, **options)
        return graph, lse


REPLAYS = [[4096] * 4, [1] * 4, [0] * 4, [17, 0, 4095, 1], [16, 32, 48, 4096], [16] * 4]


@every_gpu_place
@every_layout
@every_dtype
@pytest.mark.parametrize("hint", [None, 4096], ids=["", "hint"])
def test_case_14_a_replay_follows_the_lengths_of_the_replay(
    place: Any, layout: KVLayout, dtype: torch.dtype, hint: int | None
) -> None:
    """Captured at 16; at 4096, 1, 0 and mixtures it equals the eager call, bit by bit."""
    static = Static(layout, dtype)
    static.set_lengths([16] * 4)
    graph, lse = static.capture(place, max_seq_len=hint)
    for lengths in REPLAYS:
        scene = static.set_lengths(lengths)
        static.out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        replayed = Result(static.out.cpu(), lse.cpu())
        assert_right(replayed, scene)
        static.out.fill_(math.nan)
        out, eager_lse = static.call(place, max_seq_len=hint)
        assert torch.equal(replayed.out, out.cpu())
        assert torch.equal(replayed.lse, eager_lse.cpu())


@every_gpu_place
def test_case_14_a_replay_follows_tables_queries_and_cache(place: Any) -> None:
    """Sequences moved to other blocks between replays; a bad id is NaN and then heals."""
    static = Static("packed", torch.float16)
    graph, lse = static.capture(place)
    order = torch.tensor([2, 3, 0, 1])
    static.paged.block_tables.copy_(static.table[order.cuda()])
    moved = Scene(
        static.scene.query,
        [static.scene.keys[i] for i in order],
        [static.scene.values[i] for i in order],
        static.scene.kv_dtype,
    )
    graph.replay()
    assert_right(Result(static.out.cpu(), lse.cpu()), moved)
    static.paged.block_tables[1, 3] = -1
    graph.replay()
    assert_right(Result(static.out.cpu(), lse.cpu()), moved, nan_sequences=[1])
    static.set_lengths([4096] * 4)
    graph.replay()
    assert_right(Result(static.out.cpu(), lse.cpu()), static.scene)


@every_gpu_place
@every_layout
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 100},
        {"softcap": 5.0, "num_splits": 7},
        {"k_scale": 0.5, "v_scale": 2.0},
        {"batch_invariant": True},
        {"sinks": torch.zeros(24), "alibi_slopes": torch.full((24,), 0.01)},
    ],
    ids=lambda f: "-".join(f) or "plain",
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_case_16_a_warm_call_does_not_synchronise(
    place: Any, layout: KVLayout, features: dict[str, Any]
) -> None:
    """torch's own check raises at a synchronisation; a capture would fail at it as well."""
    static = Static(layout, torch.float16)
    options = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in features.items()}
    graph, _ = static.capture(place, **options)
    graph.replay()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        static.call(place, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_gpu_place
def test_case_16_chunks_and_the_write_are_captured_too(place: Any) -> None:
    scene = make_scene([40, 300, 7], query_lens=[5, 33, 7], dtype=torch.float16)
    paged = scene.page("packed", device="cuda")
    starts = torch.tensor(scene.starts, dtype=torch.int32, device="cuda")
    query = scene.query.cuda()
    key, value = scene.keys[0][-1:].half().cuda(), scene.values[0][-1:].half().cuda()
    slot = paged.block_tables[0, 2:3].long() * 16 + 7  # token 39 of the first sequence
    given = {**vars(paged), "query_start_loc": starts, "backend": place.backend}

    def step() -> tuple[Tensor, Tensor]:
        pagedattn.write_kv(key, value, paged.key_cache, paged.value_cache, slot)
        out, lse = pagedattn.paged_attention(query, return_lse=True, **given)
        return out, lse

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for cache in (paged.key_cache, paged.value_cache):
        block = cache[int(paged.block_tables[0, 2])]
        block[..., 7, :].fill_(math.nan) if cache.dim() == 5 else block[..., 7].fill_(math.nan)
    graph.replay()
    assert_right(Result(out.cpu(), lse.cpu()), scene)


@every_gpu_place
@every_layout
def test_case_01_block_offsets_beyond_32_bits_in_real_memory(place: Any, layout: KVLayout) -> None:
    """4.3 GB of keys and as much of values, all NaN but the last blocks: same bits as low ids."""
    scene = make_scene([33, 17], heads=8, kv_heads=8, head_dim=256, dtype=torch.float16)
    low = scene.page(layout, spare=3, device="cuda")
    count = low.key_cache.shape[0]
    first = 2**31 // (8 * 256 * 16) - 1
    big = []
    for cache in (low.key_cache, low.value_cache):
        shape = (first + count, *cache.shape[1:])
        memory = torch.full(shape, math.nan, dtype=cache.dtype, device="cuda")
        memory[first:] = cache
        big.append(memory)
    inside = (low.block_tables >= 0) & (low.block_tables < count)
    tables = torch.where(inside, low.block_tables + first, low.block_tables)
    far = run(scene, place, paged=Paged(big[0], big[1], tables, low.seq_lens, layout))
    near = run(scene, place, paged=low)
    assert torch.equal(far.out, near.out)
    assert torch.equal(far.lse, near.lse)
    assert_right(far, scene)


@every_gpu_place
@every_layout
def test_case_19_fp32_is_not_computed_in_tf32(place: Any, layout: KVLayout) -> None:
    """Neither by default nor where the process allows it to everybody; its choice is kept."""
    scene = make_scene([1, 333, 4096], heads=24, kv_heads=4, head_dim=256)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        result = run(scene, place, layout)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    right = truth(scene)
    error = (result.out.double() - right.out).norm(dim=-1) / right.out.norm(dim=-1)
    assert float(error.max()) <= 1e-5


@every_gpu_place
@pytest.mark.parametrize("shape", [(1, 16_384), (64, 1024), (8, 40)], ids=str)
def test_case_18_no_16_bit_sum_on_the_way(place: Any, shape: tuple[int, int]) -> None:
    """Reduced-precision reductions are allowed to the process; values of 6e4 must not overflow."""
    batch, length = shape
    scene = make_scene([length] * batch, kv_heads=1, head_dim=128, dtype=torch.float16)
    for values in scene.values:
        values.copy_((59_000 + 1_000 * torch.rand(values.shape)).half())
    assert_right(run(scene, place, "packed"), scene)


@every_gpu_place
@every_layout
def test_two_streams_at_once_do_not_share_a_workspace(place: Any, layout: KVLayout) -> None:
    """Two batches, again and again on two streams of one process: each equals itself alone."""
    scenes = [make_scene([9000, 17], dtype=torch.float16) for _ in range(2)]
    given = [{"query": s.query.cuda(), **vars(s.page(layout, device="cuda"))} for s in scenes]
    alone = [pagedattn.paged_attention(**g, backend=place.backend).clone() for g in given]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(1000):
        for stream, g, found in zip(streams, given, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(pagedattn.paged_attention(**g, backend=place.backend))
    torch.cuda.synchronize()
    for scene_results, right in zip(results, alone, strict=True):
        for out in scene_results:
            assert torch.equal(out, right)


@every_gpu_place
@every_layout
@pytest.mark.parametrize("query_lens", [None, [4, 1, 3]], ids=["decode", "speculative"])
def test_batch_invariant_results_are_the_same_bits_each_time(
    place: Any, layout: KVLayout, query_lens: list[int] | None
) -> None:
    scene = make_scene([9000, 17, 2049], query_lens=query_lens, dtype=torch.float16)
    given: dict[str, Any] = {**vars(scene.page(layout, device="cuda")), "batch_invariant": True}
    if query_lens is not None:
        given["query_start_loc"] = torch.tensor(scene.starts, dtype=torch.int32, device="cuda")
    query = scene.query.cuda()
    results = [
        pagedattn.paged_attention(query, **given, return_lse=True, backend=place.backend)
        for _ in range(100)
    ]
    torch.cuda.synchronize()
    (out, lse), *others = results
    assert_right(Result(out.cpu(), lse.cpu()), scene)
    for other_out, other_lse in others:
        assert torch.equal(other_out, out)
        assert torch.equal(other_lse, lse)


@every_gpu_place
def test_the_current_stream_is_the_one_that_is_used(place: Any) -> None:
    """Inputs that are still being made on a side stream when the call is queued behind them."""
    scene = make_scene([40, 17], dtype=torch.float16)
    paged = scene.page("packed", device="cuda")
    query = torch.zeros_like(scene.query, device="cuda")
    pagedattn.paged_attention(query, **vars(paged), backend=place.backend)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    source = scene.query.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        query.copy_(source)
        out, lse = pagedattn.paged_attention(
            query, **vars(paged), return_lse=True, backend=place.backend
        )
    stream.synchronize()
    assert_right(Result(out.cpu(), lse.cpu()), scene)


@every_gpu_place
@pytest.mark.parametrize("length", [-5, 2**31 - 1, 0x7FFF7FFF, 100])
def test_garbage_lengths_on_a_device_read_nothing_outside(place: Any, length: int) -> None:
    """Negative counts as empty; beyond the table is NaN; the neighbour is untouched."""
    scene = make_scene([0 if length < 0 else 40, 33], dtype=torch.float16)
    paged = scene.page("packed", columns=4, device="cuda")
    paged.seq_lens[0] = length
    nan = [] if length < 0 else [0]
    assert_right(run(scene, place, paged=paged), scene, nan_sequences=nan)
    torch.cuda.synchronize()
