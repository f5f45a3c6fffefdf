"""Time the Triton kernels over tile sizes on a GPU, to fill the table in `tuning`.

    python benchmarks/tune_triton.py --layout NHD --shapes 64x4096,1x100000 --tiles 32,64
    python benchmarks/tune_triton.py --queries 2048 --shapes 1x34816 --programs 1    # prefill

Every combination is compiled in worker processes first, so that the card is not held idle by
the compiler; then each shape is timed by graph replay with a cold L2. Prints the best of each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
from typing import Any, NamedTuple, cast

import decode
import torch
from _gpu import Timer

from pagedattn.backends.layouts import LAYOUTS
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.backends.triton import launch, tuning


class Work(NamedTuple):
    """What is tuned for, beside the shape."""

    layout: KVLayout
    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: tuple[int, int, int]
    queries: int

    def call(self, batch: int, context: int) -> tuple[Problem, Call]:
        made = decode.make(
            batch, context, self.queries, self.heads, 16, self.layout, self.dtype, self.kv_dtype
        )
        given: dict[str, Any] = {k: v for k, v in made.arguments.items() if "_scale" not in k}
        call = Call(
            **{"max_query_len": 1, **given}, out=made.out, lse=None, scale=self.heads[2] ** -0.5
        )
        return self.problem(), call

    def problem(self) -> Problem:
        return Problem(
            "cuda:0", self.dtype, self.kv_dtype, *self.heads, block_size=16,
            kv_layout=self.layout, varlen_query=self.queries > 1,
        )  # fmt: skip


def set_tiling(tiling: tuning.Tiling) -> None:
    """Make `tuning` answer `tiling` whatever it is asked."""
    for name in ("decode_tiling", "prefill_tiling"):
        setattr(tuning, name, lambda *_: tiling)


def compiles(job: tuple[Work, tuning.Tiling]) -> str | None:
    """Compile both forms of a decode kernel; what went wrong, if anything did."""
    work, tiling = job
    set_tiling(tiling)
    problem, call = work.call(1, 4096)
    try:
        for splits in (None, 1):
            call.num_splits = splits
            launch.TritonRunner(problem)(call)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: this one is left out, and told
        return f"{type(error).__name__}: {error}"[:120]
    return None


def works(a: argparse.Namespace) -> list[Work]:
    heads = cast(tuple[int, int, int], tuple(_ints(a.heads.replace("/", ","))))
    dtype = DTYPES[a.dtype]
    return [
        Work(layout, dtype, dtype if kv == "same" else KV_DTYPES[kv], heads, queries)
        for layout, kv, queries in itertools.product(
            cast(list[KVLayout], a.layout.split(",")), a.kv.split(","), _ints(a.queries)
        )
    ]


def tilings(a: argparse.Namespace, work: Work) -> list[tuning.Tiling]:
    """The grid, without what means nothing: parts of keys that lie side by side, words of
    elements that fill one."""
    grid = itertools.product(*(_ints(n) for n in (a.tiles, a.warps, a.stages, a.parts, a.words)))
    packed = work.layout == "packed"
    return [
        tuning.Tiling(tile, warps, stages, 2.0, parts, bool(words), 64)
        for tile, warps, stages, parts, words in grid
        if (packed or parts == 1 + words) and (not words or tuning.takes_words(work.problem()))
    ]


def main() -> None:
    a = _arguments()
    jobs = [(work, tiling) for work in works(a) for tiling in tilings(a, work)]
    print(f"{len(jobs)} kernels to compile", flush=True)
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        told = pool.map(compiles, jobs, chunksize=1)
    for job, error in zip(jobs, told, strict=True):
        if error:
            print("left out:", _name(job[0]), tuple(job[1]), error)
    good = [job for job, error in zip(jobs, told, strict=True) if not error]
    timer = Timer(25)
    for work, shape in itertools.product(works(a), a.shapes.split(",")):
        batch, context = (int(n) for n in shape.split("x"))
        time_one(timer, work, (batch, context), [t for w, t in good if w == work], a)


def time_one(
    timer: Timer, work: Work, shape: tuple[int, int], good: list[tuning.Tiling],
    a: argparse.Namespace,
) -> None:  # fmt: skip
    """Time the tilings at one shape; print the best of all and of each way to load keys."""
    problem, call = work.call(*shape)
    found = []
    for tiling, programs in itertools.product(good, a.programs.split(",")):
        tried = tiling._replace(programs_per_sm=float(programs))
        set_tiling(tried)
        run = functools.partial(launch.TritonRunner(problem), call)
        found.append((timer.graph(run)[0], tried))
    found.sort()
    shown = set(found[: a.best])
    for mode in {(t.key_parts, t.words) for _, t in found}:
        shown.add(next(f for f in found if (f[1].key_parts, f[1].words) == mode))
    for us, tried in sorted(shown):
        print(f"{_name(work)} {shape[0]}x{shape[1]}: {us:7.1f} µs {tuple(tried)}", flush=True)


def _name(work: Work) -> str:
    return f"{work.layout} {str(work.kv_dtype).removeprefix('torch.')} q{work.queries}"


DTYPES = decode.DTYPES
KV_DTYPES = {name: getattr(torch, full) for name, full in decode.KV_DTYPES.items()}


def _ints(text: str) -> list[int]:
    return [int(t) for t in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="NHD", help=f"comma list of {', '.join(LAYOUTS)}")
    for name, default in (
        ("tiles", "16,32,64"), ("warps", "2,4,8"), ("stages", "1,2,3"), ("parts", "1,2,4"),
        ("words", "0,1"), ("programs", "2,4"), ("shapes", "64x4096,1x100000,1x1024"),
        ("heads", "24/4/256"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--kv", default="same", help="comma list of same, e4m3, e5m2, int8")
    parser.add_argument("--queries", default="1", help="query tokens of a sequence, comma list")
    parser.add_argument("--best", type=int, default=4, help="how many to print of each shape")
    return parser.parse_args()


if __name__ == "__main__":
    main()
