"""How the torch path behaves: strides, precision, invariance, memory, threads, no waiting."""

from __future__ import annotations

import math
import mmap
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from _torch_calls import Road, assert_right, by_device_road, every_road, make_call
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn.backends.facts import Facts, TorchFacts
from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import Backend, Call, KVLayout, Problem
from pagedattn.backends.python_v2 import TorchBackend
from pagedattn.backends.python_v2.plan import plan_sequence
from pagedattn.backends.python_v2.precision import ExactFp32

every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])


def test_is_a_backend_that_is_always_there() -> None:
    backend = TorchBackend()
    assert isinstance(backend, Backend)
    facts = Facts("cpu", "3.10", "Linux", TorchFacts("2.1.0", None, None, None, False))
    assert backend.not_present_reasons(facts) == []
    assert backend.remedy(facts) is None
    problem = Problem("cpu", torch.float32, torch.float32, 6, 2, 64, 16)
    assert backend.not_supported_reasons(problem) == []
    call = make_call([20, 3])
    backend.load(problem)(call)
    assert_right(call)


def _spread(t: Tensor, dim: int, extra: int) -> Tensor:
    """`t` as a view into a buffer that has `extra` more (NaN) along `dim`."""
    shape = list(t.shape)
    shape[dim] += extra
    buffer = torch.full(shape, torch.nan, dtype=t.dtype)
    view = buffer.narrow(dim, 0, t.shape[dim])
    view.copy_(t)
    return view


@every_road
@every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_case_07_any_stride_but_the_innermost(
    road: Road, layout: KVLayout, dtype: torch.dtype
) -> None:
    call = make_call([40, 17, 3], layout=layout, dtype=dtype)
    fused = torch.full((3, 10, 64), torch.nan, dtype=dtype)  # q, k and v heads side by side
    fused[:, :6] = call.query
    call.query = fused[:, :6]
    call.out = torch.full((3, 9, 64), torch.nan, dtype=dtype)[:, 2:8]
    both = torch.stack([call.value_cache, call.value_cache], dim=1)  # K and V interleaved
    for dim in range(call.key_cache.dim() - 1):
        strided = replace(call, key_cache=_spread(call.key_cache, dim, 3), value_cache=both[:, 0])
        assert_right(road(strided))
        strided.value_cache = _spread(call.value_cache, min(dim, 2), 1)
        assert_right(road(strided))


@every_road
@every_layout
@pytest.mark.parametrize("shift", [1, 4])
def test_case_07_a_cache_that_starts_anywhere(road: Road, layout: KVLayout, shift: int) -> None:
    """Off the 16 bytes that the gather would like."""
    call = make_call([40, 17], layout=layout)
    for name in ("key_cache", "value_cache"):
        cache = getattr(call, name)
        buffer = torch.full((cache.numel() + shift,), torch.nan)
        buffer[shift:] = cache.flatten()
        setattr(call, name, buffer[shift:].view(cache.shape))
    assert_right(road(call))


@every_road
@pytest.mark.parametrize("head_dim", [80, 96, 120])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_case_06_nothing_beyond_the_head_is_read(
    road: Road, layout: KVLayout, head_dim: int
) -> None:
    call = make_call([40, 17], layout=layout, head_dim=head_dim)
    call.key_cache = _spread(call.key_cache, 3, 128 - head_dim)
    call.value_cache = _spread(call.value_cache, 3, 128 - head_dim)
    assert_right(road(call))


@every_road
@every_layout
def test_case_01_blocks_beyond_32_bits(road: Road, layout: KVLayout) -> None:
    """The same bits as in low blocks; the memory between is never touched."""
    low = make_call([20], heads=8, kv_heads=8, head_dim=256, dtype=torch.float16, layout=layout)
    high = replace(low, out=torch.empty_like(low.out), block_tables=low.block_tables.clone())
    first = 66_000
    high.block_tables[0, :2] += first
    for name in ("key_cache", "value_cache"):
        cache = getattr(low, name)
        shape = (first + cache.shape[0], *cache.shape[1:])
        # torch.empty would be filled with NaN in a test
        memory = mmap.mmap(-1, math.prod(shape) * cache.dtype.itemsize)
        large = torch.frombuffer(memory, dtype=cache.dtype).view(shape)
        large[first:] = cache
        setattr(high, name, large)
    assert torch.equal(road(high).out, road(low).out)


@pytest.fixture
def low_precision_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    assert torch.get_float32_matmul_precision() == "medium", "the user's choice was not restored"
    torch.set_float32_matmul_precision(before)


@every_road
@pytest.mark.usefixtures("low_precision_allowed")
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_case_19_fp32_is_fp32_whatever_is_allowed(road: Road, softcap: float | None) -> None:
    call = make_call([600], head_dim=256, softcap=softcap, query_lens=[100])
    assert_right(road(call), tolerance=2e-6)


@pytest.mark.usefixtures("low_precision_allowed")
def test_the_guard_of_fp32_lasts_until_the_last_call_is_out() -> None:
    guard = ExactFp32("cpu")

    outside = guard.current
    with guard:
        inside = guard.current
        with guard:
            pass
        assert guard.current == inside != outside
    assert guard.current == outside


@every_road
def test_the_callers_torch_settings_change_nothing(road: Road) -> None:
    """Autocast, another default dtype, tensors that want gradients or come from inference."""
    expected = road(make_call([40, 17], query_lens=[3, 1])).out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(road(make_call([40, 17], query_lens=[3, 1])).out, expected)
    call = make_call([40, 17], query_lens=[3, 1])
    call.query.requires_grad_()
    assert torch.equal(road(call).out, expected)
    with torch.inference_mode():
        call = make_call([40, 17], query_lens=[3, 1])
    assert torch.equal(road(call).out, expected)
    call = make_call([40, 17], query_lens=[3, 1], alibi_slopes=torch.full((6,), 0.1))
    torch.set_default_dtype(torch.float64)
    try:
        road(call)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_right(call)


@every_road
@pytest.mark.parametrize("queries", [None, [3, 20, 1, 2]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_case_21_equal_bits_whatever_the_batch(
    road: Road, queries: list[int] | None, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"batch_invariant": True, "dtype": dtype, "heads": 24, "kv_heads": 4}
    call = road(make_call([700, 50, 2100, 16], query_lens=queries, **options))
    starts = call.host_query_start or [0, 1, 2, 3, 4]
    for sequence in range(4):
        rows = slice(starts[sequence], starts[sequence + 1])
        alone = _only(call, sequence, rows)
        assert torch.equal(road(alone).out, call.out[rows])


def _only(call: Call, sequence: int, rows: slice) -> Call:
    """One sequence of a call, alone, in other pages."""
    assert call.host_seq_lens is not None
    count, length = rows.stop - rows.start, call.host_seq_lens[sequence]
    varlen = call.query_start_loc is not None
    return replace(
        call,
        query=call.query[rows],
        out=torch.full_like(call.out[rows], torch.nan),
        lse=None,
        key_cache=call.key_cache.flip(0),
        value_cache=call.value_cache.flip(0),
        block_tables=call.key_cache.shape[0] - 1 - call.block_tables[sequence : sequence + 1],
        seq_lens=call.seq_lens[sequence : sequence + 1],
        host_seq_lens=[length],
        max_seq_len=length,
        max_query_len=count,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32) if varlen else None,
        host_query_start=[0, count] if varlen else None,
    )


@pytest.mark.parametrize("splits", [1, 3, 16, 100, 1000])
def test_splits_are_really_made(splits: int) -> None:
    call = make_call([100], num_splits=splits)
    shape = CacheShape(call.value_cache.shape[0], 2, 16, 64)
    parts = list(plan_sequence(call, shape, 0, slice(0, 1), 100))
    windows = [window for part in parts for window in part.windows]
    assert len(windows) >= min(splits, 100)
    assert [start for start, _ in windows] == [0, *(stop for _, stop in windows[:-1])]
    assert windows[-1][1] == 100


class _PrecisionSeen(TorchDispatchMode):
    """Notes what precision fp32 products have, at each operation of the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(ExactFp32("cpu").current)
        return func(*args, **(kwargs or {}))


@every_road
@pytest.mark.usefixtures("low_precision_allowed")
def test_case_19_every_operation_runs_under_the_guard(road: Road) -> None:
    """Not every CPU has a quicker product to fall for."""
    call = make_call([600], query_lens=[100])
    with _PrecisionSeen() as products:
        road(call)
    assert products.seen <= {"ieee", "highest"}


class _NothingWaits(TorchDispatchMode):
    """Refuses the operations whose result's size or value must be known on the host."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.WAITING), f"{name} waits for the device"
        if name.startswith("index") and name != "index_select":
            for index in args[1] if isinstance(args[1], (list, tuple)) else ():
                assert index is None or index.dtype != torch.bool, "a boolean index waits"
        return func(*args, **(kwargs or {}))


@every_layout
@pytest.mark.parametrize("queries", [None, [1, 17, 0, 30]], ids=["decode", "mixed"])
def test_case_16_the_device_road_waits_for_nothing(
    layout: KVLayout, queries: list[int] | None
) -> None:
    features: dict[str, Any] = {"window": 40, "softcap": 5.0, "sinks": torch.ones(6)}
    scales: dict[str, Any] = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.5, 2.0])}
    call = make_call([1, 17, 0, 333], layout=layout, query_lens=queries, **features, **scales)
    with _NothingWaits():
        by_device_road(call)
    assert_right(call)


@every_layout
def test_case_14_one_shape_serves_every_length(layout: KVLayout) -> None:
    """The device road's windows follow the bounds, so a captured graph serves what lies within."""
    call = make_call([300, 40], layout=layout)
    for lengths in ([300, 40], [0, 1], [17, 40], [256, 0]):
        call.seq_lens.copy_(torch.tensor(lengths))
        by_device_road(call)
        assert_right(call)


@pytest.mark.gpu
@every_layout
@pytest.mark.parametrize("queries", [None, [2, 3]], ids=["decode", "mixed"])
def test_case_14_and_16_a_captured_graph_follows_lengths_and_tables(
    layout: KVLayout, queries: list[int] | None
) -> None:
    host = make_call([300, 40], layout=layout, dtype=torch.float16, query_lens=queries)
    tensors: dict[str, Any] = {k: v.cuda() for k, v in vars(host).items() if isinstance(v, Tensor)}
    call = replace(host, **tensors)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        by_device_road(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_device_road(call)
    for lengths in ([300, 40], [5, 3], [17, 40]):
        call.seq_lens.copy_(torch.tensor(lengths))
        call.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        results: dict[str, Any] = {
            k: v.cpu() for k, v in vars(call).items() if isinstance(v, Tensor)
        }
        assert_right(replace(call, **results))


MEMORY = """
import torch
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.backend import run
from pagedattn.backends.layouts import CacheShape, cache_shapes
def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10
def call(length, layout, dtype):
    blocks = length // 16
    shapes = cache_shapes(CacheShape(blocks, 4, 16, 256), dtype, layout)
    keys, values = (torch.empty(shape, dtype=dtype).fill_(0.01) for shape in shapes)
    query = torch.ones(1, 24, 256, dtype=dtype)
    return Call(query, keys, values, torch.randperm(blocks, dtype=torch.int32)[None],
                torch.tensor([length], dtype=torch.int32), torch.empty_like(query), None, layout,
                0.0625, length, 1, host_seq_lens=[length])
run(call(160, LAYOUT, DTYPE))  # what torch loads once is not the call's
long = call(100_000, LAYOUT, DTYPE)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # start the peak anew
run(long)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("layout", "dtype"), [("packed", "torch.bfloat16")])
def test_extra_memory_at_100_000_tokens(layout: KVLayout, dtype: str) -> None:
    code = MEMORY.replace("LAYOUT", repr(layout)).replace("DTYPE", dtype)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64 << 20
