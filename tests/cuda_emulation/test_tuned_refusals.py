"""What the tuned kernels cannot copy as it lies in memory: they refuse it, launching nothing, and
the portable kernels of the same library serve it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from _emulated_calls import judge_orders, shifted
from _emulation import Libraries, tuned

from pagedattn.backends.cuda.abi import REFUSED
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.hard_problems import UNTOUCHED, make_call

HALF = torch.float16
BASE = Problem("cpu", HALF, HALF, 6, 2, 64, 16, return_lse=True)
every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
either_arch = pytest.mark.parametrize("arch", [80, 90])


def _serve(libraries: Libraries, problem: Problem, call: Call, arch: int) -> Call:
    """The call as a runner takes it that has both kinds of kernels, the tuned ones refusing."""
    library = libraries.of(problem, *tuned(arch))
    runner = CudaRunner(library, problem)
    nothing = replace(call, out=torch.full_like(call.out, UNTOUCHED))
    library.emulation_configure(32, 0)
    assert runner.tuned(nothing) == REFUSED
    assert bool((nothing.out == UNTOUCHED).all())
    return judge_orders(problem, call, library, runner, (32, 64))


@every_layout
@either_arch
def test_caches_that_it_cannot_copy(libraries: Libraries, layout: KVLayout, arch: int) -> None:
    problem = replace(BASE, kv_layout=layout)
    call = make_call(problem)
    for name in ("key_cache", "value_cache"):
        off: dict[str, Any] = {name: shifted(getattr(call, name))}
        _serve(libraries, problem, replace(call, **off), arch)


@either_arch
def test_strides_that_it_cannot_copy(libraries: Libraries, arch: int) -> None:
    """Tokens whose elements lie apart, and rows that are no multiple of 16 bytes."""
    problem = replace(BASE, kv_layout="NHD")
    call = make_call(problem)
    apart = torch.stack([call.key_cache, call.value_cache], dim=-1)
    _serve(libraries, problem, replace(call, value_cache=apart[..., 1]), arch)
    padded = torch.full((*call.key_cache.shape[:-1], 66), float("nan"), dtype=HALF)
    padded[..., :64] = call.key_cache
    _serve(libraries, problem, replace(call, key_cache=padded[..., :64]), arch)
    problem = replace(BASE, kv_layout="packed")
    call = make_call(problem)
    padded = torch.full((*call.value_cache.shape[:-1], 24), float("nan"), dtype=HALF)
    padded[..., :16] = call.value_cache
    _serve(libraries, problem, replace(call, value_cache=padded[..., :16]), arch)


def test_queries_and_results_that_it_cannot_reach(libraries: Libraries) -> None:
    call = make_call(BASE)
    query = torch.full((6, 6, 65), float("nan"), dtype=HALF)
    query[..., :64] = call.query
    _serve(libraries, BASE, replace(call, query=query[..., :64]), 90)
    _serve(libraries, BASE, replace(call, query=shifted(call.query)), 90)
    library = libraries.of(BASE, *tuned(90))
    plain = _serve(libraries, BASE, replace(call, query=shifted(call.query)), 90)
    out = torch.full((6, 6, 66), UNTOUCHED, dtype=HALF)
    library.emulation_configure(32, 0)
    CudaRunner(library, BASE)(replace(call, out=out[..., :64]))
    torch.testing.assert_close(out[..., :64], plain.out, equal_nan=True, rtol=0, atol=0)
    assert bool((out[..., 64:] == UNTOUCHED).all())


def test_the_slower_kernel_is_told_once(
    libraries: Libraries, caplog: pytest.LogCaptureFixture
) -> None:
    call = make_call(BASE)
    runner = CudaRunner(libraries.of(BASE, *tuned(90)), BASE)
    runner(call)
    assert not caplog.records
    for _ in range(2):
        runner(replace(call, key_cache=shifted(call.key_cache)))
    (record,) = caplog.records
    assert "portable one, slower" in record.message
