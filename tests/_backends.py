"""Backends that misbehave on purpose, for the chain's tests; a child process can import them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn import chain, device_loss, registry, verdicts
from pagedattn.backends.errors import BackendUnavailable, BuildError
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, Problem, Runner
from pagedattn.backends.reference import attend

ROOT = Path(__file__).parents[1]


@dataclass
class FakeBackend:
    """A backend that is right unless `load_fails` or `run_fails` says how it is not.

    journal : a file that gets a line for each load and each run (of one sequence: "alone"),
        whichever process does it
    """

    name: str
    absent: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    fix: str | None = None
    load_fails: str | None = None
    run_fails: str | None = None
    journal: str | None = None
    slow_s: float = 0.0
    home: int = field(default_factory=os.getpid)  # the process that it must not kill or hang

    def not_present_reasons(self, facts: Facts) -> list[str]:
        return list(self.absent)

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return list(self.unsupported)

    def remedy(self, facts: Facts) -> str | None:
        return self.fix

    def load(self, problem: Problem) -> Runner:
        self._note("load")
        time.sleep(self.slow_s)
        if self.load_fails == "build":
            raise BuildError("acme.cu(7): error: expected a ;")
        if self.load_fails == "unavailable":
            raise BackendUnavailable("libacme.so is too old")
        if self.load_fails == "import":
            raise ImportError("no module named acme_kernels")
        if self.load_fails == "hang":
            self._hang()
        return self.run

    def run(self, call: Call) -> None:
        self._note("run" if call.seq_lens.numel() > 1 else "alone")
        attend(call)
        if self.run_fails == "wrong":
            call.out.mul_(1.01)
        if self.run_fails == "raises":
            raise RuntimeError("too many resources requested for launch")
        if self.run_fails == "sticky":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.run_fails == "dies":
            assert os.getpid() != self.home, "it ran in the process that it would kill"
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.run_fails == "hang":
            self._hang()

    def _hang(self) -> None:
        if os.getpid() != self.home:
            time.sleep(600)

    def _note(self, line: str) -> None:
        if self.journal:
            with open(self.journal, "a") as file:
                file.write(f"{line}\n")


def count(journal: Path, line: str) -> int:
    """How often a backend wrote `line` into its journal."""
    return journal.read_text().split().count(line) if journal.exists() else 0


def small_problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "device": "cpu", "dtype": torch.float32, "kv_dtype": torch.float32, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 32, "block_size": 16,
    }  # fmt: skip
    return Problem(**{**fields, **changes})


def inputs() -> tuple[torch.Tensor, ...]:
    """Arguments of a `paged_attention` over one sequence of 17 tokens, layout NHD."""
    cache = torch.randn(3, 16, 2, 32)
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    return torch.randn(1, 4, 32), cache, cache, table, torch.tensor([17], dtype=torch.int32)


@pytest.fixture
def fresh_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing bound, nothing kept, nothing registered by another test; undone afterwards."""
    for name in [n for n in os.environ if n.startswith("PAGEDATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", str(tmp_path / "cache"))
    # tiny operations: more threads only wait for one another, here and in children
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    instances = dict(registry._instances)
    _forget()
    yield
    torch.set_num_threads(threads)
    registry._instances.clear()
    registry._instances.update(instances)
    _forget()


def _forget() -> None:
    chain.reset()
    chain._told.clear()
    device_loss.lost.clear()
    verdicts._memory.clear()
    verdicts.not_kept = None


def run_python(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that can import pagedattn and these tests' helpers."""
    return subprocess.run(
        [sys.executable, *arguments, "-c", code],
        env=_child_environment(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pagedattn`` with its output piped."""
    return subprocess.run(
        [sys.executable, "-m", "pagedattn", *arguments],
        env=_child_environment(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _child_environment(environ: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PAGEDATTN_") or "CACHE" in k}
    path = os.pathsep.join(p for p in sys.path if p)
    # the same on a machine with a GPU as on one without
    return {**kept, "PYTHONPATH": path, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", **environ}
