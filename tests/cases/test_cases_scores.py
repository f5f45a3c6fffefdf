"""Faults of the mathematics: what a score is, who is seen, and what is summed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from _judge import assert_right, truth
from _places import Place, every_dtype, every_kv_dtype, every_layout, every_place
from _scene import Result, Scene, make_scene, run

import pagedattn
from pagedattn.backends.protocol import KVLayout


@every_place
@every_layout
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 2), (24, 4), (15, 5), (34, 2)]
)
def test_query_heads_map_to_their_kv_head(
    place: Place, layout: KVLayout, heads: int, kv_heads: int
) -> None:
    """Each KV head holds its own number as its value: the output names the head that was read."""
    scene = make_scene([1, 20], heads=heads, kv_heads=kv_heads)
    for values in scene.values:
        values[:] = torch.arange(1.0, kv_heads + 1).view(1, -1, 1)
    result = run(scene, place, layout)
    expected = 1 + torch.arange(heads) // (heads // kv_heads)
    assert torch.equal(result.out.round(), expected.view(1, -1, 1).expand_as(result.out).float())
    assert_right(result, scene)


@every_place
@every_dtype
def test_case_09_lse_is_natural_and_a_whole_is_its_halves_merged(
    place: Place, dtype: torch.dtype
) -> None:
    whole = make_scene([0, 1, 40, 333], dtype=dtype)
    cuts = [0, 1, 17, 150]
    halves = [
        replace(
            whole,
            keys=[t[s] for t, s in zip(whole.keys, part, strict=True)],
            values=[t[s] for t, s in zip(whole.values, part, strict=True)],
        )
        for part in ([slice(c) for c in cuts], [slice(c, None) for c in cuts])
    ]
    results = [run(half, place) for half in halves]
    outs, lses = [r.out.float() for r in results], [r.lse for r in results]
    out, lse = pagedattn.merge_states(outs, lses)
    assert_right(run(whole, place), whole)
    assert_right(Result(out.to(dtype), lse), whole)


@every_place
@every_dtype
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_case_10_a_huge_score_is_capped_and_does_not_overflow(
    place: Place, dtype: torch.dtype, sign: float
) -> None:
    """Scores of ±5000 and a cap of 50: with one key, the log-sum-exp is the score."""
    scene = make_scene([1, 40], head_dim=64, dtype=dtype, softcap=50.0, scale=1.0)
    scene.query.fill_(8.0)
    for keys in scene.keys:
        keys.fill_(sign * 5000 / (8 * 64)).copy_(keys.to(dtype))
    result = run(scene, place)
    assert torch.equal(result.lse[0], torch.full((6,), sign * 50.0))
    assert_right(result, scene)


@every_place
@every_layout
@pytest.mark.parametrize("query_lens", [None, [1, 9]], ids=["decode", "chunk"])
def test_case_10_what_is_masked_stays_masked_under_a_cap(
    place: Place, layout: KVLayout, query_lens: list[int] | None
) -> None:
    """Capping after the mask would turn −inf into −cap; scores near −cap make that show."""
    scene = make_scene([17, 40], query_lens=query_lens, softcap=2.0, window=5)
    scene.query.fill_(4.0)
    for keys in scene.keys:
        keys.fill_(-4.0)
    assert_right(run(scene, place, layout), scene)


def _window_scenes(block_size: int) -> list[tuple[int, int]]:
    """(window, length) around each other and around the block."""
    windows = [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size + 3]
    return [(w, n) for w in windows for n in (w - 1, w, w + 1, w + 2 * block_size) if n > 0]


@every_place
@every_layout
@pytest.mark.parametrize("block_size", [8, 16])
def test_case_11_window_sees_exactly_the_last_w_keys(
    place: Place, layout: KVLayout, block_size: int
) -> None:
    """Equal scores and one-hot values: the output is the list of the keys that were seen."""
    for window, length in _window_scenes(block_size):
        scene = make_scene([length], heads=2, kv_heads=1, head_dim=80, window=window)
        scene.query.zero_()
        scene.values[0][:] = torch.eye(length, 80).view(length, 1, 80)
        result = run(scene, place, layout, block_size)
        seen = torch.zeros(80, dtype=torch.bool)
        seen[max(0, length - window) : length] = True
        assert torch.equal(result.out != 0, seen.expand(1, 2, 80)), (window, length)
        assert_right(result, scene)


@every_place
@every_layout
def test_case_11_window_slides_with_each_token_of_a_chunk(place: Place, layout: KVLayout) -> None:
    for window in (1, 2, 15, 16, 17, 30, 1000):
        scene = make_scene([50, 7], head_dim=56, query_lens=[37, 7], window=window)
        scene.query.zero_()
        for values in scene.values:
            values[:] = torch.eye(values.shape[0], 56).unsqueeze(1)
        result = run(scene, place, layout)
        for token in range(37):
            position = 13 + token
            seen = torch.zeros(56, dtype=torch.bool)
            seen[max(0, position - window + 1) : position + 1] = True
            assert torch.equal(result.out[token] != 0, seen.expand(6, 56)), (window, token)
        assert_right(result, scene)


@every_place
@every_dtype
@pytest.mark.parametrize("window", [1, 16, 17])
def test_case_11_a_wholly_masked_tile_leaves_no_weight(
    place: Place, dtype: torch.dtype, window: int
) -> None:
    """Keys in the window score very low and those outside it very high."""
    scene = make_scene([200, 65], dtype=dtype, window=window, scale=1.0)
    scene.query.fill_(8.0)
    for keys in scene.keys:
        keys.fill_(32.0)
        # quarters: sums of 64 products of them are exact in fp32, in any order
        keys[-window:] = -32.0 - torch.randint(4, (window, 1, 1)) / 4
    result = run(scene, place)
    assert float(result.lse.max()) < -8 * 64 * 31
    assert_right(result, scene)


@every_place
@every_dtype
def test_scores_that_are_all_very_negative_still_weigh(place: Place, dtype: torch.dtype) -> None:
    """A running maximum that starts at a finite number would lose them."""
    scene = make_scene([1, 17, 300], dtype=dtype, scale=1.0)
    scene.query.fill_(16.0)
    for keys in scene.keys:
        keys.fill_(-64.0)
    assert_right(run(scene, place), scene)


@every_place
@every_layout
@pytest.mark.parametrize("level", [-20.0, 0.0, 20.0])
def test_case_12_a_sink_is_counted_once_whatever_the_splits(
    place: Place, layout: KVLayout, level: float
) -> None:
    scene = make_scene([1024, 3, 0], sinks=level + torch.randn(6))
    for num_splits in (None, 1, 2, 16):
        result = run(scene, place, layout, num_splits=num_splits)
        assert_right(result, scene)
        assert bool((result.out[2] == 0).all())


@every_place
def test_case_12_a_sink_in_every_row_of_a_chunk(place: Place) -> None:
    scene = make_scene([40, 3], query_lens=[11, 3], sinks=3 * torch.randn(6), window=9)
    assert_right(run(scene, place), scene)


@every_place
def test_case_12_an_infinitely_low_sink_is_no_sink(place: Place) -> None:
    scene = make_scene([20], sinks=torch.full((6,), -math.inf))
    result = run(scene, place)
    assert_right(result, replace(scene, features={}))


SCALES: dict[str, Any] = {
    "float": (0.5, 2.0),
    "tensor": (torch.tensor([0.5]), torch.tensor(2.0)),
    "per_head": (torch.tensor([0.5, 0.7]), torch.tensor([2.0, 3.0])),
    "mixed": (0.5, torch.tensor([2.0, 3.0])),
    "key_only": (0.5, None),
    "value_only": (None, 2.0),
}


@every_place
@every_layout
@every_kv_dtype
@pytest.mark.parametrize("form", SCALES)
def test_case_17_quantised_caches_use_each_scale_for_its_own(
    place: Place, layout: KVLayout, kv_dtype: torch.dtype, form: str
) -> None:
    """Equals the dequantised reference, and so differs from swapped or ignored scales."""
    k_scale, v_scale = SCALES[form]
    quantum = 1 / 24 if kv_dtype == torch.int8 else 1.0
    scene = make_scene([1, 17, 40], dtype=torch.float16, kv_dtype=kv_dtype)
    scales = {
        "k_scale": None if k_scale is None else k_scale * quantum,
        "v_scale": None if v_scale is None else v_scale * quantum,
    }
    scene.features.update(scales)
    assert_right(run(scene, place, layout), scene)


@every_place
@every_kv_dtype
@every_dtype
def test_case_17_quantised_caches_serve_every_query_dtype(
    place: Place, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    scene = make_scene(
        [40, 3], dtype=dtype, kv_dtype=kv_dtype, query_lens=[5, 3], k_scale=0.03, v_scale=0.05
    )
    assert_right(run(scene, place), scene)


@every_place
@every_dtype
def test_case_17_scales_apply_to_unquantised_caches_too(place: Place, dtype: torch.dtype) -> None:
    scene = make_scene([40], dtype=dtype, k_scale=0.5, v_scale=torch.tensor([2.0, 3.0]))
    assert_right(run(scene, place), scene)


@every_place
@every_layout
@pytest.mark.parametrize("fault", ["scores", "values", "query"])
def test_case_18_fp16_does_not_overflow_on_the_way(
    place: Place, layout: KVLayout, fault: str
) -> None:
    """q·k beyond 65504 before the scale; values of 6e4 summed; a large query scaled first."""
    scene = make_scene([1, 40, 300], head_dim=256, dtype=torch.float16)
    if fault == "scores":
        scene.query.copy_(20 + torch.rand(scene.query.shape))
        for keys in scene.keys:
            keys.copy_((20 + torch.rand(keys.shape)).half())  # 256 * 400 = 102,400
    elif fault == "values":
        for values in scene.values:
            values.copy_((59_000 + 1_000 * torch.rand(values.shape)).half())
    else:
        scene.query.mul_(2_000)
        scene.features["scale"] = 256**-0.5 / 2_000
    result = run(scene, place, layout)
    assert bool(result.out.isfinite().all())
    assert_right(result, scene)


@every_place
@every_layout
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_case_19_fp32_is_fp32_whatever_torch_is_allowed(
    place: Place, layout: KVLayout, precision: str
) -> None:
    """1e-5 against fp64 even where the process lets matmuls use TF32 or bf16."""
    before = torch.get_float32_matmul_precision()
    scene = make_scene([1, 333], heads=6, kv_heads=1, head_dim=256, query_lens=[1, 5])
    torch.set_float32_matmul_precision(precision)
    try:
        result = run(scene, place, layout)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    right = truth(scene)
    error = (result.out.double() - right.out).norm(dim=-1) / right.out.norm(dim=-1)
    assert float(error.max()) <= 1e-5
    assert_right(result, scene)


@every_place
@every_layout
@every_dtype
def test_alibi_is_relative_to_each_tokens_own_position(
    place: Place, layout: KVLayout, dtype: torch.dtype
) -> None:
    slopes = 0.5 ** torch.arange(1.0, 7.0)
    scene = make_scene([40, 17, 0], query_lens=[9, 1, 1], dtype=dtype, alibi_slopes=slopes)
    assert_right(run(scene, place, layout), scene)


@every_place
@pytest.mark.parametrize("scale", [0.01, 1.0, 0.0, -0.1])
def test_scale_is_what_was_given(place: Place, scale: float) -> None:
    scene = make_scene([1, 40], scale=scale)
    assert_right(run(scene, place), scene)


@every_place
@every_layout
@every_dtype
@pytest.mark.parametrize("query_lens", [None, [1, 20, 4]], ids=["decode", "chunks"])
def test_all_features_together(
    place: Place, layout: KVLayout, dtype: torch.dtype, query_lens: list[int] | None
) -> None:
    scene: Scene = make_scene(
        [0, 50, 200],
        dtype=dtype,
        query_lens=query_lens,
        window=33,
        softcap=5.0,
        alibi_slopes=0.5 ** torch.arange(1.0, 7.0),
        sinks=torch.randn(6),
        k_scale=0.7,
        v_scale=torch.tensor([1.5, 0.25]),
        scale=0.2,
    )
    assert_right(run(scene, place, layout), scene)
