"""Time the Triton decode kernels over tile sizes on a GPU, to fill the table in `tuning`.

    python benchmarks/tune_triton.py --layout NHD --shapes 64x4096,1x100000 --tiles 32,64

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
        problem = Problem(
            "cuda:0", self.dtype, self.kv_dtype, *self.heads, block_size=16,
            kv_layout=self.layout, varlen_query=self.queries > 1,
        )  # fmt: skip
        given: dict[str, Any] = {k: v for k, v in made.arguments.items() if "_scale" not in k}
        call = Call(
            **{"max_query_len": 1, **given}, out=made.out, lse=None, scale=self.heads[2] ** -0.5
        )
        return problem, call


def set_tiling(tiling: tuning.Tiling) -> None:
    """Make `tuning` answer `tiling` whatever it is asked."""
    setattr(tuning, "decode_tiling", lambda *_: tiling)  # noqa: B010 (a module's own function)


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


def main() -> None:
    a = _arguments()
    kv = DTYPES[a.dtype] if a.kv == "same" else getattr(torch, decode.KV_DTYPES[a.kv])
    q_heads, kv_heads, head_dim = (int(n) for n in a.heads.split("/"))
    layout = cast(KVLayout, a.layout)
    work = Work(layout, DTYPES[a.dtype], kv, (q_heads, kv_heads, head_dim), a.queries)
    grid = itertools.product(*(_ints(n) for n in (a.tiles, a.warps, a.stages, a.cubes)))
    tilings = [tuning.Tiling(t, w, s, 2.0, bool(c), 64) for t, w, s, c in grid]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        told = pool.map(compiles, [(work, tiling) for tiling in tilings])
    for tiling, error in zip(tilings, told, strict=True):
        if error:
            print("left out:", tiling, error)
    good = [t for t, error in zip(tilings, told, strict=True) if not error]
    timer = Timer(25)
    for shape in a.shapes.split(","):
        batch, context = (int(n) for n in shape.split("x"))
        problem, call = work.call(batch, context)
        found = []
        for tiling, programs in itertools.product(good, a.programs.split(",")):
            tried = tiling._replace(programs_per_sm=float(programs))
            set_tiling(tried)
            run = functools.partial(launch.TritonRunner(problem), call)
            found.append((timer.graph(run)[0], tried))
        for us, tried in sorted(found)[: a.best]:
            print(f"{a.layout} {shape}: {us:7.1f} µs {tuple(tried)}", flush=True)


DTYPES = decode.DTYPES


def _ints(text: str) -> list[int]:
    return [int(t) for t in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, default="NHD")
    for name, default in (
        ("tiles", "16,32,64"), ("warps", "2,4,8"), ("stages", "1,2,3"), ("cubes", "0"),
        ("programs", "2,4"), ("shapes", "64x4096,1x100000,1x1024"), ("heads", "24/4/256"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--kv", choices=["same", *decode.KV_DTYPES], default="same")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--best", type=int, default=4, help="how many to print of each shape")
    return parser.parse_args()


if __name__ == "__main__":
    main()
