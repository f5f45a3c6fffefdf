"""Locks over a build: one at a time, a wait that ends, a dead owner's lock."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from _backends import _child_environment
from _build_fixtures import cache as cache
from _build_fixtures import needs_gcc
from _build_fixtures import tree as tree
from _build_fixtures import tree_template as tree_template
from _fake_corex import ABI, compiled, set_mode

from pagedattn.backends.cuda import binary_cache, build_lock
from pagedattn.backends.errors import BuildError

HOLD = """
import sys, time
from pathlib import Path
from pagedattn.backends.cuda import build_lock
with build_lock.hold(Path(sys.argv[1]), 1):
    print("held", flush=True)
    time.sleep(60)
"""
BUILD = """
import sys
from pathlib import Path
import _fake_corex
from pagedattn.backends.cuda import compile, source
from pagedattn.backends.cuda.spec import Spec
source.entry = lambda: Path("/nowhere/portable.cu")
tree, scratch = map(Path, sys.argv[1:3])
toolchain = _fake_corex.toolchain_of(_fake_corex.facts_of(tree, scratch))
print(compile.build(toolchain, Spec("fp16", "fp16", 256, 6, 16), _fake_corex.ABI).path)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=_child_environment({}), stdout=-1, text=True)


def write_owner(path: Path, pid: int, host: str) -> None:
    owner = {"pid": pid, "host": host, "since": time.time() - 90}
    Path(f"{path}.owner").write_text(json.dumps(owner))


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_lock_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.lock"
    for _ in range(2):
        with build_lock.hold(path, 0):
            owner = build_lock.read_owner(path)
            assert owner is not None
            assert (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
        assert build_lock.read_owner(path) is None


def test_wait_names_path_age_and_owner_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_lock, "QUIET_S", 0.2)
    path = tmp_path / "x.lock"
    with filelock.FileLock(path):
        write_owner(path, 1, "elsewhere")
        began = time.monotonic()
        with pytest.raises(BuildError) as caught, build_lock.hold(path, 1.0):
            pytest.fail("the lock was not free")
        assert 1.0 <= time.monotonic() - began < 5
    for text in (str(caught.value), caplog.text):
        assert f"{path}" in text
        assert "process 1 on elsewhere" in text
        assert "held for 9" in text
    assert len(caplog.records) == 1  # said once


def test_lock_of_an_unknown_owner_ends_too(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with (
        filelock.FileLock(path),
        pytest.raises(BuildError, match="not known"),
        build_lock.hold(path, 0.1),
    ):
        pytest.fail("the lock was not free")


def test_dead_owners_lock_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Something that the owner forked holds the lock still."""
    path = tmp_path / "x.lock"
    with filelock.FileLock(path):
        write_owner(path, dead_pid(), socket.gethostname())
        with caplog.at_level(logging.WARNING), build_lock.hold(path, 5):
            owner = build_lock.read_owner(path)
            assert owner is not None
            assert owner.pid == os.getpid()
    assert "taken over" in caplog.text


def test_killed_owner_leaves_nothing_to_wait_for(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    child = start(HOLD, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(BuildError, match=f"process {child.pid} "), build_lock.hold(path, 0.1):
        pytest.fail("the lock was not free")
    child.kill()
    child.communicate()
    with build_lock.hold(path, 5):
        pass


@needs_gcc
def test_two_processes_compile_once(tree: Path, cache: Path, tmp_path: Path) -> None:
    set_mode(tree, "slow")
    children = [start(BUILD, tree, tmp_path / f"machine{i}") for i in range(2)]
    paths = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert paths[0] == paths[1] != ""
    assert compiled(tree) == 1
    (binary,) = binary_cache.listing()
    assert (str(binary.path), binary.made_of["abi"]) == (paths[0].strip(), ABI)
