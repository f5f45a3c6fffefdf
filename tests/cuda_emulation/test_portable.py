"""The portable kernels on hard problems, with warps of 32 and of 64, against the oracle."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _backends import run_python
from _emulated_calls import (
    FP8,
    assert_told_by_its_sequences,
    judge_orders,
    lengths_at_the_end_of_int,
    long_call,
    many_short_beside_a_long_one,
    outside,
    shifted,
    with_bound_of_queries,
    without_sequences,
)
from _emulation import WARP_SIZES, Libraries

from pagedattn.backends.cuda.launch import CudaRunner, _workspace_size
from pagedattn.backends.cuda.partition import Partition
from pagedattn.backends.protocol import SHORT_QUERIES, Call, KVLayout, Problem
from pagedattn.hard_problems import UNTOUCHED, make_call

BASE = Problem("cpu", torch.float32, torch.float32, 6, 2, 32, 16, return_lse=True)
QWEN = replace(BASE, dtype=torch.float16, kv_dtype=torch.float16, num_heads=12, head_dim=256)
every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
either_mode = pytest.mark.parametrize("varlen", [False, True], ids=["decode", "varlen"])

Judge = Callable[..., Call]


@pytest.fixture
def judge(libraries: Libraries) -> Judge:
    """Run a call at each warp size, threads in rising and in falling order; judge the first and
    hold the others to its bits."""

    def judge(problem: Problem, call: Call | None = None, *options: str) -> Call:
        call = call or make_call(problem, seed=torch.initial_seed() % 1000)
        library = libraries.of(problem, *options)
        return judge_orders(problem, call, library, CudaRunner(library, problem), WARP_SIZES)

    return judge


@every_layout
@either_mode
def test_layouts(judge: Judge, layout: KVLayout, varlen: bool) -> None:
    judge(replace(BASE, kv_layout=layout, varlen_query=varlen))
    judge(replace(QWEN, kv_layout=layout, varlen_query=varlen))


@pytest.mark.parametrize("layout", ["packed", "NHD"])
@either_mode
@pytest.mark.parametrize("feature", ["window", "softcap", "alibi", "sinks", "batch_invariant"])
def test_features(judge: Judge, layout: KVLayout, varlen: bool, feature: str) -> None:
    features: dict[str, Any] = {feature: True}
    judge(replace(BASE, kv_layout=layout, varlen_query=varlen, **features))


def test_all_features_at_once(judge: Judge) -> None:
    judge(replace(BASE, varlen_query=True, window=True, softcap=True, alibi=True, sinks=True))


@every_layout
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch_invariant"])
def test_short_sequences_alone(judge: Judge, layout: KVLayout, batch_invariant: bool) -> None:
    """The others' rows are left alone, and the workspace has no room for them."""
    problem = replace(BASE, varlen_query=True, query_part="short", kv_layout=layout)
    problem = replace(problem, batch_invariant=batch_invariant, sinks=True)
    call = make_call(problem)
    room = SHORT_QUERIES * len(call.seq_lens) * call.query.shape[1] * (call.query.shape[2] + 2)
    assert _workspace_size(call, Partition(3, 0)) == 3 * room
    for splits in (None, 1, 5):
        result = judge(problem, replace(call, num_splits=splits))
        assert bool((result.out[3 + SHORT_QUERIES] == UNTOUCHED).all())
        assert not bool((result.out[:3] == UNTOUCHED).any())


def test_many_short_sequences_beside_a_long_one(judge: Judge) -> None:
    """A prefill of more tokens than all the others have together."""
    problem = replace(BASE, varlen_query=True, query_part="short", kv_layout="HND")
    call = many_short_beside_a_long_one(problem)
    result = judge(problem, call)
    assert bool((result.out[:400] == UNTOUCHED).all())
    assert bool((result.out[417:434] == UNTOUCHED).all())
    assert bool((result.out[450:] == 0).all())


@pytest.mark.parametrize("kv_dtype", [torch.int8, *FP8], ids=str)
@every_layout
def test_eight_bit_caches(judge: Judge, kv_dtype: torch.dtype, layout: KVLayout) -> None:
    problem = replace(BASE, dtype=torch.float16, kv_dtype=kv_dtype, head_dim=64, kv_layout=layout)
    for scales in ("none", "float", "tensor", "per_head"):
        judge(replace(problem, kv_scales=scales))


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "block_size"),
    [
        (torch.bfloat16, 14, 2, 80, 24),
        (torch.float32, 24, 1, 40, 8),
        (torch.float32, 12, 1, 256, 32),
        (torch.float16, 2, 2, 128, 16),
        (torch.bfloat16, 10, 2, 120, 144),
    ],
    ids=["bf16-g7-d80-b24", "fp32-g24-d40-b8", "fp32-g12-d256-b32", "fp16-g1-d128", "bf16-g5-d120"],
)
def test_sizes(judge: Judge, dtype, heads, kv_heads, head_dim, block_size) -> None:
    sizes = Problem("cpu", dtype, dtype, heads, kv_heads, head_dim, block_size, return_lse=True)
    for layout in ("packed", "NHD"):
        for varlen in (False, True):
            judge(replace(sizes, kv_layout=layout, varlen_query=varlen))


@every_layout
def test_caches_that_wide_loads_cannot_read(judge: Judge, layout: KVLayout) -> None:
    """One element off: a misaligned wide load is silently wrong on some devices."""
    problem = replace(QWEN, kv_layout=layout)
    call = make_call(problem)
    call.key_cache, call.value_cache = shifted(call.key_cache), shifted(call.value_cache)
    judge(problem, call)


def test_strides_of_a_pool(judge: Judge) -> None:
    """Keys and values side by side, queries cut out of a wider tensor."""
    problem = replace(BASE, kv_layout="NHD")
    call = make_call(problem)
    pool = torch.stack([call.key_cache, call.value_cache], dim=3)
    call.key_cache, call.value_cache = pool.unbind(3)
    fused = torch.full((call.query.shape[0], 10, 40), float("nan"))
    fused[:, 2:8, 4:36] = call.query
    call.query = fused[:, 2:8, 4:36]
    judge(problem, call)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 1000])
def test_any_number_of_splits(judge: Judge, splits: int) -> None:
    problem = replace(BASE, sinks=True, varlen_query=True)
    judge(problem, replace(make_call(problem), num_splits=splits))


@pytest.mark.parametrize("length", [2**31 - 1, 0x7FFF7FFF, 400, -1, -(2**31)])
def test_lengths_that_no_host_has_checked(judge: Judge, length: int) -> None:
    call = make_call(BASE)
    call.max_seq_len = 350
    call.seq_lens[2] = length
    result = judge(BASE, call)
    assert bool(result.out[2].isnan().all()) == (length > 350)


def test_a_length_beyond_the_hosts_bound_with_a_whole_table(judge: Judge) -> None:
    call = make_call(BASE)
    call.max_seq_len = 300
    assert int(call.seq_lens[4]) == 301
    assert bool(judge(BASE, call).out[4].isnan().all())


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_wrong_bound_of_query_tokens_is_told_by_its_sequences_alone(
    judge: Judge, libraries: Libraries, most: int
) -> None:
    problem = replace(BASE, varlen_query=True)
    call = make_call(problem)
    right = judge(problem, call)
    wrong = with_bound_of_queries(call, most)
    CudaRunner(libraries.of(problem), problem)(wrong)
    assert_told_by_its_sequences(wrong, right, 1e-5)


@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_blocks_behind_the_window_may_be_freed(judge: Judge, layout: KVLayout) -> None:
    problem = replace(BASE, window=True, varlen_query=True, kv_layout=layout)
    call = make_call(problem)
    call.block_tables[4, : (301 - 1 + 1 - 17) // 16] = 2**31 - 1
    assert not bool(judge(problem, call).out.isnan().all())


def test_a_long_context(judge: Judge) -> None:
    problem = replace(BASE, kv_layout="HND")
    judge(problem, long_call(problem, [5000, 1, 777]))


def test_batch_invariant_bits_do_not_follow_the_batch(judge: Judge) -> None:
    problem = replace(BASE, kv_layout="HND", batch_invariant=True)
    batch = replace(long_call(problem, [3, 4500, 700, 2048]), batch_invariant=True)
    together = judge(problem, batch)
    for row in range(4):
        one = slice(row, row + 1)
        alone = replace(
            batch, query=batch.query[one], out=batch.out[one], seq_lens=batch.seq_lens[one],
            block_tables=batch.block_tables[one], max_seq_len=int(batch.seq_lens[row]),
        )  # fmt: skip
        assert torch.equal(judge(problem, alone).out, together.out[one])


def test_bounds_that_grow_with_each_step_share_a_plan(libraries: Libraries) -> None:
    """And each is kept to the token all the same."""
    runner = CudaRunner(libraries.of(BASE), BASE)
    call = make_call(BASE)
    call.plans = {}
    for bound in (270, 285, 300):
        call.max_seq_len = bound
        for length, is_nan in ((bound, False), (bound + 1, True)):
            call.seq_lens[4] = length  # of 301 tokens that are there
            call.out.fill_(float("nan"))
            runner(call)
            assert bool(call.out[4].isnan().all()) == is_nan
    assert len(call.plans) == 1
    call.max_seq_len = 600
    runner(call)
    assert len(call.plans) == 2


@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_no_blocks_at_all(judge: Judge, layout: KVLayout) -> None:
    problem = replace(BASE, kv_layout=layout)
    call = make_call(problem)
    call.key_cache, call.value_cache = call.key_cache[:0], call.value_cache[:0]
    assert call.value_cache.data_ptr() == 0
    result = judge(problem, call)
    assert result.out[:, 0, 0].isnan().tolist() == [n > 0 for n in call.seq_lens.tolist()]


def test_no_sequences_and_no_tokens(judge: Judge) -> None:
    problem = replace(BASE, varlen_query=True)
    call = make_call(problem)
    none = without_sequences(call)
    assert bool((judge(problem, none).out == 0).all())
    judge(problem, replace(none, query=call.query[:0], out=call.out[:0], max_query_len=0))


def test_lengths_whose_last_positions_no_int_holds(libraries: Libraries) -> None:
    """No row of zeros for want of work: such a sequence is refused."""
    problem = replace(BASE, block_size=2**22, kv_layout="NHD")
    call = lengths_at_the_end_of_int(problem)
    library = libraries.of(problem)
    library.emulation_configure(32, 0)
    CudaRunner(library, problem)(call)
    assert call.out[:, 0, 0].isnan().tolist() == [False, True, True, True]


def test_compiled_as_for_corex(judge: Judge) -> None:
    judge(QWEN, None, "-D__ILUVATAR__")


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 32), ("float32", 136), ("float16", 80)]
)
def test_nothing_is_read_or_written_outside(
    libraries: Libraries, dtype: str, head_dim: int
) -> None:
    """Each tensor ends where memory ends. Heads of 136 and 80 leave lanes without an element."""
    kind = getattr(torch, dtype)
    problem = replace(BASE, dtype=kind, kv_dtype=kind, head_dim=head_dim)
    path = str(libraries.path(problem))
    done = run_python(outside([path], dtype, head_dim))
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_what_is_read_outside_is_noticed(libraries: Libraries) -> None:
    path = str(libraries.path(BASE))
    done = run_python(outside([path], "float32", 32, "step over the end"))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "alive\n"), done.stderr
