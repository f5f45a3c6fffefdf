"""compute-sanitizer over the kernels on hard problems: no access outside, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagedattn import registry
from pagedattn.probe import facts

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("hard_cases.py")
FOUND = 97  # the sanitizer's exit code where it has found something


def _sanitizer() -> str | None:
    """Where it is: on the PATH, or beside a toolkit that is not."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin"))
    places = [os.environ.get("PATH", ""), *map(str, toolkits)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


@pytest.mark.parametrize(
    ("tool", "which"),
    [
        ("memcheck", "cuda"),
        ("memcheck", "cuda-portable"),
        ("memcheck", "triton"),
        ("racecheck", "cuda"),
        ("racecheck", "cuda-portable"),
    ],
)
def test_nothing_is_found(tool: str, which: str, pytestconfig: pytest.Config) -> None:
    sanitizer = _sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    absent = registry.get(which.split("-")[0]).not_present_reasons(facts())
    if absent:
        pytest.skip("; ".join(absent))
    if which != "triton" and pytestconfig.option.cuda_cache is None:
        pytest.skip("no --cuda-cache was named, so nothing is compiled here")
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAM), which],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            # tensors side by side in torch's pool would hide what goes beyond one of them
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-6000:]
    assert "hard problems are right" in done.stdout, told[-6000:]
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert summary in told, told[-6000:]
