"""Several tasks at once on a CPU, each on its own core.

torch spreads each operation over the cores, so a walk of many short operations meets a barrier
at every one of them, its scratch travels between the cores' caches, and one core that is busy
with something else holds up all of them each time. Here a thread takes whole tasks instead and
its operations stay on its core. How many threads an operation uses is a property of the thread
that calls it (OpenMP's and MKL's own calls for that; `torch.set_num_threads` would change the
whole process).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Task = TypeVar("Task")

# beyond this the Python side of the walk is the limit; operations use the cores left over
MAX_WORKERS = 8


@functools.cache
def _libraries() -> ctypes.CDLL | None:
    """torch's own library, through which the OpenMP and MKL that it is linked to are found."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                return ctypes.CDLL(path)
            except OSError:
                return None
    return None


def _limit_this_thread(threads: int) -> bool:
    """Make torch's operations on the calling thread use `threads` cores; False if it cannot."""
    library = _libraries()
    torch.get_num_threads()  # a thread's first operation resets its limit: let that be past
    try:
        library.omp_set_num_threads(threads)  # type: ignore[union-attr]
    except AttributeError:
        return False
    with contextlib.suppress(AttributeError):  # a torch without MKL
        library.MKL_Set_Num_Threads_Local(threads)  # type: ignore[union-attr]
    return torch.get_num_threads() == threads


@functools.cache
def threads_can_be_limited() -> bool:
    """Whether a thread can be held to one core without changing the rest of the process."""
    before = torch.get_num_threads()
    found: list[bool] = []
    trial = threading.Thread(target=lambda: found.append(_limit_this_thread(1)))
    trial.start()
    trial.join()
    return found == [True] and torch.get_num_threads() == before


class _Shared(Iterator[Task]):
    """An iterator that several threads draw from; `stop` ends it for all of them."""

    def __init__(self, items: Iterable[Task]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self._stopped = False

    def __next__(self) -> Task:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


def run_on_cores(work: Callable[[Iterator[Task]], None], tasks: list[Task]) -> None:
    """Let threads draw from `tasks` until none is left.

    Parameters
    ----------
    work
        Called once on each thread with an iterator of the tasks that fall to it.
    tasks
        In the order in which they are handed out.

    Raises
    ------
    Exception
        The first that `work` raised; the other threads end after the task they are at.
    """
    cores = torch.get_num_threads()
    workers = min(cores, len(tasks), MAX_WORKERS)
    if workers < 2 or not threads_can_be_limited():
        work(iter(tasks))
        return
    shared = _Shared(tasks)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            _limit_this_thread(cores // workers)
            work(shared)
        except BaseException as failure:  # handed to the caller's thread below
            failures.append(failure)
            shared.stop()

    threads = [threading.Thread(target=run, name=f"pagedattn-{i}") for i in range(workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        shared.stop()  # an interrupt of the caller ends the threads too
    if failures:
        raise failures[0]
