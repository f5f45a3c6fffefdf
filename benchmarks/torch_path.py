"""The torch path against its bars.

    python benchmarks/torch_path.py [--layouts NHD,HND,packed] [--pairs N] [--threads N]
    python benchmarks/torch_path.py --device cuda

On a CPU: its time over that of `scaled_dot_product_attention` on keys and values that already
lie contiguous, with the group as query rows, in pairs (one of ours, one of torch's, in turn, so
that both meet the same neighbours on the machine); and the memory that a call of 100,000 tokens
takes beyond its arguments. On a GPU: graph replays with a cold L2, and memory likewise. Writes
one result file and exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _results
import torch
import torch.nn.functional as F
from torch import Tensor

from pagedattn.backends.layouts import CacheShape, cache_shapes
from pagedattn.backends.protocol import Call, KVLayout
from pagedattn.backends.python_v2.backend import run

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 24, 4, 256, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS: tuple[KVLayout, ...] = ("NHD", "HND", "packed")
# time over that of contiguous attention
CPU_BARS = {"NHD": 2.5, "HND": 2.5, "packed": 3.5}
CPU_MEMORY_BAR = 64 << 20
GPU_BARS_US = {(1, 100_000): 1000.0, (64, 4096): 3000.0}
GPU_MEMORY_BAR = 256 << 20


def make_call(batch: int, context: int, layout: KVLayout, dtype: torch.dtype, device: str) -> Call:
    """A decode step over a shuffled cache of random numbers."""
    blocks = -(-context // BLOCK)
    shapes = cache_shapes(CacheShape(batch * blocks, KV_HEADS, BLOCK, HEAD_DIM), dtype, layout)
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    query = torch.randn(batch, HEADS, HEAD_DIM, dtype=dtype, device=device)
    tables = torch.randperm(batch * blocks, device=device).to(torch.int32).view(batch, blocks)
    return Call(
        query=query,
        key_cache=keys,
        value_cache=values,
        block_tables=tables,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        out=torch.empty_like(query),
        lse=None,
        kv_layout=layout,
        scale=HEAD_DIM**-0.5,
        max_seq_len=context,
        max_query_len=1,
        host_seq_lens=[context] * batch if device == "cpu" else None,
    )


def contiguous(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of a call ``[batch, kv_heads, group or context, head_dim]``, dense."""
    ids = call.block_tables.long()
    keys, values = call.key_cache[ids], call.value_cache[ids]
    if call.kv_layout == "NHD":  # [B, n, bs, KV, D]
        keys, values = (t.permute(0, 3, 1, 2, 4) for t in (keys, values))
    elif call.kv_layout == "HND":  # [B, n, KV, bs, D]
        keys, values = (t.permute(0, 2, 1, 3, 4) for t in (keys, values))
    else:
        keys = keys.permute(0, 2, 1, 4, 3, 5).flatten(4)  # [B, n, KV, D/x, bs, x]
        values = values.permute(0, 2, 1, 4, 3)  # [B, n, KV, D, bs]
    batch = ids.shape[0]
    query = call.query.view(batch, KV_HEADS, -1, HEAD_DIM)
    return query, keys.flatten(2, 3).contiguous(), values.flatten(2, 3).contiguous()


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def describe(call: Call, dtype: str) -> dict[str, Any]:
    """What a row says of its problem."""
    return {
        "backend": "torch",
        "layout": call.kv_layout,
        "dtype": dtype,
        "kv_dtype": dtype,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "block_size": BLOCK,
        "batch": call.block_tables.shape[0],
        "context": call.max_seq_len,
        "query_len": 1,
        "features": [],
    }


def times(us: list[float], bytes_read: int) -> dict[str, float]:
    median = statistics.median(us)
    return {
        "us_median": round(median, 1),
        "us_min": round(min(us), 1),
        "us_max": round(max(us), 1),
        "tbps": round(bytes_read / median / 1e6, 4),
    }


def on_cpu(batch: int, context: int, layout: KVLayout, dtype: str, pairs: int) -> dict[str, Any]:
    """One row: pairs of ours and of contiguous attention."""
    call = make_call(batch, context, layout, DTYPES[dtype], "cpu")
    query, keys, values = contiguous(call)
    run(call)
    dense = F.scaled_dot_product_attention(query, keys, values)
    right = F.scaled_dot_product_attention(query.double(), keys.double(), values.double())
    ours, theirs = [], []
    for _ in range(pairs):
        ours.append(1e6 * seconds(lambda: run(call)))
        theirs.append(1e6 * seconds(lambda: F.scaled_dot_product_attention(query, keys, values)))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        **describe(call, dtype),
        **times(ours, 2 * keys.nbytes),
        "rel_err": relative_error(call.out.view_as(right), right),
        "rel_err_torch": relative_error(dense, right),
        "us_contiguous": round(statistics.median(theirs), 1),
        "ratio_to_contiguous": round(ratio, 3),
        "bar": CPU_BARS[layout],
        "passed": ratio <= CPU_BARS[layout],
    }


def relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def cpu_memory(layout: KVLayout, dtype: str) -> dict[str, Any]:
    """The growth of a fresh process' peak memory over a call of 100,000 tokens."""
    command = [sys.executable, __file__, "--memory-of", f"{layout},{dtype}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    extra = int(done.stdout)
    return {
        "backend": "torch",
        "variant": "memory",
        "layout": layout,
        "dtype": dtype,
        "batch": 1,
        "context": 100_000,
        "extra_bytes": extra,
        "bar": CPU_MEMORY_BAR,
        "passed": extra <= CPU_MEMORY_BAR,
    }


def measure_memory(layout: KVLayout, dtype: str) -> int:
    """Bytes that this process' peak grows by (Linux)."""
    run(make_call(1, 160, layout, DTYPES[dtype], "cpu"))  # what torch loads once is not the call's
    call = make_call(1, 100_000, layout, DTYPES[dtype], "cpu")
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run(call)
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def on_gpu(batch: int, context: int, layout: KVLayout, dtype: str) -> dict[str, Any]:
    """One row: graph replays with a cold L2, and the memory of an ordinary call."""
    from _gpu import Timer

    call = make_call(batch, context, layout, DTYPES[dtype], "cuda")
    run(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(call)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    median, fastest, slowest = Timer().graph(lambda: run(call))
    bar = GPU_BARS_US.get((batch, context))
    bytes_read = 2 * batch * context * KV_HEADS * HEAD_DIM * DTYPES[dtype].itemsize
    return {
        **describe(call, dtype),
        "l2": "cold",
        "graph": True,
        **times([median, fastest, slowest], bytes_read),
        "us_median": round(median, 1),
        "extra_bytes": extra,
        "bar": bar,
        "passed": extra <= GPU_MEMORY_BAR and (bar is None or median <= bar),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, each printed as it comes."""
    rows: list[dict[str, Any]] = []
    layouts = arguments.layouts.split(",")
    if arguments.device == "cpu":
        dtypes = (arguments.dtypes or "fp32,bf16").split(",")
        for dtype in dtypes:
            for batch, context in ((1, 32_768), (8, 4096)):
                for layout in layouts:
                    rows.append(on_cpu(batch, context, layout, dtype, arguments.pairs))
                    report(rows[-1])
        if sys.platform == "linux":
            for layout in layouts:
                rows.append(cpu_memory(layout, dtypes[-1]))
                report(rows[-1])
        return rows
    for dtype in (arguments.dtypes or "fp16").split(","):
        for batch, context in GPU_BARS_US:
            for layout in layouts:
                rows.append(on_gpu(batch, context, layout, dtype))
                report(rows[-1])
    return rows


def report(row: dict[str, Any]) -> None:
    parts = [f"{row['layout']:6} {row['dtype']} {row['batch']:2} × {row['context']:6}"]
    if "us_median" in row:
        parts.append(f"{row['us_median'] / 1e3:8.2f} ms")
    if "ratio_to_contiguous" in row:
        parts.append(f"{row['ratio_to_contiguous']:5.2f} × contiguous (bar {row['bar']})")
    if "extra_bytes" in row:
        parts.append(f"{row['extra_bytes'] / 2**20:6.1f} MiB beyond the arguments")
    print("  ".join(parts), "" if row["passed"] else "  MISSED", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the torch path against its bars.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--dtypes", help="fp32,bf16 on a CPU and fp16 on a GPU if not given")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's threads; its default if not given")
    parser.add_argument("--out", type=Path, default=_results.RESULTS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # a child's task
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        layout, dtype = arguments.memory_of.split(",")
        print(measure_memory(layout, dtype))
        return 0
    rows = measure(arguments)
    path = _results.write("torch-path", rows, device=arguments.device, folder=arguments.out)
    print(path)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
