"""Triton's tilings of large work on small hard problems, which would get those of small work.

Each loads keys its own way, and only a GPU shows what the compiler made of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from _places import every_layout

pytest.importorskip("triton")

from pagedattn import registry, verify
from pagedattn.backends.protocol import Problem
from pagedattn.backends.triton import tuning
from pagedattn.probe import facts

pytestmark = pytest.mark.gpu
WORK = {"middle": 32768, "large": 1 << 20}
SIZES = [(256, 6, 16), (128, 4, 16), (80, 7, 24), (64, 8, 8)]
FEATURES: dict[str, dict[str, Any]] = {
    "decode": {},
    "speculative": {"varlen_query": True},
    "all": {"varlen_query": True, "window": True, "softcap": True, "alibi": True, "sinks": True},
}


@every_layout
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kv_dtype", ["float16", "float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(("head_dim", "group", "block_size"), SIZES)
def test_hard_problems(
    head_dim: int, group: int, block_size: int, kv_dtype: str, features: str, work: str,
    layout: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sizes = (2 * group, 2, head_dim, block_size)
    cache = getattr(torch, kv_dtype)
    problem = Problem("cuda:0", torch.float16, cache, *sizes, return_lse=True, kv_layout=layout)
    problem = replace(problem, **FEATURES[features])
    backend = registry.get("triton")
    absent = backend.not_present_reasons(facts()) or backend.not_supported_reasons(problem)
    if absent:
        pytest.skip("; ".join(absent))
    decode_tiling = tuning.decode_tiling
    less = [w for w in (0, *WORK.values()) if w < WORK[work]]
    rows_of_tiles = (16, 32, 64)  # with one query token, and with some
    if all(
        any(decode_tiling(problem, n, w) == decode_tiling(problem, n, WORK[work]) for w in less)
        for n in rows_of_tiles
    ):
        pytest.skip("all its tilings are those of less work, which other tests run")
    monkeypatch.setattr(
        tuning, "decode_tiling", lambda p, rows, _: decode_tiling(p, rows, WORK[work])
    )
    verdict = verify.judge(backend.load(problem), problem)
    assert verdict.outcome == "ok", verdict.detail
