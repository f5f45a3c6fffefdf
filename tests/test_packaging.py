"""The wheel and the sdist hold what the tree holds, and an installed wheel works by itself.

The packages are listed by hand in pyproject.toml, since the folders have other names than the
import names: a forgotten one must fail here. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = {
    "dispatch": "pagedattn",
    "backends": "pagedattn/backends",
    "csrc": "pagedattn/csrc",
}
CORE = {"torch", "packaging", "ninja", "rich", "platformdirs", "filelock"}
SOURCES = (
    *PACKAGE_FOLDERS,
    *("tests", "benchmarks", "examples", ".ci"),
    *("pyproject.toml", "setup.cfg", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
COMPILED = {"torch", "ninja"}  # the two that are not pure Python, on purpose
STATES = {"present", "loadable", "verified", "selected"}
BUILD = """
import sys, setuptools.build_meta as backend
print("BUILT", backend.{hook}(sys.argv[1]))
"""


@dataclass(frozen=True)
class Built:
    tree: Path  # the copy that was built
    wheel: Path
    sdist: Path

    def wheel_files(self) -> set[str]:
        return {n for n in zipfile.ZipFile(self.wheel).namelist() if not n.endswith("/")}

    def headers(self) -> Message:
        (name,) = (n for n in self.wheel_files() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(zipfile.ZipFile(self.wheel).read(name).decode())

    def requirements(self) -> list[Requirement]:
        return [Requirement(line) for line in self.headers().get_all("Requires-Dist", [])]


def copy_tree(target: Path) -> Path:
    """Copy the sources by name, so that nothing else that lies about is built: an old build/
    would bring deleted modules back."""
    target.mkdir()
    for name in SOURCES:
        if (REPO / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPO / name, target / name, ignore=ignored)
        elif (REPO / name).is_file():
            shutil.copy(REPO / name, target)
    return target


def files_under(folder: Path) -> set[str]:
    """Every file, relative to `folder`; not what running or building leaves there."""
    paths = (p for p in folder.rglob("*") if p.is_file())
    names = {p.relative_to(folder).as_posix() for p in paths}
    return {n for n in names if "__pycache__/" not in n and ".egg-info/" not in n}


def package_files(tree: Path) -> set[str]:
    """Every file of the package folders, by the path it has once installed."""
    return {
        f"{package}/{name}"
        for folder, package in PACKAGE_FOLDERS.items()
        for name in files_under(tree / folder)
        if not name.endswith(".md")
    }


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command and return its output; a failure shows all of it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PAGEDATTN_")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(hook: str, tree: Path, target: Path) -> Path:
    """Call one hook of the build backend of this environment, as pip and build do."""
    target.mkdir(exist_ok=True)
    printed = run(sys.executable, "-c", BUILD.format(hook=hook), target, cwd=tree)
    (name,) = re.findall(r"^BUILT (.+)$", printed, flags=re.M)
    return target / str(name)


def empty_venv(where: Path, project: Path) -> Path:
    """A new environment with `project` in it, which sees the packages of this one but for a
    pagedattn that is installed here; its Python."""
    venv.create(where, with_pip=True)
    python = where / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", project, cwd=where)
    outer = where / "outer"
    outer.mkdir()
    for kind in ("platlib", "purelib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            if "pagedattn" not in path.name and not (outer / path.name).is_symlink():
                (outer / path.name).symlink_to(path)
    (site_packages,) = where.glob("[Ll]ib/**/site-packages")
    (site_packages / "outer.pth").write_text(f"{outer}\n")
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("dist")
    tree = copy_tree(root / "tree")
    sdist = build("build_sdist", tree, root / "out")
    # the wheel comes from the sdist, so what the sdist lacks cannot be in it
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # told from 3.12 on
        archive.extractall(root / "unpacked")
    (unpacked,) = (root / "unpacked").iterdir()
    return Built(tree, build("build_wheel", unpacked, root / "out"), sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_venv(tmp_path_factory.mktemp("venv") / "env", built.wheel)


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    files = {f for f in built.wheel_files() if ".dist-info/" not in f}
    expected = package_files(built.tree)
    assert {"pagedattn/py.typed", "pagedattn/csrc/__init__.py"} <= expected
    assert sorted(expected - files) == [], "in the tree, not in the wheel"
    assert sorted(files - expected) == [], "in the wheel, not in the tree"


def test_wheel_carries_the_licence(built: Built) -> None:
    (name,) = (f for f in built.wheel_files() if f.endswith("/LICENSE"))
    assert zipfile.ZipFile(built.wheel).read(name) == (REPO / "LICENSE").read_bytes()
    headers = built.headers()
    assert "Apache-2.0" in (headers["License-Expression"] or headers["License"])


def test_wheel_is_for_any_python_and_platform(built: Built) -> None:
    assert built.wheel.name.endswith("-py3-none-any.whl")


def test_sdist_holds_the_tree(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    written = {"PKG-INFO", "setup.cfg"}  # by setuptools
    files = {f for f in members if ".egg-info/" not in f} - written
    tree = files_under(built.tree) - written
    assert sorted(tree - files) == [], "in the tree, not in the sdist"
    assert sorted(files - tree) == [], "in the sdist, not in the tree"


def test_core_dependencies_are_the_short_list(built: Built) -> None:
    core = {canonicalize_name(r.name) for r in built.requirements() if r.marker is None}
    assert core == CORE


def test_triton_comes_only_by_an_extra(built: Built) -> None:
    triton = [r for r in built.requirements() if "triton" in r.name]
    assert triton
    for requirement in triton:
        assert requirement.marker is not None
        assert not requirement.marker.evaluate({"extra": ""})


@pytest.mark.parametrize(
    "vendor", ["2.1.0", "2.1.0+corex.3.2.3", "2.7.1+corex.4.4.0", "2.10.0+corex.4.5.0"]
)
def test_a_vendors_torch_is_never_replaced(built: Built, vendor: str) -> None:
    for requirement in built.requirements():
        if requirement.name == "torch":
            assert {s.operator for s in requirement.specifier} == {">="}
            assert requirement.specifier.contains(vendor, prereleases=True)


def test_no_requirement_but_torch_has_a_compiled_part(built: Built) -> None:
    waiting = [n for n in CORE if n not in COMPILED]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        compiled = [f for f in distribution.files or [] if f.suffix in (".so", ".pyd", ".dylib")]
        assert compiled == [], f"{name} is not pure Python"
        for needed in map(Requirement, distribution.requires or []):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(needed.name))
    assert len(seen) > len(CORE - COMPILED)  # rich has dependencies of its own


def check_imported_from(python: Path, folder: Path, cwd: Path) -> None:
    code = "import pagedattn; print(pagedattn.__file__)"
    assert Path(run(python, "-c", code, cwd=cwd).strip()).is_relative_to(folder)


def check_report(*command: str | Path, cwd: Path) -> None:
    printed = run(*command, "report", cwd=cwd, HOME=str(cwd))
    report = json.loads(run(*command, "report", "--json", cwd=cwd, HOME=str(cwd)))
    rows = {row["name"]: row for row in report["backends"]}
    assert {"triton", "cuda", "torch"} <= rows.keys()
    for name, row in rows.items():
        assert name in printed
        assert row.keys() >= STATES | {"reasons"}, row


def test_installed_wheel_reports(installed: Path, tmp_path: Path) -> None:
    check_imported_from(installed, installed.parents[1], tmp_path)
    check_report(installed, "-m", "pagedattn", cwd=tmp_path)


def test_installed_command_reports(installed: Path, tmp_path: Path) -> None:
    check_report(installed.with_name("pagedattn"), cwd=tmp_path)


def test_editable_install_reports(built: Built, tmp_path: Path) -> None:
    editable = build("build_editable", built.tree, tmp_path / "out")
    python = empty_venv(tmp_path / "env", editable)
    check_imported_from(python, built.tree, tmp_path)
    find = "from importlib.resources import files; print(files('pagedattn.csrc') / '__init__.py')"
    assert Path(run(python, "-c", find, cwd=tmp_path).strip()).is_file()
    check_report(python, "-m", "pagedattn", cwd=tmp_path)
