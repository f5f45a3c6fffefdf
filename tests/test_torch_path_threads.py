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

import pagedattn
from pagedattn.backends.protocol import KVLayout, Problem
from pagedattn.backends.python_v2 import TorchBackend, host_road
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_case_21_the_number_of_threads_follows_no_batch(
    dtype: torch.dtype, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's operations give other bits on two cores than on one: a small call and a sequence in
    a large batch must use equally many."""
    keys, values = torch.randn(2, 64, 16, 2, 64).to(dtype)
    query = torch.randn(6, 2, 64).to(dtype)
    tables = torch.randint(0, 64, (6, 40), dtype=torch.int32)
    lengths = torch.tensor([640, 100, 17, 500, 333, 1], dtype=torch.int32)

    def attend(rows: slice, threads_from: int) -> torch.Tensor:
        monkeypatch.setattr(host_road, "THREADS_FROM_BYTES", threads_from)
        return pagedattn.paged_attention(
            query[rows], keys, values, tables[rows], lengths[rows], kv_layout="NHD",
            softcap=softcap, batch_invariant=True, backend="torch",
        )  # fmt: skip

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = attend(slice(None), 0)
        for b in range(6):
            for threads_from in (0, 1 << 60):
                assert torch.equal(attend(slice(b, b + 1), threads_from)[0], together[b])
    finally:
        torch.set_num_threads(before)


LATE = """
import atexit, torch
from pagedattn.backends.python_v2.cpu_threads import run_on_cores
torch.set_num_threads(2)
def work(tasks):
    for task in tasks:
        done.append(task)
done = []
run_on_cores(work, list(range(10)))
def late():
    run_on_cores(work, list(range(10)))
    print(sorted(done[10:]) == list(range(10)))
atexit.register(late)
"""


def test_a_call_while_the_interpreter_ends_is_served() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LATE]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


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
