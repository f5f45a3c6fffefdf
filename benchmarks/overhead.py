"""What a warm call costs before the backend's own launch, and where it goes.

    python benchmarks/overhead.py [--gpu] [--repeats N] [--out FOLDER]

A backend that does nothing is bound, so that all the time is ours: validation, the look-up of
the binding, the output's allocation. The bar is 15 µs. Writes a result file and prints it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _results import write

import pagedattn
from pagedattn import admission
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, Problem, Runner

LIMIT_US = 15.0
CALLS = 200  # of one timing


class Nothing:
    """A backend that launches nothing."""

    name = "nothing"

    def not_present_reasons(self, facts: Facts) -> list[str]:
        return []

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return []

    def remedy(self, facts: Facts) -> str | None:
        return None

    def load(self, problem: Problem) -> Runner:
        def launch(call: Call) -> None:
            pass

        return launch


def measure(device: str, repeats: int) -> list[dict[str, Any]]:
    """A row for the whole of each kind of call, and for each part of the plain one."""
    dtype = torch.float16 if device != "cpu" else torch.float32
    batch, width = 8, 64
    x = 16 // dtype.itemsize
    keys = torch.zeros(batch * width, 4, 256 // x, 16, x, dtype=dtype, device=device)
    values = torch.zeros(batch * width, 4, 256, 16, dtype=dtype, device=device)
    query = torch.zeros(batch, 24, 256, dtype=dtype, device=device)
    tables = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    lengths = torch.full((batch,), 1000, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    tensors = (query, keys, values, tables, lengths)

    def call(**options: Any) -> Callable[[], Any]:
        return lambda: pagedattn.paged_attention(*tensors, backend="nothing", **options)

    given = admission.Arguments(
        *tensors, None, None, False, "packed", None, None, None, None, None, None, None, None,
        None, None, False, "nothing",
    )  # fmt: skip
    admitted = admission.admit(given)
    prepared = admission._prepare(given, admitted)
    variants: dict[str, Callable[[], Any]] = {
        "call": call(),
        "call, out given": call(out=out),
        "call, return_lse": call(return_lse=True),
        "call, query_start_loc": call(query_start_loc=starts, max_query_len=1),
        "call, every option": call(
            out=out, window=128, softcap=30.0, sinks=torch.zeros(24, device=device),
            alibi_slopes=torch.zeros(24, device=device), max_seq_len=1000, num_splits=4,
            query_start_loc=starts, max_query_len=1, k_scale=0.5, v_scale=0.5,
        ),
        "part: key of the shapes": lambda: admission._key(given, "nothing"),
        "part: checks of contents, and the Call": lambda: admission._prepare(given, admitted),
        "part: allocating the output": lambda: torch.empty_like(query),
        "part: the binding": lambda: admitted.binding.run(prepared),
    }  # fmt: skip
    fixed = {"backend": "nothing", "layout": "packed", "dtype": str(dtype).removeprefix("torch."),
             "batch": batch, "context": 1000}  # fmt: skip
    return [{**fixed, "variant": name, **_time(f, repeats)} for name, f in variants.items()]


def _time(function: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of one call: the median, least and most over `repeats` batches of calls."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    names = ("us_median", "us_min", "us_max")
    values = (statistics.median(times), min(times), max(times))
    return {name: round(value, 2) for name, value in zip(names, values, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a warm call without its launch.")
    parser.add_argument("--gpu", action="store_true", help="with tensors on cuda:0")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    arguments = parser.parse_args()
    os.environ["PAGEDATTN_VERIFY"] = "off"  # there is nothing to prove
    pagedattn.register_backend(Nothing())
    device = "cuda:0" if arguments.gpu else "cpu"
    rows = measure(device, arguments.repeats)
    write("overhead", rows, device=device, folder=arguments.out, extra={"limit_us": LIMIT_US})
    for row in rows:
        print(f"{row['us_median']:7.2f} µs (least {row['us_min']:.2f})  {row['variant']}")
    # the least is the code's own cost; a busy host adds to the median
    return 0 if rows[0]["us_min"] <= LIMIT_US else 1


if __name__ == "__main__":
    sys.exit(main())
