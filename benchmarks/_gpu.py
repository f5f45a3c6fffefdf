"""Timing on a GPU: graph replays with a cold L2, and the ceilings that a figure is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


class Timer:
    """Times graph replays, the L2 cache flushed before each.

    Flushing writes a buffer several times the cache's size, as `triton.testing.do_bench` does, and
    what is timed pays for writing back the part that the cache holds; with `clean` it reads the
    buffer, as a layer before reads its weights.
    """

    def __init__(self, repeats: int = 60, clean: bool = False) -> None:
        self._repeats = repeats
        buffer = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
        self._flush: Callable[[], object] = buffer.amax if clean else buffer.zero_

    def graph(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """Median, fastest and slowest µs of `run` captured in a CUDA graph."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles and allocates before the capture
                run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return self.calls(graph.replay)

    def _warm(self, run: Callable[[], object]) -> None:
        """Keep the device busy until its clocks have risen: the first figure after a pause, while
        the host computes a truth, say, came out a tenth too slow."""
        stop = time.monotonic() + 0.15
        while time.monotonic() < stop:
            for _ in range(10):
                self._flush()
                run()
            torch.cuda.synchronize()

    def calls(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """The same of `run` as it is called."""
        self._warm(run)
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(self._repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(self._repeats)]
        for start, end in zip(starts, ends, strict=True):
            self._flush()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        times = [1e3 * s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)]
        return statistics.median(times), min(times), max(times)


def ceilings(timer: Timer) -> dict[str, float]:
    """Read and copy TB/s of device memory, and µs of a graph of one trivial kernel, now."""
    size = 4 << 30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = timer.calls(lambda: target.copy_(source))[0]
    words = source.view(torch.int32)
    read = timer.calls(lambda: words.amax())[0]
    one = torch.zeros(1, device="cuda")
    graph = timer.graph(lambda: one.add_(1))[0]
    return {
        "read_tbps": size / read / 1e6,
        "copy_tbps": 2 * size / copy / 1e6,
        "empty_graph_us": graph,
    }
