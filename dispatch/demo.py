"""``pagedattn demo``: one decode step over a long context at the reference sizes, checked."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from pagedattn.api import paged_attention
from pagedattn.backends.layouts import from_hnd
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.binding import bind
from pagedattn.console import Steps, make_console, print_field, print_text
from pagedattn.record import Binding
from pagedattn.verify import TOLERANCE, errors, oracle

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 24, 4, 256, 16
_RUNS = 5
_PATIENCE_S = 5.0
_INDENT = 10


@dataclass
class Step:
    """A decode step: one query token for each of `batch` sequences of `context` tokens."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    kv_layout: KVLayout

    def attend(self, backend: str | None) -> Tensor:
        return paged_attention(
            self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens,
            kv_layout=self.kv_layout, backend=backend,
        )  # fmt: skip


def run(
    *,
    context: int,
    batch: int,
    kv_layout: KVLayout,
    dtype: torch.dtype | None,
    backend: str | None,
    device: str | None,
) -> int:
    """Run and print the demo; returns 0 if the result is right."""
    console = make_console()
    # before any memory is filled, so that a backend that cannot serve is told at once
    binding = bind(device, dtype=dtype, kv_layout=kv_layout, backend=backend)
    problem = binding.problem
    size = _cache_bytes(context, batch, problem.dtype)
    _require_memory(2 * size, problem.device)  # the rearrangement holds it twice
    _introduce(console, binding, context, batch, size)
    steps = Steps(console)
    step = make_step(batch, context, kv_layout, problem.dtype, problem.device, steps)
    times, out = _time(step, backend, steps)
    error = _check(step, out, problem, steps)
    return _conclude(console, times, error, problem.dtype, size)


def _cache_bytes(context: int, batch: int, dtype: torch.dtype) -> int:
    """Of the keys and values of all tokens, each once."""
    return 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize


def _require_memory(needed: int, device: str) -> None:
    free = _free_memory(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"this demo needs {_bytes(needed)} on {device}, and {_bytes(free)} are "
            "free; choose a smaller --context or --batch"
        )


def _free_memory(device: str) -> int | None:
    """Free bytes, or None where that cannot be told."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) * 1024 for kib in found), None)


def _introduce(console: Console, binding: Binding, context: int, batch: int, size: int) -> None:
    problem = binding.problem
    blocks = batch * -(-context // BLOCK_SIZE)
    passed = [c.name for c in binding.candidates if c.reasons and not c.selected]
    over = f" (passed over: {', '.join(passed)}; `pagedattn report` says why)" if passed else ""
    dtype = str(problem.dtype).removeprefix("torch.")
    print_text(console, ("One decode step over a paged cache, checked", "bold"))
    for label, text in (
        ("batch", f"{_counted(batch, 'sequence')} of {_counted(context, 'token')}"),
        ("heads", f"{NUM_HEADS} query heads on {NUM_KV_HEADS} KV heads of {HEAD_DIM}"),
        ("cache", f"{_counted(blocks, 'block')} of {BLOCK_SIZE} tokens, shuffled; "
                  f"{problem.kv_layout}, {dtype}, {_bytes(size)}"),
        ("backend", f"{binding.backend} on {problem.device}{over}"),
    ):  # fmt: skip
        print_field(console, label, text, indent=_INDENT)
    print_text(console)


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _bytes(size: float) -> str:
    """Such as ``819.2 MB``; the unit leaves at least one digit before the point."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} B"


def make_step(
    batch: int,
    context: int,
    kv_layout: KVLayout,
    dtype: torch.dtype,
    device: str,
    steps: Steps | None = None,
) -> Step:
    """Random keys and values in shuffled blocks; every slot past a context holds NaN."""
    per_sequence = -(-context // BLOCK_SIZE)
    num_blocks = batch * per_sequence
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    generator = torch.Generator(device).manual_seed(0)
    keys = torch.empty(shape, dtype=dtype, device=device)
    values = torch.empty(shape, dtype=dtype, device=device)
    chunk = 512
    steps = steps or Steps(make_console())
    with steps.step("filling the cache", num_blocks) as advance:
        for first in range(0, num_blocks, chunk):
            keys[first : first + chunk].normal_(generator=generator)
            values[first : first + chunk].normal_(generator=generator)
            advance(chunk)
    shuffled = torch.randperm(num_blocks, generator=generator, device=device)
    tables = shuffled.view(batch, per_sequence).to(torch.int32)
    tail = context % BLOCK_SIZE
    if tail:
        keys[tables[:, -1].long(), :, tail:] = torch.nan
        values[tables[:, -1].long(), :, tail:] = torch.nan
    keys, values = from_hnd(keys, values, kv_layout)
    query = torch.randn(batch, NUM_HEADS, HEAD_DIM, generator=generator, dtype=dtype, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Step(query, keys, values, tables, lengths, kv_layout)


def _time(step: Step, backend: str | None, steps: Steps) -> tuple[list[float], Tensor]:
    """Seconds of each of a few warm runs, fewer where they are slow, and the last result."""
    times: list[float] = []
    with steps.step("timing", _RUNS + 1) as advance:
        for _ in range(_RUNS + 1):
            start = time.perf_counter()
            out = step.attend(backend)
            if step.query.is_cuda:
                torch.cuda.synchronize(step.query.device)
            times.append(time.perf_counter() - start)
            advance(1)
            if len(times) > 1 and sum(times) > _PATIENCE_S:
                break
    return times[1:], out  # the first one warms up


def _check(step: Step, out: Tensor, problem: Problem, steps: Steps) -> float:
    """The worst row's error relative to the fp64 oracle, sequence by sequence."""
    batch = step.query.shape[0]
    worst = 0.0
    with steps.step("checking against fp64", batch) as advance:
        for b in range(batch):
            row = slice(b, b + 1)
            call = Call(
                query=step.query[row], key_cache=step.key_cache, value_cache=step.value_cache,
                block_tables=step.block_tables[row], seq_lens=step.seq_lens[row], out=out[row],
                lse=None, kv_layout=step.kv_layout, scale=HEAD_DIM**-0.5, max_query_len=1,
                max_seq_len=step.block_tables.shape[1] * BLOCK_SIZE,
            )  # fmt: skip
            worst = max(worst, errors(call, oracle(call, problem))[0])
            advance(1)
    return worst


def _conclude(
    console: Console, times: list[float], error: float, dtype: torch.dtype, size: int
) -> int:
    median, best, worst = (1e3 * f(times) for f in (statistics.median, min, max))
    limit = TOLERANCE[dtype]
    right = error <= limit
    runs = f"median of {len(times)} runs, {best:,.2f} to {worst:,.2f}"
    for label, text in (
        ("time", f"{median:,.2f} ms ({runs})"),
        ("read", f"{_bytes(size)} at {_bytes(1e3 * size / median)}/s: each key and value once"),
        ("error", f"{error:.1e} in the worst row, relative to fp64; {limit:.0e} is allowed"),
    ):
        print_field(console, label, text, indent=_INDENT)
    print_text(console)
    print_text(console, ("right", "bold green") if right else ("WRONG", "bold red"))
    return 0 if right else 1
