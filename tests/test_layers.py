"""Which layer may import which, read off the import statements; nothing is imported here.

- A backend imports the shared modules and itself: not the dispatcher, not another backend.
- A shared module imports only shared modules.
- The dispatcher imports the shared modules; a backend only in its registry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
# the modules of backends/ that are no backend; its docstring says what each is for
SHARED = {
    "protocol", "facts", "errors", "states", "layouts", "platform_rules", "kv_write",
    "cache_folder",
}  # fmt: skip
REGISTRIES = {"registry.py"}  # the files of dispatch/ that may name a backend
CODE = {".py", ".cu", ".cuh", ".cpp", ".h"}
MOST_LINES = 400
DOTTED = re.compile(r"pagedattn(\.\w+)+")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of ours, wherever in the file it stands.

    `from a.b import c` gives `a.b.c`, since c may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            names = [f"{start}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and DOTTED.fullmatch(str(node.value)):
            names = [str(node.value)]  # for import_module, at once or later
            if names == ["pagedattn.backends"]:  # how its files are found, not an import of one
                names = []
        for name in names:
            if name.split(".")[0] in ("", "pagedattn"):
                yield getattr(node, "lineno", 0), name


def reason_against(unit: str, name: str) -> str | None:
    """Why the file of `unit` may not import `name`; None if it may.

    A unit is "dispatch", "registry", "shared", or a backend's name.
    """
    if name.startswith("."):
        return "a relative import"
    parts = name.split(".")[1:]
    if parts[:1] == ["csrc"]:
        return "the shared modules need no sources" if unit == "shared" else None
    if parts[:1] != ["backends"]:
        return None if unit in ("dispatch", "registry") else "the dispatcher"
    target = parts[1] if len(parts) > 1 else "*"
    if target in SHARED or target == unit or unit == "registry":
        return None
    return f"the backend {target}"


def units(tree: Path) -> Iterator[tuple[Path, str]]:
    """Each Python file of the package, with the unit that it belongs to."""
    for path in sorted((tree / "dispatch").rglob("*.py")):
        yield path, "registry" if path.name in REGISTRIES else "dispatch"
    for path in sorted((tree / "backends").rglob("*.py")):
        first = path.relative_to(tree / "backends").parts[0].removesuffix(".py")
        yield path, "shared" if first in SHARED | {"__init__"} else first


def violations(tree: Path) -> list[str]:
    found = []
    for path, unit in units(tree):
        for line, name in imported(path.read_text(encoding="utf-8")):
            reason = reason_against(unit, name)
            if reason:
                found.append(f"{path.relative_to(tree)}:{line}: imports {name}: {reason}")
    return found


def test_layers() -> None:
    assert violations(REPO) == []


@pytest.mark.parametrize(
    ("path", "source", "told"),
    [
        ("backends/one.py", "from pagedattn.backends.protocol import Call", None),
        ("backends/one/run.py", "from pagedattn.backends.one.load import f", None),
        ("backends/one.py", "import pagedattn.csrc", None),
        ("backends/one.py", "import torch", None),
        ("backends/one.py", "import pagedattn", "the dispatcher"),
        ("dispatch/api.py", "files('pagedattn.backends')", None),
        ("backends/one.py", "from pagedattn import chain", "the dispatcher"),
        ("backends/one.py", "def f():\n    import pagedattn.chain", "the dispatcher"),
        ("backends/one.py", "import_module('pagedattn.chain')", "the dispatcher"),
        ("dispatch/api.py", "LATE = {'one': 'pagedattn.backends.one'}", "the backend one"),
        ("backends/one.py", "from pagedattn.backends import two", "the backend two"),
        ("backends/one/a.py", "from pagedattn.backends.two.b import f", "the backend two"),
        ("backends/one.py", "from . import two", "a relative import"),
        ("backends/states.py", "from pagedattn.backends.facts import Facts", None),
        ("backends/states.py", "from pagedattn.backends import one", "the backend one"),
        ("backends/states.py", "import pagedattn.api", "the dispatcher"),
        ("dispatch/api.py", "from pagedattn.chain import bind", None),
        ("dispatch/api.py", "from pagedattn.backends.errors import BuildError", None),
        ("dispatch/api.py", "from pagedattn.backends.one import f", "the backend one"),
        ("dispatch/registry.py", "from pagedattn.backends.one import f", None),
    ],
)
def test_the_rule_bites(tmp_path: Path, path: str, source: str, told: str | None) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    found = violations(tmp_path)
    if told is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(path)
        assert found[0].endswith(told)


def test_shared_modules_are_there_and_said_to_be_shared() -> None:
    assert {p.stem for p in (REPO / "backends").glob("*.py")} >= SHARED
    text = ast.get_docstring(ast.parse((REPO / "backends/__init__.py").read_text())) or ""
    assert {name for name in SHARED if f"`{name}`" not in text} == set()


def test_no_file_is_long() -> None:
    folders = ("dispatch", "backends", "csrc", "tests", "benchmarks", "examples", ".ci")
    paths = [p for f in folders for p in (REPO / f).rglob("*") if p.suffix in CODE]
    lengths = {p: p.read_text(encoding="utf-8").count("\n") for p in paths}
    assert lengths
    assert [f"{p.relative_to(REPO)}: {n}" for p, n in lengths.items() if n > MOST_LINES] == []
