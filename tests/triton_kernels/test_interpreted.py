"""The Triton kernels in Triton's interpreter, on a CPU: every branch, on small problems.

TRITON_INTERPRET=1 pytest tests/triton_kernels
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import pagedattn
from pagedattn import verify
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.hard_problems import make_call, with_long_bound

pytest.importorskip("triton")
pytest.importorskip("triton.runtime.interpreter", reason="this Triton has no interpreter")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from pagedattn.backends.triton import tuning  # after the checks: it imports Triton
from pagedattn.backends.triton.backend import TritonBackend

BASE = Problem("cpu", torch.float32, torch.float32, 6, 2, 32, 16, return_lse=True)


def _judge(problem: Problem) -> None:
    verdict = verify.judge(TritonBackend().load(problem), problem)
    assert verdict.outcome == "ok", verdict.detail


@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
def test_layouts_and_types(layout: KVLayout, dtype: torch.dtype) -> None:
    _judge(replace(BASE, kv_layout=layout, dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("varlen", [False, True], ids=["decode", "varlen"])
@pytest.mark.parametrize("feature", ["window", "softcap", "alibi", "sinks", "batch_invariant"])
def test_features(layout: KVLayout, varlen: bool, feature: str) -> None:
    features: dict[str, Any] = {feature: True}
    _judge(replace(BASE, kv_layout=layout, varlen_query=varlen, **features))


@pytest.mark.parametrize("group", [1, 3, 12])
def test_long_sequences_alone(group: int) -> None:
    """The rows of the others are left alone, whatever this backend counts as decode rows."""
    problem = replace(BASE, num_heads=2 * group, varlen_query=True, query_part="long")
    _judge(replace(problem, window=True, sinks=True))
    refused = TritonBackend().not_supported_reasons(replace(problem, query_part="short"))
    assert any("the long ones" in reason for reason in refused)


def test_all_features_at_once() -> None:
    _judge(replace(BASE, varlen_query=True, window=True, softcap=True, alibi=True, sinks=True))


@pytest.mark.parametrize("scales", ["float", "tensor", "per_head"])
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_eight_bit_caches(kv: str, scales: Any) -> None:
    kv_dtype = getattr(torch, kv)
    _judge(replace(BASE, dtype=torch.float16, kv_dtype=kv_dtype, kv_scales=scales))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_eight_bit_caches_as_words(layout: KVLayout, kv: str) -> None:
    kv_dtype = getattr(torch, kv)
    problem = replace(
        BASE, dtype=torch.float16, kv_dtype=kv_dtype, kv_layout=layout, head_dim=64,
        kv_scales="float", window=True, varlen_query=True,
    )  # fmt: skip
    assert tuning.takes_words(problem)
    _judge(problem)


@pytest.mark.parametrize(
    ("kv", "head_dim", "block_size"),
    [
        ("float8_e4m3fn", 64, 16),
        ("float8_e5m2", 80, 8),
        ("int8", 256, 144),
        ("int8", 16, 1),
    ],
)
def test_packed_eight_bit_keys_as_they_lie(
    kv: str, head_dim: int, block_size: int, monkeypatch: Any
) -> None:
    decode_tiling = tuning.decode_tiling  # of work that these problems are too small for
    monkeypatch.setattr(tuning, "decode_tiling", lambda p, rows, _: decode_tiling(p, rows, 1 << 20))
    kv_dtype = getattr(torch, kv)
    problem = replace(
        BASE, dtype=torch.float16, kv_dtype=kv_dtype, kv_layout="packed", head_dim=head_dim,
        block_size=block_size, kv_scales="float",
    )  # fmt: skip
    for rows in (16, 32):
        assert tuning.decode_tiling(problem, rows, 0).chunks == 1
    _judge(problem)
    _judge(replace(problem, varlen_query=True, window=True))


def test_eight_bit_caches_that_no_word_fits() -> None:
    problem = replace(BASE, dtype=torch.float16, kv_dtype=torch.int8, block_size=1)
    _judge(replace(problem, kv_layout="packed"))
    _judge(replace(problem, kv_layout="NHD", head_dim=80))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_keys_in_parts(dtype: torch.dtype, parts: int, head_dim: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(tuning, "key_parts", lambda *_: parts)
    _judge(replace(BASE, dtype=dtype, kv_dtype=dtype, kv_layout="packed", head_dim=head_dim))


@pytest.mark.parametrize("group", [1, 2, 5, 7, 8, 12, 24, 48])
def test_groups(group: int) -> None:
    _judge(replace(BASE, num_heads=group, num_kv_heads=1, varlen_query=True))


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("head_dim", [64, 80, 120])
def test_head_sizes(layout: KVLayout, head_dim: int) -> None:
    _judge(replace(BASE, head_dim=head_dim, kv_layout=layout))


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@pytest.mark.parametrize("block_size", [1, 8, 32, 144])
def test_block_sizes(layout: KVLayout, block_size: int) -> None:
    _judge(replace(BASE, num_heads=2, block_size=block_size, kv_layout=layout))


def _long_call(num_splits: int | None, length: int = 700) -> Call:
    blocks = -(-length // 16)
    cache = torch.randn(2, blocks, 2, 16, 32)
    return Call(
        query=torch.randn(1, 6, 32), key_cache=cache[0], value_cache=cache[1],
        block_tables=torch.randperm(blocks).view(1, -1).to(torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        out=torch.full((1, 6, 32), math.nan), lse=torch.full((1, 6), math.nan),
        kv_layout="HND", scale=32**-0.5, max_seq_len=blocks * 16, max_query_len=1,
        num_splits=num_splits,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [1, 2, 3, 11, 1000])
def test_case_13_any_number_of_splits(splits: int) -> None:
    problem = replace(BASE, kv_layout="HND")
    call = _long_call(splits)
    TritonBackend().load(problem)(call)
    error, lse_error = verify.errors(call, verify.oracle(call, problem))
    assert error < 1e-5
    assert lse_error < 1e-5


@pytest.mark.parametrize("hint", [2, 3, 12, 15])
def test_more_query_tokens_than_the_hint_harm_their_own_sequence(hint: int) -> None:
    """On a GPU the host cannot know: 16 tokens, where it was told that none has over `hint`."""
    problem = replace(BASE, kv_layout="HND", varlen_query=True)
    blocks = 8
    cache = torch.randn(2, blocks, 2, 16, 32)
    starts = [0, 2, 18, 20]
    call = Call(
        query=torch.randn(20, 6, 32), key_cache=cache[0], value_cache=cache[1],
        block_tables=torch.arange(6).view(3, 2).to(torch.int32),
        seq_lens=torch.tensor([17, 30, 20], dtype=torch.int32),
        out=torch.full((20, 6, 32), 7.0), lse=torch.full((20, 6), 7.0), kv_layout="HND",
        scale=32**-0.5, max_seq_len=32, max_query_len=hint,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
    )  # fmt: skip
    TritonBackend().load(problem)(call)
    truth = verify.oracle(call, problem)
    truth.out[2:18], truth.lse[2:18] = math.nan, math.nan  # type: ignore[index]
    error, lse_error = verify.errors(call, truth)
    assert error < 1e-5
    assert lse_error < 1e-5


def test_case_17_a_whole_number_is_a_scale_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    call = _long_call(None, 40)
    outs = [
        pagedattn.paged_attention(
            call.query, call.key_cache, call.value_cache, call.block_tables, call.seq_lens,
            kv_layout="HND", k_scale=scale, v_scale=scale, softcap=scale, backend="triton",
        )
        for scale in (2, 2.0)
    ]  # fmt: skip
    assert torch.equal(*outs)


def test_tokens_of_no_sequence_at_all() -> None:
    problem = replace(BASE, kv_layout="HND", varlen_query=True)
    call = replace(
        _long_call(None), query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32), block_tables=torch.zeros(0, 1).int(),
    )  # fmt: skip
    TritonBackend().load(problem)(call)
    assert torch.equal(call.out, torch.zeros_like(call.out))
    assert call.lse is not None
    assert bool((call.lse == -math.inf).all())


def test_a_bound_far_beyond_the_lengths() -> None:
    """As a captured graph has it: most splits have nothing to do."""
    call = with_long_bound(make_call(BASE))
    truth = verify.oracle(call, BASE)
    TritonBackend().load(BASE)(call)
    error, lse_error = verify.errors(call, truth)
    assert error <= verify.TOLERANCE[torch.float32]
    assert lse_error <= verify.LSE_TOLERANCE[torch.float32]


@pytest.mark.parametrize("splits", [1, 3])
def test_tokens_before_the_first_sequence_are_of_none(splits: int) -> None:
    """Which the host of a GPU cannot see: their results are zeros, as of those behind the last."""
    problem = replace(BASE, varlen_query=True)
    call = replace(make_call(problem), num_splits=splits)
    runner = TritonBackend().load(problem)
    runner(call)
    assert call.query_start_loc is not None
    query = torch.cat([call.query[:2], call.query])
    later = replace(
        call, query=query, out=torch.full_like(query, math.nan),
        lse=torch.full(query.shape[:2], math.nan), query_start_loc=call.query_start_loc + 2,
        host_query_start=None,
    )  # fmt: skip
    runner(later)
    assert later.lse is not None
    assert call.lse is not None
    torch.testing.assert_close(later.out[2:], call.out, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(later.lse[2:], call.lse, rtol=0, atol=0, equal_nan=True)
    assert not bool(later.out[:2].any())
    assert bool((later.lse[:2] == -math.inf).all())


def test_what_a_call_leaves_serves_others_of_its_shapes_and_no_other_bounds() -> None:
    problem = replace(BASE, kv_layout="HND")
    runner = TritonBackend().load(problem)
    kept: dict[Any, Any] = {}
    plans = []
    # a plan of 64 tokens makes NaN of 700; one of 700 has another kernel than one of 64
    for length, bound in ((60, 64), (50, 64), (700, 704), (60, 64), (60, 704)):
        call = replace(_long_call(None, 700), max_seq_len=bound, plans=kept)
        call.seq_lens.fill_(length)
        runner(call)
        plans.append(kept[runner, bound, 1, "all"])
        error, lse_error = verify.errors(call, verify.oracle(call, problem))
        assert error < 1e-5
        assert lse_error < 1e-5
    assert plans[0] is plans[1] is plans[3]
    assert len(kept) == 2


def test_misaligned_tensors_neither_use_nor_leave_a_plan() -> None:
    problem = replace(BASE, kv_layout="HND")
    runner = TritonBackend().load(problem)
    call = _long_call(None, 60)
    kept = {(runner, call.max_seq_len, 1, "all"): "none that runs"}
    call.plans = dict(kept)
    moved = torch.empty(call.value_cache.numel() + 1)[1:].view_as(call.value_cache)
    runner(replace(call, value_cache=moved.copy_(call.value_cache)))
    assert call.plans == kept
    assert verify.errors(call, verify.oracle(call, problem))[0] < 1e-5


def test_case_22_no_length_or_batch_makes_a_new_kernel() -> None:
    problem = replace(BASE, kv_layout="HND")
    runner = TritonBackend().load(problem)
    for length in (1, 16, 17, 64, 65, 300):
        runner(_long_call(None, length))
    kernels = runner._kernels._kernels  # type: ignore[attr-defined]
    # one that writes the result and one that writes partial states, and their merges
    assert len([k for k in kernels if k[0] != "merge"]) <= 6


def test_splits_follow_the_device_and_the_work() -> None:
    tiling = tuning.Tiling(64, 4, 2, 2.0, 1, False, 64)
    assert tuning.split_count(1000, 100_000, "cpu", tiling) == 1
    assert tuning.split_count(1, 64, "cpu", tiling) == 1
    assert 1 < tuning.split_count(1, 100_000, "cpu", tiling) <= tuning.MAX_SPLITS
