"""Calls for the compiled kernels on the emulation, and what both kinds of them are held to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from pagedattn import verify
from pagedattn.backends.layouts import from_hnd
from pagedattn.backends.protocol import Call, Problem
from pagedattn.hard_problems import UNTOUCHED

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def judge_orders(
    problem: Problem,
    call: Call,
    library: ctypes.CDLL,
    run: Callable[[Call], None],
    warps: Sequence[int],
    lse_limit: float = 1e-5,
) -> Call:
    """Run a call at each warp size, threads in rising and in falling order; judge the first and
    hold the other to its bits."""
    results: list[Call] = []
    for warp, falling in zip(warps, (False, True), strict=True):
        lse = torch.empty(call.query.shape[:2])
        results.append(replace(call, out=torch.empty_like(call.out), lse=lse))
        for held in (results[-1].out, lse):
            held.fill_(UNTOUCHED)  # must stay in the rows of another part
        library.emulation_configure(warp, falling)
        run(results[-1])
        fault = library.emulation_fault()
        assert fault is None, fault.decode()
    error, lse_error = verify.errors(results[0], verify.oracle(results[0], problem))
    assert error <= verify.TOLERANCE[problem.dtype] / 5
    assert lse_error <= lse_limit
    assert same_bits(results[0], results[1]), "the order of the threads changes the result"
    return results[0]


def same_bits(one: Call, other: Call) -> bool:
    """Whether both results are the same, a NaN being like another."""
    assert one.lse is not None
    assert other.lse is not None
    out = one.out.nan_to_num(nan=6e4), other.out.nan_to_num(nan=6e4)
    return torch.equal(*out) and torch.equal(one.lse.nan_to_num(6e4), other.lse.nan_to_num(6e4))


def with_bound_of_queries(call: Call, most: int) -> Call:
    """The call as if no sequence had more query tokens; its results hold no NaN to begin with."""
    return replace(
        call,
        max_query_len=most,
        out=torch.full_like(call.out, UNTOUCHED),
        lse=torch.full(call.query.shape[:2], UNTOUCHED),
    )


def assert_told_by_its_sequences(wrong: Call, right: Call, atol: float) -> None:
    """Sequences of more query tokens than ``wrong.max_query_len`` are NaN, the others right."""
    assert right.host_query_start is not None
    assert wrong.lse is not None
    for first, end in pairwise(right.host_query_start):
        rows = slice(first, end)
        if end - first > wrong.max_query_len:
            assert bool(wrong.out[rows].isnan().all())
            assert bool(wrong.lse[rows].isnan().all())
        else:  # fewer rows may be another form's
            torch.testing.assert_close(
                wrong.out[rows], right.out[rows], rtol=0, atol=atol, equal_nan=True
            )


def shifted(tensor: Tensor) -> Tensor:
    """The same contents one element further on in memory, where wide loads are not aligned."""
    room = torch.full((tensor.numel() + 1,), float("nan"), dtype=tensor.dtype)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


def long_call(problem: Problem, lengths: list[int]) -> Call:
    """A decode call over sequences of these lengths, nothing beside them in the cache."""
    bs, heads, head_dim = problem.block_size, problem.num_heads, problem.head_dim
    blocks = [-(-n // bs) for n in lengths]
    cache = torch.randn(2, sum(blocks), problem.num_kv_heads, bs, head_dim).to(problem.kv_dtype)
    keys, values = from_hnd(cache[0], cache[1], problem.kv_layout)
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    ids = torch.randperm(sum(blocks)).to(torch.int32)
    for row, own in enumerate(ids.split(blocks)):
        tables[row, : len(own)] = own
    query = torch.randn(len(lengths), heads, head_dim).to(problem.dtype)
    return Call(
        query=query, key_cache=keys, value_cache=values, block_tables=tables,
        seq_lens=torch.tensor(lengths, dtype=torch.int32), out=torch.empty_like(query),
        lse=torch.empty(query.shape[:2]), kv_layout=problem.kv_layout, scale=head_dim**-0.5,
        max_seq_len=max(blocks) * bs, max_query_len=1,
    )  # fmt: skip


def many_short_beside_a_long_one(problem: Problem) -> Call:
    """Five sequences; the first and the fourth have more query tokens than `SHORT_QUERIES`, the
    first more than all others have together; five tokens belong to none."""
    call = long_call(problem, [400, 3, 90, 17, 200])
    query = torch.randn(455, *call.query.shape[1:]).to(problem.dtype)
    return replace(
        call, query=query, out=torch.empty_like(query), query_part="short",
        query_start_loc=torch.tensor([0, 400, 401, 417, 434, 450], dtype=torch.int32),
        max_query_len=16,
    )  # fmt: skip


def without_sequences(call: Call) -> Call:
    """Query tokens that all belong to no sequence."""
    return replace(
        call, seq_lens=call.seq_lens[:0], block_tables=call.block_tables[:0],
        query_start_loc=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


def lengths_at_the_end_of_int(problem: Problem) -> Call:
    """Decode of an empty sequence and of three that a table of 2^31 tokens could hold."""
    lengths = torch.tensor([0, 2**31 - 2**20 + 1, 2**31 - 17, 2**31 - 1], dtype=torch.int32)
    query = torch.randn(4, problem.num_heads, problem.head_dim).to(problem.dtype)
    sizes = (problem.block_size, problem.num_kv_heads, problem.head_dim)
    cache = torch.empty(0, *sizes, dtype=problem.kv_dtype)
    return Call(
        query=query, key_cache=cache, value_cache=cache, seq_lens=lengths,
        block_tables=torch.zeros(4, 2**31 // problem.block_size, dtype=torch.int32),
        out=torch.empty_like(query), lse=None, kv_layout="NHD", scale=1.0, max_seq_len=2**31,
        max_query_len=1, num_splits=1,
    )  # fmt: skip


#: A script; before it stand `paths` of libraries, their `dtype` and `head_dim`, the `warps` to run,
#: how many clusters the device has `together`, and whether the `tuned` kernels. With `over` it ends
#: by reading where it must not.
OUTSIDE = """
import ctypes, itertools, mmap
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
libraries = [load(path) for path in paths]
for library in libraries:
    assert library.emulation_guard_shared() == 0
for layout, window in itertools.product(("packed", "NHD", "HND"), (False, True)):
    # without a window the cache's last block is read, too
    sizes = (6, 2, head_dim, 16, layout, True, window)
    problem = Problem("cpu", dtype, dtype, *sizes, return_lse=True)
    for bad in (None, 10**6, -1, -2**31, 2**31 - 1):
        call = make_call(problem)
        if bad is not None:
            call.block_tables[4, 18] = bad
            call.seq_lens[2] = bad
        tensors = {k: v for k, v in vars(call).items() if isinstance(v, torch.Tensor)}
        call = replace(call, **{k: guarded(v) for k, v in tensors.items()})
        for library, warp, clusters in itertools.product(libraries, warps, together):
            library.emulation_configure(warp, 0)
            library.emulation_clusters(clusters)
            runner = CudaRunner(library, problem)
            if tuned:
                assert runner.tuned(call) == 0
            else:
                runner(call)
            assert library.emulation_fault() is None
print("alive", flush=True)
if over:
    ctypes.string_at(call.key_cache.data_ptr() + call.key_cache.nbytes, 1)
"""


def outside(
    paths: list[str], dtype: str, head_dim: int, over: str = "", *, tuned: bool = False
) -> str:
    """The script `OUTSIDE` for libraries whose queries and caches are of one type."""
    warps = (32,) if tuned else (32, 64)
    together = (0, 1000) if tuned else (0,)
    values = f"{(paths, head_dim, warps, together, tuned, over)!r}"
    names = f"paths, head_dim, warps, together, tuned, over = {values}"
    return f"import torch\n{names}\ndtype = torch.{dtype}\n{OUTSIDE}"
