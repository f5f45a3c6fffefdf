"""The README: its example runs, its figures have files, its variables are all there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from pagedattn.settings import VARIABLES

REPO = Path(__file__).resolve().parents[1]
TEXT = (REPO / "README.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert names["out"].shape == (1, 24, 256)
    assert names["out"].isfinite().all()


def test_the_figures_are_those_of_the_result_files() -> None:
    section = re.search(r"<!-- results -->\n(.*?)\n<!-- /results -->", TEXT, re.DOTALL)
    assert section
    assert section[1] == _readme_script().results(), "run benchmarks/readme.py"
    links = re.findall(r"\(benchmarks/results/([^)]+)\)", section[1])
    assert links
    assert [name for name in links if not (REPO / "benchmarks/results" / name).exists()] == []


def test_every_variable_is_listed() -> None:
    assert set(re.findall(r"^\| `(PAGEDATTN_\w+)`", TEXT, re.MULTILINE)) == set(VARIABLES)


def test_the_report_is_shown() -> None:
    section = re.search(r"<!-- report -->\n```\n(.*?)\n```", TEXT, re.DOTALL)
    assert section
    for word in ("cuda", "triton", "torch", "present", "loadable", "verified", "selected"):
        assert word in section[1]


def test_local_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (REPO / link).exists()] == []


def _readme_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", REPO / "benchmarks" / "readme.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
