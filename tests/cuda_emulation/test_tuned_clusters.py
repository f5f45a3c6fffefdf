"""A call whose partitions are merged by their own blocks, as a cluster: the results, and when."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from _emulated_calls import (
    assert_told_by_its_sequences,
    judge_orders,
    long_call,
    many_short_beside_a_long_one,
    shifted,
    with_bound_of_queries,
)
from _emulation import TUNED_ALONE, Libraries, tuned

from pagedattn.backends.cuda import launch
from pagedattn.backends.cuda.abi import REFUSED
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.hard_problems import UNTOUCHED, make_call

HALF, BF16 = torch.float16, torch.bfloat16
BASE = Problem("cpu", HALF, HALF, 6, 2, 64, 16, return_lse=True)
#: one query head a KV head, so that several query tokens are still one tile of rows
SINGLE = replace(BASE, num_heads=2, varlen_query=True)
SMALL = replace(BASE, head_dim=16, kv_layout="NHD")
MANY = 1000  # clusters at a time: as many as any call here has
each_order = pytest.mark.parametrize("layout", ["packed", "NHD"])

Judge = Callable[..., Call]
Device = Callable[..., tuple[Any, CudaRunner]]


@pytest.fixture
def device(libraries: Libraries) -> Iterator[Device]:
    """A library on a device that runs so many clusters at a time."""
    used: list[Any] = []

    def device(
        problem: Problem, together: int = MANY, arch: int = 90
    ) -> tuple[ctypes.CDLL, CudaRunner]:
        library = libraries.of(problem, *tuned(arch), "-O1", source=TUNED_ALONE)
        used.append(library)
        library.emulation_capability(arch // 10)
        library.emulation_clusters(together)
        library.emulation_most_clustered()
        library.emulation_configure(32, 0)
        return library, CudaRunner(library, problem)

    yield device
    for library in used:  # they are other tests', too
        library.emulation_clusters(0)


@pytest.fixture
def judge(device: Device) -> Judge:
    """As `judge_orders`, the blocks of each row's partitions being a cluster of `splits`."""

    def judge(problem: Problem, call: Call | None = None, splits: int = 3) -> Call:
        call = replace(call or make_call(problem), num_splits=splits)
        library, runner = device(problem)

        def run(call: Call) -> None:
            assert runner.tuned(call) == 0

        result = judge_orders(problem, call, library, run, (32, 32), 1e-4)
        assert library.emulation_most_clustered() == splits
        return result

    return judge


@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
@pytest.mark.parametrize("splits", [2, 3, 5])
def test_layouts_and_sizes_of_clusters(judge: Judge, layout: KVLayout, splits: int) -> None:
    judge(replace(BASE, kv_layout=layout), splits=splits)


@pytest.mark.parametrize("splits", [7, 8, 9, 15, 16])
def test_large_clusters(judge: Judge, splits: int) -> None:
    """More than eight blocks must be asked for; a share of the results may be no piece at all."""
    judge(SMALL, long_call(SMALL, [1024, 3, 0, 700]), splits=splits)
    for group in (1, 8):
        other = replace(SMALL, num_heads=2 * group)
        judge(other, long_call(other, [1024, 3, 0, 700]), splits=splits)


@pytest.mark.parametrize(
    "features", [["softcap"], ["alibi"], ["sinks"], [], ["softcap", "alibi", "sinks"]]
)
@each_order
def test_features(judge: Judge, layout: KVLayout, features: list[str]) -> None:
    given: dict[str, Any] = dict.fromkeys(features, True)
    judge(replace(SINGLE, kv_layout=layout, **given))


@each_order
def test_windows(judge: Judge, layout: KVLayout) -> None:
    problem = replace(SMALL, window=True, kv_layout=layout)
    judge(problem, replace(long_call(problem, [1024, 3, 0, 700]), window=500))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "group", "block_size"),
    [
        (48, HALF, HALF, 8, 8),
        (80, BF16, BF16, 7, 144),
        (144, HALF, torch.int8, 5, 16),
        (256, BF16, torch.float8_e4m3fn, 6, 32),
    ],
)
def test_sizes_and_types(
    judge: Judge, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, group: int,
    block_size: int,
) -> None:  # fmt: skip
    narrow = kv_dtype.itemsize == 1
    problem = Problem(
        "cpu", dtype, kv_dtype, group, 1, head_dim, block_size, "HND", return_lse=True,
        kv_scales="per_head" if narrow else "none",
    )  # fmt: skip
    judge(problem)


@pytest.mark.parametrize("length", [2**31 - 1, 0x7FFF7FFF, 400, -1, -(2**31)])
def test_lengths_that_no_host_has_checked(judge: Judge, length: int) -> None:
    call = make_call(BASE)
    call.max_seq_len = 350
    call.seq_lens[2] = length
    assert bool(judge(BASE, call).out[2].isnan().all()) == (length > 350)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1])
@each_order
def test_a_bad_block_is_told_by_its_sequence_alone(
    judge: Judge, layout: KVLayout, bad: int
) -> None:
    problem = replace(BASE, kv_layout=layout)
    call = make_call(problem)
    call.block_tables[4, 11] = bad
    assert bool(judge(problem, call).out[4].isnan().all())


def test_values_that_are_not_finite_stay_in_their_sequence(judge: Judge) -> None:
    call = make_call(BASE)
    clean = judge(BASE, call)
    call.value_cache[call.block_tables[4, :19].long()] = float("nan")
    result = judge(BASE, call)
    assert torch.equal(result.out[:4], clean.out[:4])
    assert bool(result.out[4].isnan().all())
    assert not bool(clean.out[4].isnan().any())


@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_wrong_bound_of_query_tokens_is_told_by_its_sequences_alone(
    device: Device, judge: Judge, most: int
) -> None:
    call = replace(make_call(SINGLE), num_splits=3)
    right = judge(SINGLE, call)
    wrong = with_bound_of_queries(call, most)
    library, runner = device(SINGLE)
    assert runner.tuned(wrong) == 0
    assert library.emulation_most_clustered() == 3
    assert library.emulation_fault() is None
    assert_told_by_its_sequences(wrong, right, 2e-3)


@pytest.mark.parametrize("starts", [[0, 1, 5], [-2, 1, 3], [0, 1, 2**31 - 1], [0, 5, 2], [3, 4, 5]])
def test_starts_that_no_host_has_checked_write_nothing_outside(
    device: Device, starts: list[int]
) -> None:
    call = long_call(replace(SMALL, num_heads=2), [600, 90, 33])
    rows, heads, dims = call.query.shape
    out = torch.full((3 * rows, heads, dims), UNTOUCHED, dtype=HALF)
    lse = torch.full((3 * rows, heads), UNTOUCHED)
    call = replace(
        call, out=out[rows : 2 * rows], lse=lse[rows : 2 * rows], num_splits=3, max_query_len=3,
        seq_lens=call.seq_lens[:2], block_tables=call.block_tables[:2],
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
    )  # fmt: skip
    library, runner = device(replace(SMALL, num_heads=2, varlen_query=True))
    assert runner.tuned(call) == 0
    assert library.emulation_most_clustered() == 3
    assert library.emulation_fault() is None
    for held in (out, lse):
        assert bool((held[:rows] == UNTOUCHED).all())
        assert bool((held[2 * rows :] == UNTOUCHED).all())


def test_short_sequences_alone(device: Device) -> None:
    """The blocks of one that is another launch's meet their cluster as well."""
    problem = replace(SMALL, num_heads=2, varlen_query=True, query_part="short")
    call = many_short_beside_a_long_one(problem)
    call = replace(call, lse=None, max_query_len=8, num_splits=3)
    results = []
    for together, blocks in ((MANY, 3), (0, 1)):
        results.append(torch.full_like(call.out, UNTOUCHED))
        library, runner = device(problem, together)
        assert runner.tuned(replace(call, out=results[-1])) == 0
        assert library.emulation_most_clustered() == blocks
        assert library.emulation_fault() is None
    clustered, merged = results
    torch.testing.assert_close(clustered, merged, rtol=0, atol=1e-3)
    elsewhere = (clustered == UNTOUCHED).all(-1).all(-1)
    assert elsewhere.nonzero().flatten().tolist() == [*range(400), *range(401, 450)]
    assert bool((clustered[450:] == 0).all())


@pytest.mark.parametrize(
    ("splits", "changes"),
    [
        (1, {}),  # nothing to merge
        (4, {"num_heads": 48}),  # several tiles of rows share what is read
        (17, {}),  # more than a cluster can have
        (5, {"batch_invariant": True}),  # the order of its sum must not follow the batch
    ],
)
def test_calls_that_form_none(device: Device, splits: int, changes: dict[str, Any]) -> None:
    problem = replace(SMALL, **changes)
    invariant = problem.batch_invariant
    call = replace(long_call(problem, [9000, 3]), num_splits=splits, batch_invariant=invariant)
    assert device(problem)[1]._plan(call, "tuned").params.num_splits == splits
    library, runner = device(problem)
    assert runner.tuned(call) == 0
    assert library.emulation_most_clustered() == 1


def test_not_before_sm_90(device: Device) -> None:
    call = replace(long_call(SMALL, [1000, 3]), num_splits=4)
    library, runner = device(SMALL, arch=80)
    assert runner.tuned(call) == 0
    assert library.emulation_most_clustered() == 1
    assert library.emulation_fault() is None


@pytest.mark.parametrize(
    ("bound", "together", "clustered"),
    [
        (1024, 5, False),  # of the call's six
        (1024, 6, True),
        (4 * 64 * 8, 6, True),  # a warp has eight items
        (4 * 64 * 9, 6, False),  # two blocks of a multiprocessor are more than single ones need
        (4 * 64 * 9, 11, False),
        (4 * 64 * 9, 12, True),
    ],
)
def test_as_many_clusters_as_lie_side_by_side(
    device: Device, bound: int, together: int, clustered: bool
) -> None:
    """Six clusters of four on 24 multiprocessors that hold two blocks each."""
    call = long_call(SMALL, [1000, 3, 70])
    call = replace(call, num_splits=4, max_seq_len=bound)
    library, runner = device(SMALL, together)
    library.emulation_multiprocessors(24)
    assert runner.tuned(call) == 0
    assert (library.emulation_most_clustered() == 4) == clustered
    assert library.emulation_fault() is None


@pytest.mark.parametrize(
    ("longest", "blocks"),
    [(200, 4), (1024, 16), (1500, 16), (4096, 16), (4097, 1), (100_000, 1)],
)
@pytest.mark.parametrize("sequences", [1, 2])
def test_short_contexts_have_as_few_partitions_as_a_cluster_merges(
    device: Device, monkeypatch: pytest.MonkeyPatch, longest: int, blocks: int, sequences: int
) -> None:
    """Unless too few multiprocessors are then at work: two KV heads of one sequence."""
    monkeypatch.setattr(launch, "_EMULATED_SMS", 132)
    call = replace(long_call(SMALL, [200] * sequences), max_seq_len=longest)
    library, runner = device(SMALL)
    assert runner.tuned(call) == 0
    fewer = longest > 1024 and sequences == 1
    assert library.emulation_most_clustered() == (1 if fewer else blocks)


def test_a_window_makes_contexts_short(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_EMULATED_SMS", 132)
    problem = replace(SMALL, window=True)
    for window, blocks in ((3000, 16), (5000, 1)):
        call = replace(long_call(problem, [200] * 2), max_seq_len=100_000, window=window)
        library, runner = device(problem)
        assert runner.tuned(call) == 0
        assert library.emulation_most_clustered() == blocks
    call = replace(call, window=500)
    library, runner = device(problem, together=4)
    library.emulation_multiprocessors(64)  # of two blocks each, but one is enough
    assert runner.tuned(call) == 0
    assert library.emulation_most_clustered() > 1, "a warp has few items"


def test_a_device_that_does_not_say_forms_none(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    call = replace(long_call(SMALL, [1000, 3]), num_splits=4)
    library, runner = device(SMALL, together=-1)
    with caplog.at_level(logging.DEBUG, "pagedattn"):
        assert runner.tuned(call) == 0
    assert library.emulation_most_clustered() == 1
    assert "does not say how many it has room for (the launch failed)" in caplog.text


def test_no_address_decides(device: Device) -> None:
    """The first call of its shapes may be one that is refused."""
    call = replace(long_call(SMALL, [1000, 3]), num_splits=4, plans={})
    library, runner = device(SMALL)
    assert runner.tuned(replace(call, key_cache=shifted(call.key_cache))) == REFUSED
    assert runner.tuned(call) == 0
    assert library.emulation_most_clustered() == 4


def test_the_librarys_own_entry_is_asked(libraries: Libraries) -> None:
    library = libraries.of(SMALL, *tuned(90))
    runner = CudaRunner(library, SMALL)
    call = replace(long_call(SMALL, [1000, 3]), num_splits=4)
    for together in (0, MANY):
        library.emulation_clusters(together)
        assert runner._plan(call, "tuned").params.clustered == (together == MANY)
    library.emulation_clusters(0)


def test_a_cluster_needs_no_workspace(device: Device) -> None:
    call = replace(long_call(SMALL, [1000, 3]), num_splits=4)
    for together in (0, MANY):
        _library, runner = device(SMALL, together)
        plan = runner._plan(call, "tuned")
        assert (plan.workspace == 0) == (together == MANY)


@pytest.mark.parametrize(
    ("name", "value"), [("num_splits", 17), ("team", 2), ("tokens_per_split", 2048)]
)
def test_one_that_the_kernel_cannot_form_is_refused(device: Device, name: str, value: int) -> None:
    """As a plan would be whose partitions are another call's."""
    call = replace(long_call(SMALL, [1500, 3]), num_splits=4)
    _library, runner = device(SMALL)
    plan = runner._plan(call, "tuned")
    assert plan.params.clustered == 1
    setattr(plan.params, name, value)
    plans: dict[object, object] = {}
    call = replace(call, plans=plans)
    assert runner.tuned(call) == 0
    (key,) = plans
    plans[key] = plan
    assert runner.tuned(call) == REFUSED
