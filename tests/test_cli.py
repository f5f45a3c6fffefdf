"""The commands, as a person and a script meet them: words, width and exit codes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from _backends import FakeBackend, run_command, run_python
from _backends import fresh_chain as fresh_chain

from pagedattn import demo, register_backend, verify_command
from pagedattn.backends.layouts import LAYOUTS
from pagedattn.cli import main

pytestmark = pytest.mark.usefixtures("fresh_chain")


def _plain(text: str) -> str:
    """`text`, known to be readable when piped."""
    assert "\x1b" not in text
    assert "Traceback" not in text
    for line in text.splitlines():
        assert line == line.rstrip()
        # a path is not broken, however long
        assert len(line) <= 80 or max(map(len, line.split())) > 60, line
    return text


def test_report_piped_is_plain_and_json_is_json() -> None:
    done = run_command("report", PAGEDATTN_BACKEND="nobody", PAGEDATTN_EAGER="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no backend is called 'nobody'" in " ".join(_plain(done.stdout).split())
    done = run_command("report", "--json", PAGEDATTN_BACKEND="reference")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["chain"]["requested"] == ["reference"]
    (row,) = [r for r in found["backends"] if r["name"] == "reference"]
    assert [row[s] for s in ("present", "loadable", "verified", "selected")] == [True] * 4


def test_report_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    assert "requested  auto: torch, triton, cuda" in _plain(capsys.readouterr().out)


def test_report_survives_a_binding_that_fails_in_any_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ArithmeticError("1 + 1 = 3")

    monkeypatch.setattr("pagedattn.cli.bind", broken)
    assert main(["report", "--bind"]) == 0
    assert "binding failed: ArithmeticError: 1 + 1 = 3" in capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        ["--context", "1"],
        ["--context", "17", "--dtype", "bf16"],
        ["--context", "16", "--dtype", "fp16", "--batch", "2"],
    ],
    ids=" ".join,
)
def test_demo_is_right(layout: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["demo", "--device", "cpu", "--backend", "reference", "--layout", layout]
    assert main([*asked, *options]) == 0
    out = _plain(capsys.readouterr().out)
    for said in ("24 query heads on 4 KV heads of 256", layout, "reference on cpu", "\nright\n"):
        assert said in out


def test_demo_over_a_wrong_result_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    register_backend(FakeBackend("acme", run_fails="wrong"))
    assert main(["demo", "--device", "cpu", "--context", "17", "--backend", "acme"]) == 1
    assert "\nWRONG\n" in _plain(capsys.readouterr().out)


def test_demo_that_does_not_fit_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_free_memory", lambda device: 10**9)
    asked = ["demo", "--device", "cpu", "--backend", "reference", "--context", "1000000"]
    assert main(asked) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "pagedattn: this demo needs 16.4 GB on cpu, and 1.0 GB are free; "
        "choose a smaller --context or --batch\n"
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["demo", "--backend", "tritn"], "did you mean triton?"),
        (["demo", "--device", "quantum"], "'quantum' is no device"),
        (["demo", "--device", "meta"], "meta is neither a CPU nor a CUDA device"),
        (["verify", "--backend", "nobody"], "no backend is called 'nobody'"),
        (["verify", "--device", "quantum"], "'quantum' is no device"),
    ],
)
def test_what_cannot_be_done_is_one_message_on_stderr(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagedattn: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [[], ["dance"], ["demo", "--context", "0"], ["demo", "--context", "many"]]
)
def test_wrong_usage_exits_with_2(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "usage: pagedattn" in capsys.readouterr().err


def test_a_forced_backend_that_cannot_serve_is_told_within_a_second_of_torchs_import() -> None:
    began = time.perf_counter()
    assert run_python("import torch").returncode == 0
    torch_alone = time.perf_counter() - began
    began = time.perf_counter()
    done = run_command("demo", PAGEDATTN_BACKEND="cuda")
    took = time.perf_counter() - began
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no backend can serve this call (PAGEDATTN_BACKEND=cuda)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "  cuda: " in done.stderr
    # the bar is a second; a test's machine may be busy with others, so it gets two
    assert took < 2 * torch_alone + 2


@pytest.fixture
def short_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [replace(p, head_dim=32) for p in verify_command.problems("cpu")][:2]
    monkeypatch.setattr(verify_command, "problems", lambda device: iter(grid))


@pytest.mark.usefixtures("short_grid")
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ({}, 0, "acme: 2 passed, 0 failed, 0 skipped"),
        ({"run_fails": "wrong"}, 1, "acme: 0 passed, 2 failed, 0 skipped"),
        ({"run_fails": "raises"}, 1, "failed in its proof: RuntimeError: too many"),
        ({"load_fails": "build"}, 1, "could not be loaded: BuildError: acme.cu(7):"),
        ({"unsupported": ("no fp32",)}, 1, "acme: 0 passed, 0 failed, 2 skipped"),
    ],
)
def test_verify(
    fault: dict[str, Any], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register_backend(FakeBackend("acme", **fault))
    assert main(["verify", "--device", "cpu", "--backend", "acme"]) == code
    out = _plain(capsys.readouterr().out)
    assert said in " ".join(out.split())
    assert out.count("PASS") == (2 if code == 0 else 0)


def test_verify_of_an_absent_backend_gives_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    register_backend(FakeBackend("acme", absent=("no card", "no driver"), fix="buy a card"))
    assert main(["verify", "--device", "cpu", "--backend", "acme"]) == 1
    err = capsys.readouterr().err
    for said in ("acme: no card", "acme: no driver", "to change that: buy a card"):
        assert said in err


@pytest.mark.usefixtures("short_grid")
def test_case_37_verify_stops_at_a_lost_device(capsys: pytest.CaptureFixture[str]) -> None:
    register_backend(FakeBackend("acme", run_fails="sticky"))
    register_backend(FakeBackend("beta"))
    assert main(["verify", "--device", "cpu", "--backend", "acme,beta"]) == 1
    captured = capsys.readouterr()
    assert "illegal memory access" in captured.err
    assert "beta" not in captured.out


def test_a_reader_who_leaves_early_sees_no_traceback() -> None:
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'pagedattn', 'report', '--json'],"
        " stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "p.stdout.close()\n"
        "print(p.stderr.read().decode(), p.wait())"
    )
    assert run_python(code).stdout.strip() == "0"


def test_an_ascii_locale_is_no_crash() -> None:
    done = run_command("report", PYTHONIOENCODING="ascii", PAGEDATTN_BACKEND="référence")
    assert done.returncode == 0, done.stderr
    assert "PAGEDATTN_BACKEND=r?f?rence" in done.stdout
