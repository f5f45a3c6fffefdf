"""What a warm call costs before the backend's own launch, and where it goes.

    python benchmarks/overhead.py [--gpu] [--repeats N] [--out FOLDER]

A backend that does nothing is bound, so that all the time is ours: validation, the look-up of
the binding, the output's allocation. The bar is 15 µs. With ``--gpu`` eager calls of the Triton
backend are timed too, beside the launcher that Triton compiled for the same kernel, its arguments
ready: the difference is ours. The bars are 40 µs for the call and 15 for what is ours of it.
Writes a result file and prints it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode
import torch
from _results import write

import pagedattn
from pagedattn import admission, shortcut
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, KVLayout, Problem, Runner
from pagedattn.given import Arguments

LIMIT_US = 15.0
EAGER_LIMIT_US = 40.0
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

    given = Arguments(
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
        "part: the shortcut to what was admitted": lambda: shortcut.find(given, "nothing"),
        "part: key of the shapes, without it": lambda: admission._key(given, "nothing"),
        "part: checks of contents, and the Call": lambda: admission._prepare(given, admitted),
        "part: allocating the output": lambda: torch.empty_like(query),
        "part: the binding": lambda: admitted.binding.run(prepared),
    }  # fmt: skip
    fixed = {"backend": "nothing", "layout": "packed", "dtype": str(dtype).removeprefix("torch."),
             "batch": batch, "context": 1000}  # fmt: skip
    return [{**fixed, "variant": name, **_time(f, repeats)} for name, f in variants.items()]


def measure_eager(repeats: int) -> list[dict[str, Any]]:
    """Rows of eager calls of the Triton backend, of their bare launches, and of what is ours."""
    rows = []
    layouts: tuple[KVLayout, ...] = ("NHD", "packed")
    for context, layout, given in (
        *((16, layout, given) for layout in layouts for given in (True, False)),
        (1024, "NHD", True),
    ):
        work = decode.make(1, context, 1, (24, 4, 256), 16, layout, torch.float16, torch.float16)
        arguments = {**work.arguments, "backend": "triton", **({"out": work.out} if given else {})}
        call = functools.partial(pagedattn.paged_attention, **arguments)
        whole = _time(call, repeats)
        bare = _time(_bare_launches(call), repeats)
        ours = {name: round(whole[name] - bare[name], 2) for name in ("us_median", "us_min")}
        fixed = {"backend": "triton", "layout": layout, "dtype": "float16", "batch": 1,
                 "context": context, "graph": False}  # fmt: skip
        how = "out given" if given else "out allocated"
        rows += [
            {**fixed, **times, "variant": f"eager, {how}: {what}"}
            for what, times in (("the call", whole), ("Triton's launcher", bare), ("ours", ours))
        ]
    return rows


def measure_compiled(repeats: int) -> list[dict[str, Any]]:
    """Rows of eager calls of the CUDA backend, of an empty launch, and of what is beyond that."""
    from pagedattn import registry
    from pagedattn.probe import facts

    if registry.get("cuda").not_present_reasons(facts()):
        return []
    rows = []
    empty = _time(lambda: torch.cuda._sleep(0), repeats)
    layouts: tuple[KVLayout, ...] = ("NHD", "packed")
    for context, layout in ((16, layouts[0]), (16, layouts[1]), (1024, layouts[0])):
        work = decode.make(1, context, 1, (24, 4, 256), 16, layout, torch.float16, torch.float16)
        call = functools.partial(
            pagedattn.paged_attention, **work.arguments, out=work.out, backend="cuda"
        )
        whole = _time(call, repeats)
        beyond = {name: round(whole[name] - empty[name], 2) for name in ("us_median", "us_min")}
        fixed = {"backend": "cuda", "layout": layout, "dtype": "float16", "batch": 1,
                 "context": context, "graph": False}  # fmt: skip
        rows += [
            {**fixed, **times, "variant": f"eager, out given: {what}"}
            for what, times in (
                ("the call", whole), ("an empty launch", empty), ("beyond it", beyond),
            )
        ]  # fmt: skip
    return rows


def _bare_launches(call: Callable[[], Any]) -> Callable[[], None]:
    """What `call` has Triton's compiled launchers do, as a function that does nothing else."""
    call()
    (plan,) = next(reversed(admission._admitted.values())).plans.values()
    launches = [launch for launch in (plan.decode, plan.merge) if launch is not None]
    runs = [launch._run for launch in launches]
    if None in runs:
        raise SystemExit("this Triton's launcher is not known: every call goes by its own road")
    seen: list[tuple[Any, ...]] = []
    for launch in launches:
        launch._run = lambda *arguments: seen.append(arguments)
    call()
    for launch, run in zip(launches, runs, strict=True):
        launch._run = run
    pairs = list(zip(runs, seen, strict=True))

    def bare() -> None:
        for run, arguments in pairs:
            run(*arguments)

    return bare


def _time(function: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of one call: the median, least and most over `repeats` batches of calls."""
    on_gpu = torch.cuda.is_available()
    function()
    times = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()  # a full queue would have the host wait
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
    within = rows[0]["us_min"] <= LIMIT_US
    limits = {"limit_us": LIMIT_US}
    if arguments.gpu:
        eager = measure_eager(arguments.repeats)
        rows += eager + measure_compiled(arguments.repeats)
        limits["eager_limit_us"] = EAGER_LIMIT_US
        within = within and eager[0]["us_min"] <= EAGER_LIMIT_US and eager[2]["us_min"] <= LIMIT_US
    write("overhead", rows, device=device, folder=arguments.out, extra=limits)
    for row in rows:
        where = f"{row['layout']} {row['batch']}x{row['context']}"
        print(f"{row['us_median']:7.2f} µs (least {row['us_min']:.2f})  {where}: {row['variant']}")
    # the least is the code's own cost; a busy host adds to the median
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
