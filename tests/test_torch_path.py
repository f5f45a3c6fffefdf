"""The torch path against the oracle, on both of its roads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from _torch_calls import Road, assert_right, by_device_road, every_road, make_call

from pagedattn import hard_problems, verify
from pagedattn.backends.protocol import QUANTISED_KV_DTYPES, KVLayout, Problem
from pagedattn.backends.python_v2.backend import run

every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
RAGGED = [1, 17, 0, 333, 16]
MIXED: dict[str, Any] = {"query_lens": [1, 17, 2, 40, 0], "nobodys_tokens": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 17},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.5, 6)},
    "sinks": {"sinks": torch.linspace(-2.0, 4.0, 6)},
    "splits": {"num_splits": 7},
    "invariant": {"batch_invariant": True},
    "all": {
        "window": 40,
        "softcap": 5.0,
        "alibi_slopes": torch.linspace(0.01, 0.5, 6),
        "sinks": torch.linspace(-2.0, 4.0, 6),
        "k_scale": 0.5,
        "v_scale": torch.tensor([0.25, 3.0]),
        "num_splits": 3,
    },
}


@every_road
@every_layout
@every_dtype
@pytest.mark.parametrize("queries", [{}, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_equals_the_oracle(
    road: Road,
    layout: KVLayout,
    dtype: torch.dtype,
    queries: dict[str, Any],
    features: dict[str, Any],
) -> None:
    assert_right(road(make_call(RAGGED, layout=layout, dtype=dtype, **queries, **features)))


@every_road
@every_layout
@pytest.mark.parametrize("kv_dtype", sorted(QUANTISED_KV_DTYPES, key=str), ids=str)
@every_dtype
def test_quantised_caches_with_each_kind_of_scale(
    road: Road, layout: KVLayout, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    small = 0.04 if kv_dtype == torch.int8 else 1.0
    per_head = torch.tensor([0.5, 1.5]) * small
    for k_scale, v_scale in [(small, 2.0), (torch.tensor([small]), None), (per_head, per_head)]:
        call = make_call(
            RAGGED, layout=layout, dtype=dtype, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale
        )
        assert_right(road(call))


@every_road
@every_layout
@pytest.mark.parametrize("head_dim", [16, 80, 96, 112, 120, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (6, 6), (12, 4)])
def test_head_sizes_and_groups(
    road: Road, layout: KVLayout, head_dim: int, heads: int, kv_heads: int
) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    assert_right(road(make_call([40, 5], layout=layout, **shape)))


@every_road
@every_layout
@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 256, 2048])
def test_block_sizes(road: Road, layout: KVLayout, block_size: int) -> None:
    assert_right(road(make_call(RAGGED, layout=layout, block_size=block_size, **MIXED)))


@every_road
def test_a_prompt_longer_than_a_chunk_of_rows(road: Road) -> None:
    # a tile that starts and ends within blocks, and whose window is whole blocks
    for window in (None, 97):
        call = make_call([700, 600], query_lens=[700, 300], window=window, dtype=torch.bfloat16)
        assert_right(road(call))


@every_road
def test_case_02_and_15_unwritten_tails_and_pads_are_never_read(road: Road) -> None:
    """`make_call` poisons both; here every length at the edge of a block."""
    for length in (1, 15, 16, 17, 32):
        assert_right(road(make_call([length], layout="NHD")))


@every_road
def test_case_03_length_zero_and_rows_that_see_nothing(road: Road) -> None:
    call = make_call([0, 5, 0], sinks=torch.ones(6))
    assert_right(road(call))
    assert bool((call.out[0] == 0).all())
    assert_right(road(make_call([0, 2, 9], query_lens=[3, 5, 0], sinks=torch.ones(6))))
    assert_right(road(make_call([0, 0])))


def test_a_negative_length_on_a_device_is_none() -> None:
    call = by_device_road(make_call([20, 5], seq_lens=torch.tensor([-7, 5], dtype=torch.int32)))
    assert bool((call.out[0] == 0).all())
    assert bool(call.out[1].isfinite().all())


@every_road
def test_a_length_beyond_the_bound_is_nan_for_its_sequence_alone(road: Road) -> None:
    for length in (33, 1000):  # within the table, and beyond it
        lengths = torch.tensor([length, 5], dtype=torch.int32)
        for window in (None, 4):
            bounds: dict[str, Any] = {"max_seq_len": 20, "host_seq_lens": [length, 5]}
            call = road(make_call([20, 5], seq_lens=lengths, window=window, **bounds))
            assert_right(call)
            assert bool(call.out[0].isnan().all())


def test_more_query_tokens_than_the_hint_says_are_nan_and_take_no_others_tiles() -> None:
    """On a device the hint cannot be held against the counts; a CPU refuses the call."""
    lengths, query_lens = [110, 20, 40], [100, 1, 2]
    right = by_device_road(make_call(lengths, query_lens=query_lens))
    call = make_call(lengths, query_lens=query_lens, max_query_len=8)
    by_device_road(call)
    for got, expected in ((call.out, right.out), (call.lse, right.lse)):
        assert got is not None
        assert expected is not None
        assert bool(got[:100].isnan().all())
        assert torch.allclose(got[100:], expected[100:], atol=1e-5)


@every_road
@pytest.mark.parametrize("bad", [-1, 10**6, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("queries", [{}, {"query_lens": [2, 3, 1]}], ids=["decode", "mixed"])
def test_a_block_that_does_not_exist_makes_its_sequence_nan_and_no_other(
    road: Road, bad: int, queries: dict[str, Any]
) -> None:
    call = make_call([40, 50, 3], **queries)
    call.block_tables[1, 2] = bad
    assert_right(road(call))
    assert bool(call.out[-1].isfinite().all())


@every_road
@pytest.mark.parametrize("window", [1, 2, 16, 17])
def test_case_11_a_window_holds_exactly_its_last_keys(road: Road, window: int) -> None:
    lengths = [max(window - 1, 1), window, window + 1, 50]
    assert_right(road(make_call(lengths, window=window)))
    for splits in (None, 1000):  # 1000: a window's edge falls between any two keys
        mixed: dict[str, Any] = {"query_lens": [1, 1, 2, 9], "num_splits": splits}
        assert_right(road(make_call(lengths, window=window, **mixed)))


@every_road
def test_case_10_a_soft_cap_of_huge_scores(road: Road) -> None:
    call = make_call([40, 17], softcap=50.0)
    call.query.mul_(300)
    # logits of 50 in fp32 are known no better than this
    assert_right(road(call), tolerance=50 * torch.finfo(torch.float32).eps)


@every_road
@pytest.mark.parametrize("splits", [1, 2, 16, 1024, 5000])
def test_case_12_and_13_splits_do_not_change_the_result(road: Road, splits: int) -> None:
    call = make_call([1024, 40, 0], sinks=torch.linspace(-2.0, 8.0, 6), num_splits=splits)
    assert_right(road(call))


@every_road
def test_case_17_scales_are_not_swapped(road: Road) -> None:
    call = road(make_call(RAGGED, k_scale=0.5, v_scale=2.0))
    assert_right(call)
    swapped = road(make_call(RAGGED, k_scale=2.0, v_scale=0.5))
    assert not torch.allclose(call.out[3], swapped.out[3])


@every_road
@every_layout
def test_case_18_fp16_products_beyond_fp16(road: Road, layout: KVLayout) -> None:
    call = make_call([40, 2000], dtype=torch.float16, layout=layout)
    call.query.mul_(100)
    call.key_cache.mul_(10)
    call.value_cache.fill_(6e4)
    assert_right(road(call))


@every_road
def test_case_26_lengths_that_differ_wildly(road: Road) -> None:
    assert_right(road(make_call([1, 9000, 16, 0, 17], heads=2, kv_heads=1)))


@every_road
def test_no_log_sum_exp_asked_for_and_no_sequence_at_all(road: Road) -> None:
    call = road(make_call(RAGGED, lse=None))
    assert_right(call)
    road(make_call([]))


@pytest.mark.parametrize("varlen", [False, True])
def test_a_bound_far_beyond_the_lengths_on_a_device(varlen: bool) -> None:
    """As a captured graph has it; nothing but padding is in the rest of the table."""
    dtype = torch.float16
    problem = Problem("cpu", dtype, dtype, 6, 2, 64, 16, varlen_query=varlen, return_lse=True)
    call = hard_problems.with_long_bound(hard_problems.make_call(problem))
    truth = verify.oracle(call, problem)
    run(replace(call, host_seq_lens=None, host_query_start=None))
    error, lse_error = verify.errors(call, truth)
    assert error <= verify.TOLERANCE[dtype]
    assert lse_error <= verify.LSE_TOLERANCE[dtype]
