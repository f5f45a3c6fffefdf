"""The oracle against something that shares nothing with it: torch's own attention in fp64, and
softmaxes written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _places import every_kv_dtype, every_layout
from _scene import Scene, make_scene
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedattn.backends.protocol import Call, KVLayout
from pagedattn.backends.reference import attend


def oracle(
    scene: Scene, layout: KVLayout = "NHD", block_size: int = 16, **changes: Any
) -> tuple[Tensor, Tensor]:
    """Its fp64 output and log-sum-exp."""
    paged = scene.page(layout, block_size)
    features = {"scale": scene.query.shape[-1] ** -0.5, **scene.features, **changes}
    starts = None if scene.query_lens is None else torch.tensor(scene.starts, dtype=torch.int32)
    call = Call(
        query=scene.query,
        **vars(paged),
        out=torch.full(scene.query.shape, math.nan, dtype=torch.float64),
        lse=torch.full(scene.query.shape[:2], math.nan, dtype=torch.float64),
        max_seq_len=paged.block_tables.shape[1] * block_size,
        max_query_len=max(scene.query_lens or [1]),
        query_start_loc=starts,
        **features,
    )
    attend(call)
    assert call.lse is not None
    return call.out, call.lse


def sdpa(scene: Scene, sequence: int, bias: Tensor | None = None, **options: Any) -> Tensor:
    """torch's attention of one sequence in fp64, ``[T, H, D]``; `bias` broadcasts to [H, T, L]."""
    rows = slice(scene.starts[sequence], scene.starts[sequence + 1])
    group = scene.query.shape[1] // scene.keys[sequence].shape[1]
    keys, values = (
        t[sequence].double().repeat_interleave(group, 1).transpose(0, 1)
        for t in (scene.keys, scene.values)
    )
    query = scene.query[rows].double().transpose(0, 1)
    if bias is None:
        bias = causal(query.shape[1], keys.shape[1])
    made: Tensor = scaled_dot_product_attention(query, keys, values, bias.double(), **options)
    return made.transpose(0, 1)


def causal(tokens: int, length: int, window: int | None = None) -> Tensor:
    """0 where a token sees a key and −inf elsewhere, ``[T, L]``, the last token at the end."""
    sees = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    if window is not None:
        sees &= torch.ones(tokens, length, dtype=torch.bool).triu(length - tokens - window + 1)
    return torch.zeros(tokens, length, dtype=torch.float64).masked_fill(~sees, -math.inf)


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to fp64 arithmetic in another order."""
    return torch.allclose(a, b, rtol=1e-11, atol=1e-12)


@every_layout
@pytest.mark.parametrize("block_size", [1, 8, 16, 48])
def test_decode_equals_sdpa(layout: KVLayout, block_size: int) -> None:
    scene = make_scene([1, 17, 48, 33])
    out, _ = oracle(scene, layout, block_size)
    assert close(out, torch.cat([sdpa(scene, i) for i in range(4)]))


@every_layout
def test_chunks_equal_sdpa_aligned_to_the_end(layout: KVLayout) -> None:
    scene = make_scene([5, 40, 17], query_lens=[5, 3, 1])
    out, _ = oracle(scene, layout)
    assert close(out, torch.cat([sdpa(scene, i) for i in range(3)]))


@pytest.mark.parametrize("window", [1, 2, 16, 100])
def test_window_equals_a_banded_mask(window: int) -> None:
    scene = make_scene([40], query_lens=[7], window=window)
    out, _ = oracle(scene)
    assert close(out, sdpa(scene, 0, causal(7, 40, window)))


def test_scale_equals_sdpa_with_that_scale() -> None:
    scene = make_scene([29], scale=0.3)
    out, _ = oracle(scene)
    assert close(out, sdpa(scene, 0, scale=0.3))


def test_alibi_equals_a_bias() -> None:
    slopes = 0.5 ** torch.arange(1.0, 7.0)
    scene = make_scene([40], query_lens=[4], alibi_slopes=slopes)
    out, _ = oracle(scene)
    distance = torch.arange(40) - torch.arange(36, 40).view(-1, 1)
    assert close(out, sdpa(scene, 0, causal(4, 40) + slopes.view(-1, 1, 1) * distance))


def test_softcap_by_hand() -> None:
    scene = make_scene([3], heads=1, kv_heads=1, head_dim=8, softcap=1.5)
    query = scene.query[0, 0].double()
    scores = [float(query @ key.double()) * 8**-0.5 for key in scene.keys[0][:, 0]]
    weights = [math.exp(1.5 * math.tanh(s / 1.5)) for s in scores]
    out, lse = oracle(scene)
    mean = sum(w * v.double() for w, v in zip(weights, scene.values[0][:, 0], strict=True))
    assert close(out[0, 0], mean / sum(weights))
    assert float(lse[0, 0]) == pytest.approx(math.log(sum(weights)), rel=1e-12)


def test_softcap_comes_before_alibi() -> None:
    """A score is capped; the bias that is added to it is not."""
    slopes = torch.tensor([100.0])
    scene = make_scene([2], heads=1, kv_heads=1, head_dim=8, softcap=1.0, alibi_slopes=slopes)
    query = scene.query[0, 0].double()
    far, near = (math.tanh(float(query @ k.double()) * 8**-0.5) for k in scene.keys[0][:, 0])
    _, lse = oracle(scene)
    assert float(lse[0, 0]) == pytest.approx(
        math.log(math.exp(far - 100) + math.exp(near)), rel=1e-12
    )


def test_a_sink_equals_one_more_key_of_value_zero() -> None:
    sinks = torch.randn(6)
    scene = make_scene([23], sinks=sinks)
    out, lse = oracle(scene)
    # the same by a 24th key whose score the bias makes the sink, and whose value is 0
    longer = Scene(
        scene.query,
        [torch.cat([scene.keys[0], torch.zeros(1, 2, 64)])],
        [torch.cat([scene.values[0], torch.zeros(1, 2, 64)])],
        scene.kv_dtype,
    )
    bias = torch.zeros(6, 1, 24, dtype=torch.float64)
    bias[:, 0, 23] = sinks.double()
    assert close(out, sdpa(longer, 0, bias))
    without = oracle(Scene(scene.query, scene.keys, scene.values, scene.kv_dtype))[1]
    assert close(lse[0], torch.log(without[0].exp() + sinks.double().exp()))


def test_lse_is_the_natural_log_of_the_sum_of_exponentials() -> None:
    scene = make_scene([5], heads=1, kv_heads=1, head_dim=8)
    query = scene.query[0, 0].double()
    total = sum(math.exp(float(query @ k.double()) * 8**-0.5) for k in scene.keys[0][:, 0])
    _, lse = oracle(scene)
    assert float(lse[0, 0]) == pytest.approx(math.log(total), rel=1e-12)


@every_kv_dtype
@every_layout
def test_quantised_caches_are_multiplied_by_their_scales(
    kv_dtype: torch.dtype, layout: KVLayout
) -> None:
    scales: dict[str, Any] = {"k_scale": torch.tensor([0.02, 0.05]), "v_scale": 0.25}
    scene = make_scene([37], kv_dtype=kv_dtype, **scales)
    out, _ = oracle(scene, layout)
    k_scale = torch.tensor([0.02, 0.05]).double().view(1, 2, 1)
    dequantised = Scene(
        scene.query, [scene.keys[0].double() * k_scale], [scene.values[0] * 0.25], torch.float64
    )
    assert close(out, sdpa(dequantised, 0))


def test_nothing_to_see_gives_zeros_and_minus_infinity() -> None:
    """Length 0; a query longer than its sequence; a token that no sequence owns."""
    scene = make_scene([0, 2], query_lens=[1, 4], sinks=torch.randn(6))
    scene.query = torch.cat([scene.query, scene.query[:1]])
    out, lse = oracle(scene)
    blind = torch.tensor([True, True, True, False, False, True])
    assert torch.equal(lse == -math.inf, blind[:, None].expand(-1, 6))
    assert bool((out[blind] == 0).all())
    assert bool((out[~blind] != 0).all())


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, "one past the last"])
def test_a_bad_block_id_makes_its_sequence_nan_and_no_other(bad: int | str) -> None:
    scene = make_scene([20, 20])
    paged = scene.page()
    paged.block_tables[0, 1] = bad if isinstance(bad, int) else paged.key_cache.shape[0]
    call = Call(
        query=scene.query,
        **vars(paged),
        out=torch.zeros(scene.query.shape, dtype=torch.float64),
        lse=torch.zeros(2, 6),
        scale=0.125,
        max_seq_len=64,
        max_query_len=1,
    )
    attend(call)
    assert call.lse is not None
    assert bool(call.out[0].isnan().all())
    assert bool(call.lse[0].isnan().all())
    assert close(call.out[1:], sdpa(scene, 1))
