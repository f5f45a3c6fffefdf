"""Decode steps on a GPU: graph replay, cold L2, against the read ceiling of the same run.

    python benchmarks/decode.py --backend torch --shapes 1x100000,64x4096 --layouts packed

writes one result file. Keys and values count once each as bytes read.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import _results
import torch
from _gpu import Timer, ceilings
from torch import Tensor

from pagedattn import paged_attention
from pagedattn.backends.layouts import from_hnd
from pagedattn.backends.protocol import KVLayout

SHAPES = "1x100000,1x32768,1x8192,1x1024,8x32768,64x4096,128x1024,256x100"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CASE_DEFAULTS = ("24/4/256", "8x32768", "packed,NHD", "fp16", "same", "1", "cuda,triton")
KV_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int8": "int8"}


@dataclass(frozen=True)
class Work:
    """One measurement's problem; `keys` and `values` are read back for the check."""

    arguments: dict[str, Any]
    out: Tensor
    bytes_read: int

    def run(self, backend: str, features: dict[str, Any]) -> Tensor:
        # a dict of arguments hides from the overloads that no log-sum-exp is asked for
        out: Tensor = paged_attention(**self.arguments, out=self.out, backend=backend, **features)
        return out


def make(
    batch: int, context: int, queries: int, heads: tuple[int, int, int], block: int,
    layout: KVLayout, dtype: torch.dtype, kv_dtype: torch.dtype,
) -> Work:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    per_sequence = -(-context // block)
    shape = (batch * per_sequence, num_kv_heads, block, head_dim)
    caches: list[Tensor] = []
    for _ in range(2):
        dense = torch.empty(shape, dtype=dtype, device="cuda").normal_()
        if kv_dtype == torch.int8:
            dense = dense.mul_(32).round_().clamp_(-127, 127)
        caches.append(dense.to(kv_dtype))
    keys, values = from_hnd(caches[0], caches[1], layout)
    del caches
    tables = torch.randperm(shape[0], device="cuda").view(batch, -1).to(torch.int32)
    query = torch.randn(batch * queries, num_heads, head_dim, dtype=dtype, device="cuda")
    arguments: dict[str, Any] = {
        "query": query, "key_cache": keys, "value_cache": values, "block_tables": tables,
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        "kv_layout": layout, "max_seq_len": context,
    }  # fmt: skip
    if kv_dtype == torch.int8:
        arguments |= {"k_scale": 1 / 32, "v_scale": 1 / 32}
    if queries > 1:
        starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device="cuda")
        arguments |= {"query_start_loc": starts, "max_query_len": queries}
    elements = 2 * batch * context * num_kv_heads * head_dim
    return Work(arguments, torch.full_like(query, math.nan), elements * kv_dtype.itemsize)


def error(out: Tensor, work: Work) -> float:
    """The first sequence's error relative to the fp64 oracle (norm over all its rows)."""
    a = dict(work.arguments)
    count = out.shape[0] // a["seq_lens"].shape[0]
    a |= {"query": a["query"][:count], "block_tables": a["block_tables"][:1],
          "seq_lens": a["seq_lens"][:1]}  # fmt: skip
    if "query_start_loc" in a:
        a["query_start_loc"] = a["query_start_loc"][:2]
    # fp32 in and out, so that the oracle's result is not rounded to the type judged
    if a["key_cache"].dtype == a["query"].dtype:
        a |= {name: a[name].float() for name in ("key_cache", "value_cache")}
    if a["kv_layout"] == "packed" and a["key_cache"].dtype == torch.float32:
        keys = a["key_cache"]  # [n, kv, D/8, bs, 8] -> [n, kv, D/4, bs, 4]
        keys = keys.unflatten(-1, (-1, 4)).permute(0, 1, 2, 4, 3, 5).flatten(2, 3)
        a["key_cache"] = keys.contiguous()
    a["query"] = a["query"].float()
    truth = paged_attention(**a, backend="reference")
    return float((out[:count].double() - truth.double()).norm() / truth.double().norm())


class Case(NamedTuple):
    """What is measured: one problem on several backends."""

    heads: str  # query heads/KV heads/head size
    shape: str  # batch x context
    layout: str
    dtype: str
    kv_dtype: str  # same, or an eight-bit type
    queries: str
    backends: str


def cases(a: argparse.Namespace) -> list[Case]:
    """Of ``--cases``, or the product of the other options."""
    if not a.cases:
        options = (a.heads, a.shapes, a.layouts, a.dtype, a.kv_dtype, a.queries)
        made = product(*(text.split(",") for text in options))
        return [Case._make((*one, a.backend)) for one in made]
    found = []
    for text in a.cases.split():
        fields = (text.split(":") + [""] * 7)[:7]
        named = [f or default for f, default in zip(fields, CASE_DEFAULTS, strict=True)]
        *lists, backends = named
        made = product(*(field.split(",") for field in lists))
        found += [Case._make((*one, backends)) for one in made]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="torch", help="comma list")
    parser.add_argument("--shapes", default=SHAPES, help="batch x context, comma list")
    parser.add_argument("--layouts", default="packed,NHD")
    parser.add_argument("--dtype", default="fp16", help="comma list of fp16, bf16, fp32")
    parser.add_argument("--kv-dtype", default="same", help="comma list of same, e4m3, e5m2, int8")
    parser.add_argument("--heads", default="24/4/256", help="query/KV heads and head size")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--queries", default="1", help="query tokens of each sequence, comma list")
    parser.add_argument(
        "--cases",
        help="in place of those, each heads:shapes:layouts:dtypes:kv-dtypes:queries:backends, "
        "spaces between; a part left out is as above",
    )
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument(
        "--clean", action="store_true", help="flush the L2 cache by reading, not by writing"
    )
    parser.add_argument(
        "--portable", action="store_true", help="the CUDA backend's portable kernel"
    )
    parser.add_argument("--memory", action="store_true", help="measure the extra memory too")
    parser.add_argument("--check", type=int, default=32768, help="longest context to check in fp64")
    parser.add_argument("--what", default="decode", help="the last part of the file's name")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    a = parser.parse_args()
    if a.portable:
        use_portable_kernel()
    timer = Timer(clean=a.clean)
    limits = ceilings(timer)
    print({k: round(v, 2) for k, v in limits.items()})
    rows = []
    for case in cases(a):
        num_heads, num_kv_heads, head_dim = (int(n) for n in case.heads.split("/"))
        batch, context = (int(n) for n in case.shape.split("x"))
        dtype, kv, queries = DTYPES[case.dtype], case.kv_dtype, int(case.queries)
        kv_dtype = dtype if kv == "same" else getattr(torch, KV_DTYPES[kv])
        heads, layout = (num_heads, num_kv_heads, head_dim), cast(KVLayout, case.layout)
        work = make(batch, context, queries, heads, a.block, layout, dtype, kv_dtype)
        for backend in case.backends.split(","):
            row = measure(timer, work, backend, a, limits)
            row |= {
                "backend": backend, "layout": layout, "dtype": case.dtype,
                "kv_dtype": case.dtype if kv == "same" else kv, "num_heads": num_heads,
                "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": a.block,
                "batch": batch, "context": context, "query_len": queries,
                "features": ["batch_invariant"] if a.batch_invariant else [],
            }  # fmt: skip
            if queries > 16:
                row["tflops"] = (
                    flops(batch, context, queries, num_heads, head_dim) / row["us_median"] / 1e6
                )
                row["percent_of_matrix"] = 100 * row["tflops"] / matrix_tflops(timer, limits)
            if context <= a.check:
                row["rel_err"] = error(work.out, work)
            rows.append(row)
            # each time, so that a run which is cut short leaves what it has measured
            path = _results.write(a.what, rows, device="cuda", ceilings=limits, folder=a.out)
            print(
                f"{backend:8} {case.heads:>9} {layout:6} {case.dtype}/{kv} {case.shape:>9} "
                f"q{queries}: {row['us_median']:8.1f} µs  {row['tbps']:.2f} TB/s  "
                f"{row['percent_of_read']:.0f} %  err {row.get('rel_err') or math.nan:.1e}  "
                f"{row.get('variant') or ''}",
                flush=True,
            )
        del work
        torch.cuda.empty_cache()
    print(path)


def flops(batch: int, context: int, queries: int, num_heads: int, head_dim: int) -> float:
    """Of both products, over the keys that causal rows see."""
    seen = queries * (context - queries) + queries * (queries + 1) / 2
    return 4.0 * batch * seen * num_heads * head_dim


def matrix_tflops(timer: Timer, limits: dict[str, float]) -> float:
    """The device's bf16 matrix rate on random data, measured once and kept among the ceilings."""
    if "matrix_tflops" not in limits:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        limits["matrix_tflops"] = 2 * 8192**3 / timer.calls(lambda: a @ b)[0] / 1e6
    return limits["matrix_tflops"]


def use_portable_kernel() -> None:
    """Have the CUDA backend refuse its tuned kernels, for this process."""
    from pagedattn.backends.cuda import launch
    from pagedattn.backends.cuda.abi import REFUSED

    setattr(launch.CudaRunner, "tuned", lambda *_: REFUSED)  # noqa: B010 (a class's own method)


def measure(
    timer: Timer, work: Work, backend: str, a: argparse.Namespace, limits: dict[str, float]
) -> dict[str, Any]:
    features = {"batch_invariant": True} if a.batch_invariant else {}
    work.run(backend, features)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"l2": "cold, clean" if a.clean else "cold", "graph": True}
    if a.portable:
        row["variant"] = "portable kernel"
    if a.memory:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work.run(backend, features)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        row["variant"] = f"extra memory {extra / 1e6:.0f} MB"
    median, low, high = timer.graph(lambda: work.run(backend, features))
    tbps = work.bytes_read / median / 1e6
    return row | {
        "us_median": median, "us_min": low, "us_max": high, "tbps": tbps,
        "percent_of_read": 100 * tbps / limits["read_tbps"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
