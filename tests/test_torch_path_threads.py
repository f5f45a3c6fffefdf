"""The torch path's threads on a CPU: every task done, failures told, forks served."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _torch_calls import assert_right, make_call

from pagedattn.backends.protocol import KVLayout, Problem
from pagedattn.backends.python_v2 import TorchBackend
from pagedattn.backends.python_v2.cpu_threads import run_on_cores, threads_can_be_limited

every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])


def test_tasks_are_all_done_whichever_thread_takes_them() -> None:
    done: list[int] = []
    threads: set[int] = set()

    def work(tasks: Iterator[int]) -> None:
        for task in tasks:
            threads.add(threading.get_ident())
            time.sleep(0.001)  # let the others have some
            done.append(task)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        run_on_cores(work, list(range(100)))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert sorted(done) == list(range(100))
    assert len(threads) > 1 or not threads_can_be_limited()


def test_a_failure_on_a_thread_reaches_the_caller() -> None:
    def work(tasks: Iterator[int]) -> None:
        for task in tasks:
            if task == 3:
                raise MemoryError("no room")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(MemoryError, match="no room"):
            run_on_cores(work, list(range(10)))
    finally:
        torch.set_num_threads(before)


FORK = """
import os, torch
from pagedattn.backends.python_v2.cpu_threads import run_on_cores
torch.set_num_threads(2)
def work(tasks):
    for task in tasks:
        done.append(task)
done = []
run_on_cores(work, list(range(10)))
if os.fork() == 0:
    done = []
    run_on_cores(work, list(range(10)))
    os._exit(0 if sorted(done) == list(range(10)) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_child_has_threads_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@every_layout
def test_many_cores_and_one_make_the_same_of_a_long_context(layout: KVLayout) -> None:
    shape: dict[str, Any] = {"heads": 24, "kv_heads": 4, "head_dim": 256, "layout": layout}
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            call = make_call([3000, 0, 17], query_lens=[1, 2, 1], **shape)
            run_call = TorchBackend().load(
                Problem("cpu", torch.float32, torch.float32, 24, 4, 256, 16)
            )
            run_call(call)
            assert_right(call)
    finally:
        torch.set_num_threads(before)
