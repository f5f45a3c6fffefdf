"""``pagedattn demo``: one decode step over a long context at the reference sizes, checked."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from pagedattn.api import paged_attention
from pagedattn.backends.layouts import from_hnd
from pagedattn.backends.protocol import Call, KVLayout, Problem
from pagedattn.binding import bind
from pagedattn.verify import TOLERANCE, errors, oracle

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 24, 4, 256, 16
_RUNS = 5


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
    console = Console(highlight=False)
    # before any memory is filled, so that a backend that cannot serve is told at once
    binding = bind(device, dtype=dtype, kv_layout=kv_layout, backend=backend)
    problem = binding.problem
    console.print(
        f"one decode step, {batch} × {context:,} tokens, {NUM_HEADS} query heads on "
        f"{NUM_KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}, shuffled; "
        f"{str(problem.dtype).removeprefix('torch.')}, {kv_layout}"
    )
    console.print(f"{binding.backend} on {problem.device} serves it")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        step = make_step(batch, context, kv_layout, problem.dtype, problem.device, progress)
        times = _time(step, backend, progress)
        error = _check(step, problem, backend, progress)
    return _conclude(console, step, times, error, context)


def make_step(
    batch: int,
    context: int,
    kv_layout: KVLayout,
    dtype: torch.dtype,
    device: str,
    progress: Progress | None = None,
) -> Step:
    """Random keys and values in shuffled blocks; every slot past a context holds NaN."""
    per_sequence = -(-context // BLOCK_SIZE)
    num_blocks = batch * per_sequence
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    generator = torch.Generator(device).manual_seed(0)
    keys = torch.empty(shape, dtype=dtype, device=device)
    values = torch.empty(shape, dtype=dtype, device=device)
    chunk = 512
    task = progress.add_task("filling the cache", total=num_blocks) if progress else None
    for first in range(0, num_blocks, chunk):
        keys[first : first + chunk].normal_(generator=generator)
        values[first : first + chunk].normal_(generator=generator)
        if progress and task is not None:
            progress.advance(task, chunk)
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


def _time(step: Step, backend: str | None, progress: Progress) -> list[float]:
    """Seconds of each of a few warm runs."""
    task = progress.add_task("timing", total=_RUNS + 1)
    times = []
    for _ in range(_RUNS + 1):
        start = time.perf_counter()
        step.attend(backend)
        if step.query.is_cuda:
            torch.cuda.synchronize(step.query.device)
        times.append(time.perf_counter() - start)
        progress.advance(task)
    return times[1:]  # the first one warms up


def _check(step: Step, problem: Problem, backend: str | None, progress: Progress) -> float:
    """The worst row's error relative to the fp64 oracle, sequence by sequence."""
    batch = step.query.shape[0]
    task = progress.add_task("checking against fp64", total=batch)
    out = step.attend(backend)
    worst = 0.0
    for b in range(batch):
        row = slice(b, b + 1)
        call = Call(
            query=step.query[row], key_cache=step.key_cache, value_cache=step.value_cache,
            block_tables=step.block_tables[row], seq_lens=step.seq_lens[row], out=out[row],
            lse=None, kv_layout=step.kv_layout, scale=HEAD_DIM**-0.5, max_query_len=1,
            max_seq_len=step.block_tables.shape[1] * BLOCK_SIZE,
        )  # fmt: skip
        worst = max(worst, errors(call, oracle(call, problem))[0])
        progress.advance(task)
    return worst


def _conclude(console: Console, step: Step, times: list[float], error: float, context: int) -> int:
    median = statistics.median(times)
    batch = step.query.shape[0]
    elements = 2 * batch * context * NUM_KV_HEADS * HEAD_DIM  # each key and value once
    moved = elements * step.key_cache.element_size()
    limit = TOLERANCE[step.query.dtype]
    right = error <= limit
    console.print(
        f"time   {median * 1e3:,.2f} ms (median of {len(times)}; "
        f"{min(times) * 1e3:,.2f} to {max(times) * 1e3:,.2f})"
    )
    console.print(
        f"moved  {moved / 1e6:,.1f} MB of keys and values, {moved / median / 1e9:,.1f} GB/s"
    )
    verdict = "[green]right[/]" if right else "[red]WRONG[/]"
    console.print(
        f"error  {error:.1e} relative to fp64 in the worst row; "
        f"at most {limit:.0e} is right: {verdict}"
    )
    return 0 if right else 1
