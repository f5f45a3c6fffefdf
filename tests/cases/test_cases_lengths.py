"""Faults of length: nothing, far too much, and neighbours that differ wildly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _judge import assert_right
from _places import Place, every_dtype, every_layout, every_place
from _scene import Scene, make_scene, run

from pagedattn.backends.protocol import KVLayout


@every_place
@every_layout
@every_dtype
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_case_03_length_zero_gives_zeros_and_minus_infinity(
    place: Place, layout: KVLayout, dtype: torch.dtype, sinks: bool
) -> None:
    """Its neighbour is what it is alone."""
    features: dict[str, Any] = {"sinks": torch.randn(6)} if sinks else {}
    scene = make_scene([0, 5], dtype=dtype, **features)
    result = run(scene, place, layout)
    assert bool((result.out[0] == 0).all())
    assert bool((result.lse[0] == -math.inf).all())
    assert_right(result, scene)


@every_place
def test_case_03_a_batch_of_nothing_but_padding_rows(place: Place) -> None:
    scene = make_scene([0, 0, 0], sinks=torch.randn(6))
    assert_right(run(scene, place), scene)


@every_place
@every_layout
def test_case_03_query_tokens_that_see_no_key(place: Place, layout: KVLayout) -> None:
    """More query tokens than length, a sequence without query tokens, tokens of nobody."""
    scene = make_scene([0, 2, 9, 20], query_lens=[3, 5, 0, 2], sinks=torch.randn(6))
    paged = scene.page(layout, device=place.device)
    starts = torch.tensor(scene.starts, dtype=torch.int32)
    scene.query = torch.cat([scene.query, torch.randn(4, 6, 64)])
    result = run(scene, place, paged=paged, query_start_loc=starts)
    assert_right(result, scene)
    assert bool((result.out[-4:] == 0).all())


@every_place
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_case_04_large_heads_in_every_block_size(
    place: Place, block_size: int, dtype: torch.dtype, layout: KVLayout
) -> None:
    scene = make_scene([1, 700], heads=6, kv_heads=1, head_dim=256, dtype=dtype)
    assert_right(run(scene, place, layout, block_size), scene)


@every_place
@pytest.mark.parametrize("length", [16_384, 100_000])
def test_case_04_long_contexts_with_large_heads(place: Place, length: int) -> None:
    if place.backend == "reference" and length > 20_000:
        pytest.skip("the oracle's long run would show nothing of a backend")
    scene = make_scene([length], heads=2, kv_heads=1, head_dim=256, dtype=torch.float16)
    paged = scene.page("packed", device=place.device)
    assert_right(run(scene, place, paged=paged), scene)


@every_place
@every_dtype
def test_case_13_splits_follow_the_length_and_not_the_capacity(
    place: Place, dtype: torch.dtype
) -> None:
    """A table for 128K tokens, with the hint, without it, and in one split."""
    scene = make_scene([1, 40], dtype=dtype)
    paged = scene.page(columns=8192, device=place.device)
    hints: list[dict[str, Any]] = [
        {},
        {"max_seq_len": 40},
        {"max_seq_len": 131_072},
        {"num_splits": 1},
    ]
    for options in hints:
        assert_right(run(scene, place, paged=paged, **options), scene)


@every_place
@every_layout
@pytest.mark.parametrize("num_splits", [1, 2, 3, 16, 1000])
def test_case_13_any_number_of_splits_is_right(
    place: Place, layout: KVLayout, num_splits: int
) -> None:
    """More splits than blocks leave some with nothing to see."""
    scene = make_scene([1, 40, 0, 333])
    result = run(scene, place, layout, num_splits=num_splits)
    assert_right(result, scene, merges=min(num_splits, 333))


@every_place
@every_layout
@every_dtype
def test_case_26_lengths_that_differ_wildly(
    place: Place, layout: KVLayout, dtype: torch.dtype
) -> None:
    scene = make_scene([1, 9000, 16, 0, 17], heads=2, kv_heads=1, dtype=dtype)
    assert_right(run(scene, place, layout), scene)


@every_place
def test_case_26_one_sequence_of_100000_among_short_ones(place: Place) -> None:
    """Each row as if alone."""
    scene = make_scene([1, 100_000, 16, 0, 17], heads=2, kv_heads=1, dtype=torch.float16)
    result = run(scene, place, "packed")
    assert_right(result, scene)
    for row in (0, 2, 4):
        alone = run(scene.only(row), place, "packed")
        assert_right(alone, scene.only(row))
        assert torch.allclose(alone.out[0], result.out[row], rtol=1e-3, atol=1e-3)


@every_place
@every_layout
@every_dtype
@pytest.mark.parametrize("query_len", [None, 1, 3], ids=["decode", "chunk1", "chunk3"])
def test_case_21_the_batch_around_a_sequence_changes_no_bit(
    place: Place, layout: KVLayout, dtype: torch.dtype, query_len: int | None
) -> None:
    """Alone and as the 38th of 64, in other pages, with a wider table and longer neighbours."""
    lengths = torch.randint(1, 80, (64,)).tolist()
    lengths[37], lengths[5] = 77, 700
    query_lens = None if query_len is None else [query_len] * 64
    crowd = make_scene(lengths, dtype=dtype, query_lens=query_lens)
    alone = crowd.only(37)
    among = run(crowd, place, layout, batch_invariant=True)
    by_itself = run(alone, place, layout, batch_invariant=True)
    rows = slice(crowd.starts[37], crowd.starts[38])
    assert torch.equal(among.out[rows], by_itself.out)
    assert torch.equal(among.lse[rows], by_itself.lse)
    assert_right(among, crowd)


@every_place
@every_layout
def test_mixed_prefill_chunks_and_decode_rows_in_one_call(place: Place, layout: KVLayout) -> None:
    """Whole prompts, chunks of later tokens, speculative tokens and single rows."""
    for dtype in (torch.float32, torch.float16):
        scene = make_scene([40, 100, 33, 1, 18], query_lens=[40, 30, 1, 1, 4], dtype=dtype)
        assert_right(run(scene, place, layout), scene)


@every_place
def test_a_hint_of_the_longest_query_changes_nothing(place: Place) -> None:
    scene = make_scene([40, 33], query_lens=[5, 2])
    for hint in (5, 7, 1000):
        assert_right(run(scene, place, max_query_len=hint), scene)


@every_place
def test_a_scene_of_no_sequences_gives_empty_results(place: Place) -> None:
    scene = make_scene([5, 6])
    paged = scene.page(device=place.device)
    paged.block_tables, paged.seq_lens = paged.block_tables[:0], paged.seq_lens[:0]
    empty = Scene(scene.query[:0], [], [], scene.kv_dtype)
    result = run(empty, place, paged=paged)
    assert result.out.shape == (0, 6, 64)
    assert result.lse.shape == (0, 6)
