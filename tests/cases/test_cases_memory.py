"""Faults of addressing: what lies beside the tokens, and where they lie."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from _judge import assert_right
from _places import Place, every_dtype, every_layout, every_place
from _scene import INT_MAX, Paged, Scene, arrange_keys, arrange_values, make_scene, run
from torch import Tensor

from pagedattn.backends.protocol import KVLayout


def _untouched_memory(elements: int) -> Tensor:
    """fp16 memory that takes room only where it is written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


@every_place
@every_layout
def test_case_01_block_offsets_do_not_overflow_32_bits(place: Place, layout: KVLayout) -> None:
    """Ids whose element offset is beyond 2^31 give the bits that low ids give."""
    if place.device != "cpu":
        pytest.skip("on a GPU this takes real memory: tests/gpu")
    scene = make_scene([33], heads=8, kv_heads=8, head_dim=256, dtype=torch.float16)
    low = scene.page(layout, spare=2)
    high = [2**31 // (8 * 256 * 16) + i for i in (0, 1, 3)]  # 65,536 and more
    big = []
    for cache in (low.key_cache, low.value_cache):
        shape = (high[-1] + 1, *cache.shape[1:])
        memory = _untouched_memory(math.prod(shape)).view(shape)
        for new, old in zip(high, low.block_tables[0, :3].tolist(), strict=True):
            memory[new] = cache[old]
        big.append(memory)
    tables = torch.tensor([[*high, -1]], dtype=torch.int32)
    far = run(scene, place, paged=Paged(big[0], big[1], tables, low.seq_lens, layout))
    near = run(scene, place, paged=low)
    assert torch.equal(far.out, near.out)
    assert torch.equal(far.lse, near.lse)
    assert_right(far, scene)


@every_place
@every_layout
@every_dtype
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_case_02_poison_behind_the_last_token_does_not_leak(
    place: Place, layout: KVLayout, dtype: torch.dtype, block_size: int
) -> None:
    """Block 0, unused blocks and the last block's tail may hold anything: same bits."""
    lengths = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1]
    scene = make_scene(lengths, dtype=dtype)
    order = torch.random.get_rng_state()
    results = []
    for poison in (0.0, math.nan, math.inf, -math.inf):
        torch.random.set_rng_state(order)  # the same blocks each time
        paged = scene.page(layout, block_size, poison=poison, device=place.device)
        results.append(run(scene, place, paged=paged))
    assert_right(results[0], scene)
    for poisoned in results[1:]:
        assert torch.equal(poisoned.out, results[0].out)
        assert torch.equal(poisoned.lse, results[0].lse)


@every_place
@every_layout
@pytest.mark.parametrize("head_dim", [8, 72, 80, 96, 112, 120, 192])
def test_case_06_head_sizes_that_are_no_power_of_two(
    place: Place, layout: KVLayout, head_dim: int
) -> None:
    """Exact, with NaN behind each head's last element, in the query and in the caches."""
    dtype = torch.float16
    scene = make_scene([1, 17, 40], head_dim=head_dim, dtype=dtype)
    room = 256
    wide = Scene(
        _widen(scene.query, room),
        [_widen(t, room) for t in scene.keys],
        [_widen(t, room) for t in scene.values],
        dtype,
    )
    paged = wide.page(layout, device=place.device)
    if layout == "packed":
        paged.key_cache = paged.key_cache[:, :, : head_dim // 8]
        paged.value_cache = paged.value_cache[:, :, :head_dim]
    else:
        paged.key_cache = paged.key_cache[..., :head_dim]
        paged.value_cache = paged.value_cache[..., :head_dim]
    query = wide.query.to(place.device)[..., :head_dim]
    out = torch.full_like(wide.query, math.nan, device=place.device)
    result = run(scene, place, paged=paged, query=query, out=out[..., :head_dim])
    assert_right(result, scene)
    assert bool(out[..., head_dim:].isnan().all())


def _widen(t: Tensor, room: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, room - t.shape[-1]), value=math.nan)


@every_place
@every_dtype
def test_case_07_query_cut_out_of_a_fused_projection(place: Place, dtype: torch.dtype) -> None:
    scene = make_scene([1, 17, 40], dtype=dtype)
    fused = torch.full((3, 6 + 2 + 2, 64), math.nan, dtype=dtype, device=place.device)
    query = fused[:, :6]
    query.copy_(scene.query)
    assert not query.is_contiguous()
    assert_right(run(scene, place, query=query), scene)


@every_place
def test_case_07_query_and_out_with_heads_outermost(place: Place) -> None:
    scene = make_scene([1, 17, 40])
    query = scene.query.to(place.device).transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.full((6, 3, 64), math.nan, device=place.device).transpose(0, 1)
    result = run(scene, place, query=query, out=out)
    assert_right(result, scene)


@every_place
@every_dtype
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("where", ["beside the blocks", "beside the tokens", "beside the heads"])
def test_case_07_keys_and_values_interleaved_in_one_buffer(
    place: Place, dtype: torch.dtype, layout: KVLayout, where: str
) -> None:
    """One pool for K and V: by block, or head_dim by head_dim (a token stride twice as long)."""
    scene = make_scene([1, 17, 40], dtype=dtype)
    paged = scene.page(layout, device=place.device)
    dim = {"beside the blocks": 1, "beside the tokens": 3, "beside the heads": 2}[where]
    pool = torch.stack([paged.key_cache, paged.value_cache], dim=dim)
    paged.key_cache, paged.value_cache = pool.unbind(dim)
    assert not paged.key_cache.is_contiguous()
    assert_right(run(scene, place, paged=paged), scene)


@every_place
@every_layout
def test_case_07_one_layer_of_a_cache_for_all_layers(place: Place, layout: KVLayout) -> None:
    """The block stride is many times a block, and differs between K and V."""
    scene = make_scene([1, 17, 40], dtype=torch.float16)
    paged = scene.page(layout, device=place.device)
    paged.key_cache = _layer_of_many(paged.key_cache, 3)
    paged.value_cache = _layer_of_many(paged.value_cache, 5)
    assert_right(run(scene, place, paged=paged), scene)


def _layer_of_many(cache: Tensor, layers: int) -> Tensor:
    pool = torch.full((cache.shape[0], layers, *cache.shape[1:]), math.nan, dtype=cache.dtype)
    pool = pool.to(cache.device)
    pool[:, 1] = cache
    return pool[:, 1]


@every_place
def test_case_07_a_table_that_is_a_view_of_a_larger_one(place: Place) -> None:
    scene = make_scene([1, 17, 40])
    paged = scene.page(device=place.device)
    larger = torch.full((3, 100), INT_MAX, dtype=torch.int32, device=place.device)
    larger[:, : paged.block_tables.shape[1]] = paged.block_tables
    paged.block_tables = larger[:, : paged.block_tables.shape[1]]
    assert_right(run(scene, place, paged=paged), scene)


@every_place
@every_layout
@pytest.mark.parametrize("pads", [(-1, INT_MAX), (0,), (-(2**31),), ("one past the last",)])
def test_case_15_padding_entries_are_never_followed(
    place: Place, layout: KVLayout, pads: tuple[Any, ...]
) -> None:
    """Least of all where the length is an exact multiple of the block size."""
    scene = make_scene([16, 32, 48, 0, 17])
    num_blocks = 1 + 2 + 3 + 0 + 2 + 3
    ids = [num_blocks if pad == "one past the last" else pad for pad in pads]
    paged = scene.page(layout, pads=ids, columns=9, device=place.device)
    assert paged.key_cache.shape[0] == num_blocks
    paged.key_cache = _between_canaries(paged.key_cache)
    paged.value_cache = _between_canaries(paged.value_cache)
    assert_right(run(scene, place, paged=paged), scene)


def _between_canaries(cache: Tensor) -> Tensor:
    """The cache inside a larger buffer, so that a read just outside it gives NaN."""
    pool = torch.full((cache.shape[0] + 4, *cache.shape[1:]), math.nan).to(cache)
    pool[2:-2] = cache
    return pool[2:-2]


BAD_IDS = pytest.mark.parametrize("bad", [-1, INT_MAX, -(2**31), "one past the last"])
CHUNKS = pytest.mark.parametrize("query_lens", [None, [1, 3, 2]], ids=["decode", "chunks"])


def _corrupted(
    scene: Scene, layout: KVLayout, place: Place, positions: list[int], bad: int | str
) -> Paged:
    """The scene's cache between canaries, with `bad` at `positions` of the second sequence."""
    paged = scene.page(layout, device=place.device)
    paged.key_cache = _between_canaries(paged.key_cache)
    paged.value_cache = _between_canaries(paged.value_cache)
    paged.block_tables[1, positions] = paged.key_cache.shape[0] if isinstance(bad, str) else bad
    return paged


@every_place
@every_layout
@BAD_IDS
@CHUNKS
def test_case_15_an_id_outside_the_cache_makes_its_own_sequence_nan(
    place: Place, layout: KVLayout, bad: int | str, query_lens: list[int] | None
) -> None:
    """In any block of the sequence; the neighbours are untouched."""
    for position in (0, 1, 2):
        scene = make_scene([20, 40, 33], query_lens=query_lens)
        paged = _corrupted(scene, layout, place, [position], bad)
        assert_right(run(scene, place, paged=paged), scene, nan_sequences=[1])


@every_place
@every_layout
@pytest.mark.parametrize("position", [0, 5, 9])
def test_case_15_an_id_outside_the_cache_makes_a_long_chunk_nan_whole(
    place: Place, layout: KVLayout, position: int
) -> None:
    """Also the query tokens that stand before the block."""
    scene = make_scene([20, 150, 33], query_lens=[1, 140, 2])
    paged = _corrupted(scene, layout, place, [position], -1)
    assert_right(run(scene, place, paged=paged), scene, nan_sequences=[1])


@every_place
@every_layout
@BAD_IDS
@CHUNKS
def test_case_15_ids_wholly_behind_the_window_are_never_followed(
    place: Place, layout: KVLayout, bad: int | str, query_lens: list[int] | None
) -> None:
    """An engine may have freed those blocks; the first one in sight counts again."""
    scene = make_scene([20, 100, 33], query_lens=query_lens, window=20)
    # the first token stands at 99 or 97 and sees back to 80 or 78: blocks 5 and 6, or 4 to 6
    first = 5 if query_lens is None else 4
    paged = _corrupted(scene, layout, place, list(range(first)), bad)
    assert_right(run(scene, place, paged=paged), scene)
    paged = _corrupted(scene, layout, place, [first], bad)
    assert_right(run(scene, place, paged=paged), scene, nan_sequences=[1])


@every_place
@every_layout
@CHUNKS
def test_case_02_what_lies_wholly_behind_the_window_does_not_leak(
    place: Place, layout: KVLayout, query_lens: list[int] | None
) -> None:
    scene = make_scene([20, 100, 33], query_lens=query_lens, window=20)
    stale = replace(scene, keys=list(scene.keys), values=list(scene.values))
    for tensors in (stale.keys, stale.values):
        tensors[1] = tensors[1].clone()
        tensors[1][:64] = math.nan
    for tensors in (scene.keys, scene.values):
        tensors[1][:64] = 0.0  # seen by nobody, and finite for the judge
    assert_right(run(scene, place, paged=stale.page(layout, device=place.device)), scene)


@every_place
@every_layout
@pytest.mark.parametrize("num_splits", [None, 1, 7])
def test_case_20_nothing_is_written_but_the_results(
    place: Place, layout: KVLayout, num_splits: int | None
) -> None:
    """Canaries around `out` and every input, for the default and for odd splits."""
    scene = make_scene([1, 300, 0, 65], dtype=torch.float16)
    paged = scene.page(layout, poison=7.0, device=place.device)
    guarded = {name: _guard(t) for name, t in vars(paged).items() if isinstance(t, Tensor)}
    for name, (_, inside) in guarded.items():
        setattr(paged, name, inside)
    query_memory, query = _guard(scene.query.to(place.device))
    out_memory, out = _guard(torch.zeros_like(query))
    inputs = [query_memory, *(memory for memory, _ in guarded.values())]
    before = [memory.clone() for memory in inputs]
    result = run(scene, place, paged=paged, query=query, out=out, num_splits=num_splits)
    assert_right(result, scene)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert bool((out_memory[:64] == 77).all())
    assert bool((out_memory[-64:] == 77).all())


def _guard(t: Tensor) -> tuple[Tensor, Tensor]:
    """(memory with canaries at both ends, a copy of `t` in its middle)."""
    memory = torch.full((t.numel() + 128,), 77, dtype=t.dtype, device=t.device)
    inside = memory[64:-64].view(t.shape)
    inside.copy_(t)
    return memory, inside


@every_place
@every_layout
@every_dtype
@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 256])
def test_any_block_size_serves(
    place: Place, layout: KVLayout, dtype: torch.dtype, block_size: int
) -> None:
    scene = make_scene([1, 17, 300], dtype=dtype)
    assert_right(run(scene, place, layout, block_size), scene)


def test_the_two_arrangements_of_a_cache_hold_each_element_where_the_layout_says() -> None:
    """The tests' own paging, element by element."""
    dense = torch.arange(2.0 * 4 * 3 * 8).view(2, 4, 3, 8)  # [n, bs, kv, D], fp32: x = 4
    keys, values = arrange_keys(dense, "packed"), arrange_values(dense, "packed")
    for n, s, h, d in ((0, 0, 0, 0), (1, 2, 1, 5), (1, 3, 2, 7)):
        assert keys[n, h, d // 4, s, d % 4] == values[n, h, d, s] == dense[n, s, h, d]
        assert arrange_keys(dense, "HND")[n, h, s, d] == dense[n, s, h, d]
