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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
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


def _limit_this_thread(threads: int) -> int | None:
    """Make torch's operations on the calling thread use `threads` cores.

    Returns
    -------
    What MKL's limit for this thread was (0: none of its own), or None if it cannot be done.
    """
    library = _libraries()
    torch.get_num_threads()  # a thread's first operation resets its limit: let that be past
    try:
        library.omp_set_num_threads(threads)  # type: ignore[union-attr]
    except AttributeError:
        return None
    before = 0
    with contextlib.suppress(AttributeError):  # a torch without MKL
        before = library.MKL_Set_Num_Threads_Local(threads)  # type: ignore[union-attr]
    return before if torch.get_num_threads() == threads else None


@contextlib.contextmanager
def _limited(threads: int) -> Iterator[None]:
    """A context in which the calling thread's operations use `threads` cores."""
    cores = torch.get_num_threads()
    before = _limit_this_thread(threads)
    try:
        yield
    finally:
        library = _libraries()
        if library is not None:
            library.omp_set_num_threads(cores)
            with contextlib.suppress(AttributeError):
                library.MKL_Set_Num_Threads_Local(before or 0)


@functools.cache
def threads_can_be_limited() -> bool:
    """Whether a thread can be held to one core without changing the rest of the process."""
    before = torch.get_num_threads()
    found: list[bool] = []
    trial = threading.Thread(target=lambda: found.append(_limit_this_thread(1) is not None))
    trial.start()
    trial.join()
    return found == [True] and torch.get_num_threads() == before


def on_one_core() -> AbstractContextManager[object]:
    """A context in which the calling thread's operations use one core, where that can be had."""
    return _limited(1) if threads_can_be_limited() else contextlib.nullcontext()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for work: to start one takes milliseconds where the cores are busy."""
    return ThreadPoolExecutor(MAX_WORKERS - 1, thread_name_prefix="pagedattn")


if hasattr(os, "register_at_fork"):  # a child has the pool, but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


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


def run_on_cores(
    work: Callable[[Iterator[Task]], None], tasks: list[Task], *, one_each: bool = False
) -> None:
    """Let this and other threads draw from `tasks` until none is left.

    Parameters
    ----------
    work
        Called once on each thread with an iterator of the tasks that fall to it.
    tasks
        In the order in which they are handed out.
    one_each
        Each operation uses one core, however few tasks there are: how many share an operation
        may change its bits.

    Raises
    ------
    Exception
        The first that `work` raised; the other threads end after the task they are at.
    """
    cores = torch.get_num_threads()
    workers = min(cores, len(tasks), MAX_WORKERS)
    if workers < 2 or not threads_can_be_limited():
        with on_one_core() if one_each else contextlib.nullcontext():
            work(iter(tasks))
        return
    shared = _Shared(tasks)

    def run() -> None:
        try:
            with _limited(1 if one_each else cores // workers):
                work(shared)
        finally:
            shared.stop()  # all done, or one failed and the others need not go on

    helpers: list[Future[None]] = []
    # no new thread can be had where the interpreter is ending or the system has no more
    with contextlib.suppress(RuntimeError):
        for _ in range(1, workers):
            helpers.append(_pool().submit(run))
    try:
        run()
    finally:
        # a helper that has not begun by now (other calls have them all) has nothing to do
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()
