"""``pagedattn build``, as a person and an image's script meet it."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from _backends import FakeBackend, run_command
from _backends import fresh_chain as fresh_chain
from _build_fixtures import cache as cache
from _build_fixtures import needs_gcc
from _build_fixtures import tree as tree
from _build_fixtures import tree_template as tree_template
from _fake_corex import CudaOnCpu, compiled, facts_of, set_mode

from pagedattn import build_command, register_backend
from pagedattn.backends.errors import BuildError
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import BuildOptions, Built
from pagedattn.cli import main

pytestmark = pytest.mark.usefixtures("fresh_chain", "cache")


@pytest.fixture
def facts(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """The command meets a BI-V100 with the fake tree."""
    found = facts_of(tree, tmp_path / "machine")
    monkeypatch.setattr(build_command, "probe_facts", lambda: found)
    register_backend(CudaOnCpu())
    return found


def run(*options: str) -> int:
    return main(["build", "--backend", "fakecuda", *options])


@needs_gcc
def test_builds_lists_and_builds_nothing_twice(
    facts: Facts, tree: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--head-dim", "64,128", "--group", "1", "6", "--dtype", "fp16", "--jobs", "2"]
    for _ in range(2):
        assert run(*asked) == 0
        out = capsys.readouterr().out
        for size in ("d64-g1", "d64-g6", "d128-g1", "d128-g6"):
            assert f"fp16-fp16-{size}-b16 ivcore10" in out
        assert f"{cache}/binaries/" in out
        assert compiled(tree) == 4
    assert run("--list") == 0
    assert capsys.readouterr().out.count(" ivcore10 ") == 4


@needs_gcc
def test_default_is_the_reference_class(facts: Facts, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    assert "nothing is built" in capsys.readouterr().out
    assert run() == 0
    assert "fp16-fp16-d256-g6-b16 ivcore10" in capsys.readouterr().out


@needs_gcc
def test_failure_is_told_and_exits_with_1(
    facts: Facts, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_mode(tree, "error")
    assert run() == 1
    assert "portable.cu:7:3: error: expected a ;" in " ".join(capsys.readouterr().out.split())
    set_mode(tree, "good")
    assert run() == 0  # who asks by hand has changed something: it is tried again


@needs_gcc
def test_no_gpu_and_no_arch(
    facts: Facts, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = facts_of(tree, tmp_path / "image", devices=None)
    monkeypatch.setattr(build_command, "probe_facts", lambda: found)
    assert run() == 1
    assert "no GPU is in sight, so name what to build for: --arch" in capsys.readouterr().err
    assert run("--arch", "ivcore10") == 0
    assert compiled(tree) == 1


@needs_gcc
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--arch", "sm_90"], "sm_90 is an NVIDIA architecture"),
        (["--arch", "ninety"], "'ninety' is no architecture"),
        (["--head-dim", "100"], "head_dim is 100"),
        (["--kv-dtype", "fp8"], "a cache of fp8"),
    ],
)
def test_wrong_options_compile_nothing(
    options: list[str], told: str, facts: Facts, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == 1
    assert told in capsys.readouterr().err
    assert compiled(tree) == 0


def test_backend_that_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    register_backend(FakeBackend("acme"))
    assert main(["build", "--backend", "acme"]) == 1
    assert "the backend acme has nothing to build" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--head-dim", "x"]])
def test_wrong_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["build", *options])
    assert caught.value.code == 2


def test_help_names_every_option() -> None:
    done = run_command("build", "--help")
    assert done.returncode == 0
    for option in ("--arch", "--dtype", "--kv-dtype", "--head-dim", "--group", "--block-size"):
        assert option in done.stdout


def test_options_default_where_none_is_given() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    build_command.add_options(parser)
    assert build_command.options_of(parser.parse_args([])) == BuildOptions()
    given = parser.parse_args(["--arch", "sm_80,sm_90", "--arch", "sm_86"])
    assert build_command.options_of(given).archs == ("sm_80", "sm_90", "sm_86")


def test_jobs_run_at_once_and_one_failure_stops_no_other() -> None:
    both = threading.Barrier(2, timeout=20)

    def job(name: str) -> Any:
        def work(stop: threading.Event) -> Built:
            both.wait()
            if name == "b":
                raise BuildError("no such luck")
            return Built(name, "/x", "cc", "now", 0.1)

        return work

    made, failed = build_command.compile_all({name: job(name) for name in "ab"}, 2)
    assert [one.name for one in made] == ["a"]
    assert str(failed["b"]) == "no such luck"


@needs_gcc
def test_interrupt_ends_the_compilers(facts: Facts, tree: Path) -> None:
    set_mode(tree, "stuck")
    main_thread, over = threading.get_ident(), threading.Event()
    interrupted: list[float] = []

    def interrupt() -> None:
        while not compiled(tree):  # however busy the machine is
            if over.wait(0.05):
                return
        interrupted.append(time.monotonic())
        signal.pthread_kill(main_thread, signal.SIGINT)

    # which a shell has its background jobs ignore
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        assert run() == 130
        assert time.monotonic() - interrupted[0] < 10
        assert compiled(tree) == 1
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
