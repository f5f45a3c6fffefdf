"""The tuned kernels on hard problems, their instructions emulated, against the oracle."""

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
    judge_orders,
    lengths_at_the_end_of_int,
    long_call,
    many_short_beside_a_long_one,
    outside,
    same_bits,
    without_sequences,
)
from _emulation import TUNED_ALONE, Libraries, tuned

from pagedattn.backends.cuda import launch
from pagedattn.backends.cuda.abi import REFUSED
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import SHORT_QUERIES, Call, KVLayout, Problem
from pagedattn.hard_problems import UNTOUCHED, make_call

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = FP8
BASE = Problem("cpu", HALF, HALF, 6, 2, 64, 16, return_lse=True)
QWEN = replace(BASE, num_heads=12, head_dim=256)
#: the second half of an item lies in another block than the first
NARROW = replace(BASE, head_dim=16, block_size=24)
ITEMS = 26  # of a KV head in make_call's problem: of 16 tokens each
every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
each_order = pytest.mark.parametrize("layout", ["packed", "NHD"])
either_mode = pytest.mark.parametrize("varlen", [False, True], ids=["decode", "varlen"])
#: copies of 16 bytes a lane or bulk copies
either_arch = pytest.mark.parametrize("arch", [80, 90])

Judge = Callable[..., Call]


@pytest.fixture
def judge(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """As `judge_orders`, on the tuned kernels alone; `sms` is what the device is said to have."""

    def judge(problem: Problem, call: Call | None = None, arch: int = 90, sms: int = 8) -> Call:
        call = call or make_call(problem, seed=torch.initial_seed() % 1000)
        library = libraries.of(problem, *tuned(arch), "-O1", source=TUNED_ALONE)
        library.emulation_capability(arch // 10)
        library.emulation_bank_conflicts()
        monkeypatch.setattr(launch, "_EMULATED_SMS", sms)
        runner = CudaRunner(library, problem)

        def run(call: Call) -> None:
            assert runner.tuned(call) == 0

        result = judge_orders(problem, call, library, run, (32, 32), 1e-4)
        if not _rows_of_32_bytes(problem):
            assert library.emulation_bank_conflicts() == 0
        return result

    return judge


def _run(libraries: Libraries, problem: Problem, call: Call, arch: int = 90) -> Call:
    """Once, without a judge."""
    library = libraries.of(problem, *tuned(arch), "-O1", source=TUNED_ALONE)
    library.emulation_configure(32, 0)
    assert CudaRunner(library, problem).tuned(call) == 0
    assert library.emulation_fault() is None
    return call


def _rows_of_32_bytes(problem: Problem) -> bool:
    """Packed values of 16 bits, 16 tokens to a row: two of eight rows fall into the same banks."""
    wide = problem.kv_dtype.itemsize == 2
    return problem.kv_layout == "packed" and wide and problem.block_size % 16 == 0


@every_layout
@either_mode
@either_arch
def test_layouts(judge: Judge, layout: KVLayout, varlen: bool, arch: int) -> None:
    for problem in (BASE, QWEN):
        judge(replace(problem, kv_layout=layout, varlen_query=varlen), arch=arch)


@pytest.mark.parametrize("sms", [1, 3, 40])
@each_order
@either_arch
def test_teams_and_partitions(judge: Judge, layout: KVLayout, sms: int, arch: int) -> None:
    """From one warp for a sequence to several partitions of it."""
    judge(replace(BASE, kv_layout=layout), arch=arch, sms=sms)


@each_order
@either_mode
@pytest.mark.parametrize("feature", ["window", "softcap", "alibi", "sinks", "batch_invariant"])
def test_features(judge: Judge, layout: KVLayout, varlen: bool, feature: str) -> None:
    features: dict[str, Any] = {feature: True}
    judge(replace(BASE, kv_layout=layout, varlen_query=varlen, **features))


def test_all_features_at_once(judge: Judge) -> None:
    features = {"window": True, "softcap": True, "alibi": True, "sinks": True}
    judge(_with(BASE, varlen_query=True, **features))


def _with(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, **changes)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "group", "block_size", "arch"),
    [
        (16, HALF, HALF, 1, 8, 90),
        (16, BF16, INT8, 3, 16, 90),
        (32, BF16, BF16, 7, 24, 80),
        (48, HALF, HALF, 24, 8, 90),
        (64, HALF, E4M3, 8, 32, 90),
        (80, BF16, BF16, 7, 144, 80),
        (96, HALF, INT8, 12, 24, 80),
        (112, HALF, E4M3, 12, 32, 80),
        (128, BF16, E5M2, 1, 32, 90),
        (144, HALF, HALF, 5, 16, 90),
        (160, BF16, INT8, 2, 16, 80),
        (176, HALF, E5M2, 7, 144, 80),
        (192, BF16, BF16, 8, 24, 90),
        (208, HALF, HALF, 1, 32, 80),
        (224, BF16, E4M3, 3, 144, 90),
        (240, BF16, INT8, 5, 144, 90),
        (256, HALF, INT8, 12, 8, 90),
    ],
)
def test_sizes_and_types(
    judge: Judge, libraries: Libraries, head_dim, dtype, kv_dtype, group, block_size, arch
) -> None:
    """Each head size; packed 8-bit caches are served where 16 tokens of a block are 16 bytes."""
    kv_heads = 1 if group > 8 else 2
    sizes = (group * kv_heads, kv_heads, head_dim, block_size)
    problem = Problem("cpu", dtype, kv_dtype, *sizes, return_lse=True)
    narrow = kv_dtype.itemsize == 1
    scales = ("per_head", "float", "tensor") if narrow else ("none",) * 3
    for layout, kind in zip(("packed", "NHD", "HND"), scales, strict=True):
        one = _with(problem, kv_layout=layout, varlen_query=layout == "NHD", kv_scales=kind)
        if layout == "packed" and narrow and block_size % 16:
            library = libraries.of(problem, *tuned(arch), "-O1", source=TUNED_ALONE)
            assert CudaRunner(library, one).tuned(make_call(one)) == REFUSED
        else:
            judge(one, arch=arch)


@either_arch
def test_packed_values_read_their_banks_twice(
    judge: Judge, libraries: Libraries, arch: int
) -> None:
    """As is known of them; the judge holds every other order to no conflict at all."""
    judge(BASE, arch=arch)
    library = libraries.of(BASE, *tuned(arch), "-O1", source=TUNED_ALONE)
    matrices = BASE.num_kv_heads * ITEMS * BASE.head_dim // 16 * 4
    assert library.emulation_bank_conflicts() == 2 * matrices  # in both runs


@either_arch
def test_strides_of_a_pool(judge: Judge, arch: int) -> None:
    """Keys and values side by side, queries cut out of a wider tensor: served as they are."""
    problem = replace(BASE, kv_layout="NHD")
    call = make_call(problem)
    pool = torch.stack([call.key_cache, call.value_cache], dim=3)
    call.key_cache, call.value_cache = pool.unbind(3)
    fused = torch.full((call.query.shape[0], 10, 72), float("nan"), dtype=HALF)
    fused[:, 2:8, 4:68] = call.query
    call.query = fused[:, 2:8, 4:68]
    judge(problem, call, arch=arch)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 1000])
@either_mode
def test_any_number_of_splits(judge: Judge, splits: int, varlen: bool) -> None:
    problem = replace(BASE, sinks=True, varlen_query=varlen)
    judge(problem, replace(make_call(problem), num_splits=splits))


@pytest.mark.parametrize("length", [2**31 - 1, 0x7FFF7FFF, 400, -1, -(2**31)])
@each_order
def test_lengths_that_no_host_has_checked(judge: Judge, layout: KVLayout, length: int) -> None:
    problem = replace(BASE, kv_layout=layout)
    call = make_call(problem)
    call.max_seq_len = 350
    call.seq_lens[2] = length
    result = judge(problem, call)
    assert bool(result.out[2].isnan().all()) == (length > 350)


def test_a_length_beyond_the_hosts_bound_with_a_whole_table(judge: Judge) -> None:
    call = make_call(BASE)
    call.max_seq_len = 300
    assert int(call.seq_lens[4]) == 301
    assert bool(judge(BASE, call).out[4].isnan().all())


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, "one too many"])
@each_order
def test_a_bad_block_is_told_by_its_sequence_alone(
    judge: Judge, layout: KVLayout, bad: int | str
) -> None:
    problem = replace(BASE, kv_layout=layout)
    call = make_call(problem)
    call.block_tables[4, 11] = call.key_cache.shape[0] if isinstance(bad, str) else bad
    assert bool(judge(problem, call, arch=90, sms=40).out[4].isnan().all())


@each_order
def test_no_blocks_at_all(judge: Judge, layout: KVLayout) -> None:
    problem = replace(BASE, kv_layout=layout)
    call = make_call(problem)
    call.key_cache, call.value_cache = call.key_cache[:0], call.value_cache[:0]
    result = judge(problem, call)
    assert result.out[:, 0, 0].isnan().tolist() == [n > 0 for n in call.seq_lens.tolist()]


@each_order
def test_blocks_behind_the_window_may_be_freed(judge: Judge, layout: KVLayout) -> None:
    problem = replace(BASE, window=True, varlen_query=True, kv_layout=layout)
    call = make_call(problem)
    call.block_tables[4, : (301 - 1 + 1 - 17) // 16] = 2**31 - 1
    assert not bool(judge(problem, call).out.isnan().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@each_order
def test_what_a_sequence_holds_is_seen_by_no_other(
    libraries: Libraries, layout: KVLayout, value: float
) -> None:
    problem = replace(BASE, kv_layout=layout, varlen_query=True)
    call = make_call(problem)
    clean = _run(libraries, problem, replace(call, out=call.out.clone()))
    call.key_cache[call.block_tables[4, :19].long()] = value
    call.value_cache[call.block_tables[4, :19].long()] = value
    _run(libraries, problem, call)
    starts = call.host_query_start
    assert starts is not None
    others = [t for t in range(len(call.out)) if not starts[4] <= t < starts[5]]
    assert torch.equal(call.out[others].nan_to_num(6e4), clean.out[others].nan_to_num(6e4))
    assert bool(call.out[starts[4] : starts[5]].isnan().all())
    assert not bool(clean.out[starts[4] : starts[5]].isnan().any())


@each_order
@either_arch
def test_a_long_context(judge: Judge, layout: KVLayout, arch: int) -> None:
    """A warp has more items than the 64 whose blocks it knows from the start."""
    problem = replace(NARROW, kv_layout=layout)
    judge(problem, long_call(problem, [5000, 1, 777, 1030]), arch=arch, sms=1)
    windowed = replace(long_call(problem, [5000, 1, 777, 1030]), window=4001)
    judge(replace(problem, window=True), windowed, arch=arch, sms=1)


@pytest.mark.parametrize(
    ("num_heads", "lengths"), [(2, [8500]), (2, [17000, 3, 8193]), (18, [6200])]
)
@pytest.mark.parametrize("varlen", [False, True], ids=["decode", "varlen"])
def test_more_partitions_than_a_merge_asks_for_at_once(
    judge: Judge, num_heads: int, lengths: list[int], varlen: bool
) -> None:
    """Values are asked for in turns of 96 partitions, of 128 where there are few rows, and states
    96 at a time."""
    problem = replace(NARROW, kv_layout="NHD", num_heads=num_heads, varlen_query=varlen)
    call = replace(long_call(problem, lengths), num_splits=1000)
    if varlen:
        call.query_start_loc = torch.arange(len(lengths) + 1, dtype=torch.int32)
    judge(problem, call)


@either_arch
def test_batch_invariant_bits_do_not_follow_the_batch(judge: Judge, arch: int) -> None:
    """Alone a short sequence has one partition, whose result is written at once."""
    problem = replace(NARROW, kv_layout="HND", batch_invariant=True)
    batch = replace(long_call(problem, [3, 4500, 700, 2048]), batch_invariant=True)
    together = judge(problem, batch, arch=arch)
    assert together.lse is not None
    for row in range(4):
        one = slice(row, row + 1)
        alone = replace(
            batch, query=batch.query[one], out=batch.out[one], seq_lens=batch.seq_lens[one],
            block_tables=batch.block_tables[one], max_seq_len=int(batch.seq_lens[row]),
        )  # fmt: skip
        result = judge(problem, alone, arch=arch, sms=132)
        assert same_bits(result, replace(together, out=together.out[one], lse=together.lse[one]))


@pytest.mark.parametrize("arch", [80, 90])
def test_no_sequences_and_no_tokens(judge: Judge, libraries: Libraries, arch: int) -> None:
    problem = replace(BASE, varlen_query=True)
    none = without_sequences(make_call(problem))
    assert bool((judge(problem, none, arch=arch).out == 0).all())
    library = libraries.of(problem, *tuned(arch))
    empty = replace(none, query=none.query[:0], out=none.out[:0], max_query_len=0)
    runner = CudaRunner(library, problem)
    assert runner.tuned(empty) == 0
    runner(empty)


@every_layout
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch_invariant"])
def test_short_sequences_alone(judge: Judge, layout: KVLayout, batch_invariant: bool) -> None:
    """The others' rows are left alone, and the workspace has no room for them."""
    problem = replace(BASE, varlen_query=True, query_part="short", kv_layout=layout)
    problem = replace(problem, batch_invariant=batch_invariant, sinks=True)
    call = make_call(problem)
    for splits in (None, 5):
        result = judge(problem, replace(call, num_splits=splits))
        assert bool((result.out[3 + SHORT_QUERIES] == UNTOUCHED).all())
        assert not bool((result.out[:3] == UNTOUCHED).any())


def test_many_short_sequences_beside_a_long_one(judge: Judge) -> None:
    """A prefill of more tokens than all the others have together."""
    problem = replace(NARROW, varlen_query=True, query_part="short", kv_layout="HND")
    result = judge(problem, many_short_beside_a_long_one(problem))
    assert bool((result.out[:400] == UNTOUCHED).all())
    assert bool((result.out[417:434] == UNTOUCHED).all())
    assert bool((result.out[450:] == 0).all())


def test_lengths_whose_last_positions_no_int_holds(libraries: Libraries) -> None:
    """No row of zeros for want of work: such a sequence is refused."""
    problem = replace(NARROW, block_size=2**22, kv_layout="NHD")
    call = lengths_at_the_end_of_int(problem)
    library = libraries.of(problem, *tuned(80), "-O1", source=TUNED_ALONE)
    library.emulation_configure(32, 0)
    assert CudaRunner(library, problem).tuned(call) == 0
    assert call.out[:, 0, 0].isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("head_dim", [16, 64, 144])
def test_nothing_is_read_or_written_outside(libraries: Libraries, head_dim: int) -> None:
    """Each tensor, and each block's shared memory, ends where memory ends."""
    problem = replace(BASE, head_dim=head_dim)
    paths = [
        str(libraries.path(problem, *tuned(arch), "-O1", source=TUNED_ALONE)) for arch in (80, 90)
    ]
    done = run_python(outside(paths, "float16", head_dim, tuned=True))
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_read_outside_would_be_noticed(libraries: Libraries) -> None:
    paths = [str(libraries.path(BASE, *tuned(90), "-O1", source=TUNED_ALONE))]
    done = run_python(outside(paths, "float16", 64, "step over the end", tuned=True))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "alive\n"), done.stderr
