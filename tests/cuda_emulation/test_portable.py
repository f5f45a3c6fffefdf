"""The portable kernels on hard problems, with warps of 32 and of 64, against the oracle."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from _backends import run_python
from _emulation import WARP_SIZES, Libraries
from torch import Tensor

from pagedattn import verify
from pagedattn.backends.cuda.launch import CudaRunner, _workspace
from pagedattn.backends.protocol import SHORT_QUERIES, Call, KVLayout, Problem
from pagedattn.hard_problems import UNTOUCHED, make_call

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
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
        results: list[Call] = []
        for warp, falling in zip(WARP_SIZES, (False, True), strict=True):
            lse = torch.empty(call.query.shape[:2])
            results.append(replace(call, out=torch.empty_like(call.out), lse=lse))
            for held in (results[-1].out, lse):
                held.fill_(UNTOUCHED)  # must stay in the rows of another part
            library.emulation_configure(warp, falling)
            CudaRunner(library, problem)(results[-1])
            assert library.emulation_fault() is None
        error, lse_error = verify.errors(results[0], verify.oracle(results[0], problem))
        assert error <= verify.TOLERANCE[problem.dtype] / 5
        assert lse_error <= 1e-5
        assert _same(results[0], results[1]), "the warp size changes the result"
        return results[0]

    return judge


def _same(one: Call, other: Call) -> bool:
    assert one.lse is not None
    assert other.lse is not None
    out = one.out.nan_to_num(nan=6e4), other.out.nan_to_num(nan=6e4)
    return torch.equal(*out) and torch.equal(one.lse.nan_to_num(6e4), other.lse.nan_to_num(6e4))


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
    assert _workspace(call, 3).numel() == 3 * room
    for splits in (None, 1, 5):
        result = judge(problem, replace(call, num_splits=splits))
        assert bool((result.out[3 + SHORT_QUERIES] == UNTOUCHED).all())
        assert not bool((result.out[:3] == UNTOUCHED).any())


def test_many_short_sequences_beside_a_long_one(judge: Judge) -> None:
    """A prefill of more tokens than all the others have together."""
    problem = replace(BASE, varlen_query=True, query_part="short", kv_layout="HND")
    call = _long_call([400, 3, 90, 17, 200])
    starts = [0, 400, 401, 417, 434, 450]
    query = torch.randn(455, 6, 32)
    call = replace(
        call, query=query, out=torch.empty_like(query), query_part="short",
        query_start_loc=torch.tensor(starts, dtype=torch.int32), max_query_len=SHORT_QUERIES,
    )  # fmt: skip
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
    call.key_cache, call.value_cache = _shifted(call.key_cache), _shifted(call.value_cache)
    judge(problem, call)


def _shifted(cache: Tensor) -> Tensor:
    room = torch.full((cache.numel() + 1,), float("nan"), dtype=cache.dtype)
    room[1:] = cache.flatten()
    return room[1:].view(cache.shape)


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
    wrong = replace(call, max_query_len=most, lse=torch.empty(call.query.shape[:2]))
    CudaRunner(libraries.of(problem), problem)(wrong)
    assert call.host_query_start is not None
    for first, end in pairwise(call.host_query_start):
        rows = slice(first, end)
        if end - first > most:
            assert bool(wrong.out[rows].isnan().all())
            assert wrong.lse is not None
            assert bool(wrong.lse[rows].isnan().all())
        else:
            torch.testing.assert_close(wrong.out[rows], right.out[rows], equal_nan=True)


@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_blocks_behind_the_window_may_be_freed(judge: Judge, layout: KVLayout) -> None:
    problem = replace(BASE, window=True, varlen_query=True, kv_layout=layout)
    call = make_call(problem)
    call.block_tables[4, : (301 - 1 + 1 - 17) // 16] = 2**31 - 1
    assert not bool(judge(problem, call).out.isnan().all())


def _long_call(lengths: list[int], head_dim: int = 32) -> Call:
    blocks = [-(-n // 16) for n in lengths]
    cache = torch.randn(2, sum(blocks), 2, 16, head_dim)
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    ids = torch.randperm(sum(blocks)).to(torch.int32)
    for row, own in enumerate(ids.split(blocks)):
        tables[row, : len(own)] = own
    query = torch.randn(len(lengths), 6, head_dim)
    return Call(
        query=query, key_cache=cache[0], value_cache=cache[1], block_tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), out=torch.empty_like(query),
        lse=torch.empty(query.shape[:2]), kv_layout="HND", scale=head_dim**-0.5,
        max_seq_len=max(blocks) * 16, max_query_len=1,
    )  # fmt: skip


def test_a_long_context(judge: Judge) -> None:
    judge(replace(BASE, kv_layout="HND"), _long_call([5000, 1, 777]))


def test_batch_invariant_bits_do_not_follow_the_batch(judge: Judge) -> None:
    problem = replace(BASE, kv_layout="HND", batch_invariant=True)
    batch = replace(_long_call([3, 4500, 700, 2048]), batch_invariant=True)
    together = judge(problem, batch)
    for row in range(4):
        one = slice(row, row + 1)
        alone = replace(
            batch, query=batch.query[one], out=batch.out[one], seq_lens=batch.seq_lens[one],
            block_tables=batch.block_tables[one], max_seq_len=int(batch.seq_lens[row]),
        )  # fmt: skip
        assert torch.equal(judge(problem, alone).out, together.out[one])


def test_no_sequences_and_no_tokens(judge: Judge) -> None:
    problem = replace(BASE, varlen_query=True)
    call = make_call(problem)
    none = replace(
        call, seq_lens=call.seq_lens[:0], block_tables=call.block_tables[:0],
        query_start_loc=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    assert bool((judge(problem, none).out == 0).all())
    judge(problem, replace(none, query=call.query[:0], out=call.out[:0], max_query_len=0))


def test_compiled_as_for_corex(judge: Judge) -> None:
    judge(QWEN, None, "-D__ILUVATAR__")


OUTSIDE = """
import ctypes, mmap, sys
import torch
from dataclasses import replace
from _emulation import load
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Problem
from pagedattn.hard_problems import make_call

def guarded(tensor):
    # its last byte is the last before a page that may not be read
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    kept.append(memory)
    view = torch.frombuffer(memory, dtype=tensor.dtype, offset=pages - size, count=tensor.numel())
    view.copy_(tensor.flatten())
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages
    assert libc.mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, 0) == 0
    return view.view(tensor.shape)

kept = []
library = load(sys.argv[1])
for layout in ("packed", "NHD", "HND"):
    problem = Problem("cpu", torch.float32, torch.float32, 6, 2, 32, 16, layout, True, True,
                      return_lse=True)
    for bad in (None, 10**6, -1, -2**31, 2**31 - 1):
        call = make_call(problem)
        if bad is not None:
            call.block_tables[4, 18] = bad
            call.seq_lens[2] = bad
        tensors = {k: v for k, v in vars(call).items() if isinstance(v, torch.Tensor)}
        call = replace(call, **{k: guarded(v) for k, v in tensors.items()})
        for warp in (32, 64):
            library.emulation_configure(warp, 0)
            CudaRunner(library, problem)(call)
print("alive", flush=True)
if len(sys.argv) > 2:
    ctypes.string_at(call.key_cache.data_ptr() + call.key_cache.numel() * 4, 1)
"""


def test_nothing_is_read_or_written_outside(libraries: Libraries) -> None:
    """Each tensor ends where memory ends."""
    path = str(libraries.path(BASE))
    done = run_python(f"import sys; sys.argv[1:] = [{path!r}]\n{OUTSIDE}")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    done = run_python(f"import sys; sys.argv[1:] = [{path!r}, 'step over the end']\n{OUTSIDE}")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "alive\n"), done.stderr
