"""Hard problems on the GPU and no more, for a sanitizer to watch; run by test_sanitizers.py.

    python tests/gpu/hard_cases.py cuda|cuda-portable|triton

Ends with an error where a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedattn import registry, verify
from pagedattn.backends.protocol import Call, Problem
from pagedattn.probe import facts

HALF, E4M3 = torch.float16, torch.float8_e4m3fn
QWEN = Problem("cuda:0", HALF, HALF, 24, 4, 256, 16, return_lse=True)


def problems() -> Iterator[Problem]:
    for layout in ("packed", "NHD", "HND"):
        one: Problem = replace(QWEN, kv_layout=layout)
        yield one
        yield replace(one, varlen_query=True, window=True)
        if layout != "HND":
            yield replace(one, kv_dtype=E4M3)
            yield replace(one, kv_dtype=E4M3, varlen_query=True)
            yield replace(one, num_heads=6, num_kv_heads=1)
            yield replace(one, batch_invariant=True, varlen_query=True)
            # a head of no whole number of 128 dimensions, and of fewer than a lane takes
            for group, head_dim, block_size in ((7, 80, 24), (5, 144, 16), (1, 16, 8)):
                other = replace(one, num_heads=2 * group, num_kv_heads=2)
                other = replace(other, head_dim=head_dim, block_size=block_size)
                yield replace(other, varlen_query=layout == "NHD")


def runners(which: str, problem: Problem) -> Iterator[Any]:
    """What serves a problem, if it does: as it comes, and as it serves longer or more sequences."""
    backend = registry.get(which.split("-")[0])
    if backend.not_supported_reasons(problem):
        return
    runner = backend.load(problem)
    if which == "triton":
        from pagedattn.backends.triton import tuning

        yield runner
        decode_tiling = tuning.decode_tiling  # of work that these problems are too small for
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                tuning, "decode_tiling", lambda p, rows, _: decode_tiling(p, rows, 1 << 20)
            )
            yield backend.load(problem)
        return
    from pagedattn.backends.cuda.abi import require_success
    from pagedattn.backends.cuda.launch import CudaRunner

    assert isinstance(runner, CudaRunner)
    launch = runner.portable if which == "cuda-portable" else runner.tuned
    for splits in (None, 1, 40):  # 40: many, but for short contexts

        def run(call: Call, splits: int | None = splits) -> None:
            require_success(runner._library, launch(replace(call, num_splits=splits)))

        yield run


def main(which: str) -> None:
    absent = registry.get(which.split("-")[0]).not_present_reasons(facts())
    if absent:
        raise SystemExit("; ".join(absent))
    count = 0
    for problem in problems():
        for run in runners(which, problem):
            verdict = verify.judge(run, problem)
            if verdict.outcome != "ok":
                raise SystemExit(f"{problem}: {verdict.detail}")
            count += 1
    torch.cuda.synchronize()
    print(f"{count} hard problems are right")


if __name__ == "__main__":
    main(sys.argv[1])
