"""What becomes of a compiler that works, and of each way in which one does not."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
from _build_fixtures import cache as cache
from _build_fixtures import needs_gcc
from _build_fixtures import tree as tree
from _build_fixtures import tree_template as tree_template
from _fake_corex import ABI, compiled, facts_of, set_mode, toolchain_of

from pagedattn.backends.cuda import binary_cache, compile, source
from pagedattn.backends.cuda.spec import Spec
from pagedattn.backends.cuda.toolchain import Toolchain
from pagedattn.backends.errors import BuildError

pytestmark = needs_gcc
SPEC = Spec("fp16", "fp16", 256, 6, 16)


@pytest.fixture
def toolchain(tree: Path, tmp_path: Path, cache: Path) -> Toolchain:
    return toolchain_of(facts_of(tree, tmp_path / "machine"))


def leftovers(cache: Path) -> list[str]:
    """What a build left in the cache that is neither a binary nor a lock nor a kept failure."""
    names = [path.name for path in (cache / "binaries").iterdir()]
    return [n for n in names if n.startswith(".making") or n.endswith((".owner", ".tmp"))]


def test_good(toolchain: Toolchain, tree: Path, cache: Path) -> None:
    binary = compile.build(toolchain, SPEC, ABI)
    assert ctypes.CDLL(str(binary.path)).pagedattn_abi() == ABI
    assert binary.path.is_relative_to(cache)
    assert binary.made_of["arch"] == "ivcore10"
    assert "3.2.3" in binary.made_of["version"]
    assert compile.build(toolchain, SPEC, ABI) == binary
    assert binary_cache.listing() == [binary]
    assert compiled(tree) == 1
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("silent", "exits with 0 and writes no output: a decoy"),
        ("error", "portable.cu:7:3: error: expected a ;"),
        ("text", "no shared object"),
        ("abi", f"answers 'abi {ABI + 1}', and not 'abi {ABI}'"),
        ("needs", "libgone.so: cannot open shared object file"),
    ],
)
def test_failure_is_told_and_told_again(
    mode: str, told: str, toolchain: Toolchain, tree: Path, cache: Path
) -> None:
    set_mode(tree, mode)
    with pytest.raises(BuildError) as first:
        compile.build(toolchain, SPEC, ABI)
    assert told in str(first.value)
    assert "nothing to see" not in str(first.value)
    set_mode(tree, "good")  # whatever it would say now, the first message is what helps
    with pytest.raises(BuildError) as second:
        compile.build(toolchain, SPEC, ABI)
    assert str(second.value).startswith(str(first.value))
    assert "tries again" in str(second.value)
    assert compiled(tree) == 1
    assert binary_cache.listing() == []
    assert leftovers(cache) == []
    compile.build(toolchain, SPEC, ABI, again=True)
    compile.build(toolchain, SPEC, ABI)
    assert compiled(tree) == 2
    assert binary_cache.failure(compile.key_of(toolchain, SPEC, ABI)) is None


@pytest.mark.parametrize(("mode", "told"), [("stuck", "within 1 s"), ("killed", "SIGABRT")])
def test_passing_failure_is_told_and_not_kept(
    mode: str, told: str, toolchain: Toolchain, tree: Path, cache: Path, monkeypatch
) -> None:
    monkeypatch.setattr(compile, "COMPILE_S", 1.0)
    set_mode(tree, mode)
    began = time.monotonic()
    with pytest.raises(BuildError, match=told):
        compile.build(toolchain, SPEC, ABI)
    assert time.monotonic() - began < 10
    assert leftovers(cache) == []
    set_mode(tree, "good")
    compile.build(toolchain, SPEC, ABI)


def test_output_that_crashes_when_loaded(
    toolchain: Toolchain, tree: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "_PROBE", "import os; os.abort()")
    with pytest.raises(BuildError, match="died of SIGABRT"):
        compile.build(toolchain, SPEC, ABI)


def test_output_that_hangs_when_loaded(
    toolchain: Toolchain, tree: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(compile, "LOAD_S", 1.0)
    with pytest.raises(BuildError, match="did not load within 1 s"):
        compile.build(toolchain, SPEC, ABI)


def test_class_that_the_sources_do_not_do(toolchain: Toolchain, tree: Path) -> None:
    with pytest.raises(BuildError, match="head_dim is 100"):
        compile.build(toolchain, Spec("fp16", "fp16", 100, 6, 16), ABI)
    assert compiled(tree) == 0


@pytest.mark.parametrize("change", ["version", "flags", "arch", "source", "abi", "spec"])
def test_whatever_a_binary_depends_on_makes_another(
    change: str, toolchain: Toolchain, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abi, spec = ABI, SPEC
    before = compile.key_of(toolchain, spec, abi)
    if change == "version":
        (tree / "version").write_text("4.4.0")
        # an update replaces the file, which is how a running process notices
        (tree / "bin/clang++").touch()
        toolchain = toolchain_of(facts_of(tree, tmp_path / "machine"))
    elif change == "flags":
        old = Toolchain.flags
        monkeypatch.setattr(Toolchain, "flags", lambda self, spec: (*old(self, spec), "-g"))
    elif change == "arch":
        toolchain = toolchain_of(facts_of(tree, tmp_path / "machine"), "ivcore11")
    elif change == "source":
        monkeypatch.setattr(source, "content_hash", lambda: "another")
    elif change == "abi":
        abi += 1
    else:
        spec = Spec("fp16", "int8", 256, 6, 16)
    assert compile.key_of(toolchain, spec, abi).name != before.name


def test_first_message() -> None:
    text = "In file included from x.cu:\n\nx.cu:1: error: one\nx.cu:2: error: two\n"
    assert compile.first_message(text).startswith("x.cu:1: error: one\n")
    assert compile.first_message("odd words\n") == "odd words"
    assert compile.first_message(" \n") == "it printed nothing"


def test_content_hash_follows_names_and_contents(tmp_path: Path) -> None:
    seen: set[str] = set()
    for name, text in (("a.cu", "x"), ("b.cu", "x"), ("a.cu", "y"), ("a.py", "x")):
        folder = tmp_path / f"{len(seen)}{name}"
        folder.mkdir()
        (folder / name).write_text(text)
        seen.add(source._hash(folder))
    assert len(seen) == 4


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "folder", lambda: tmp_path)
    with pytest.raises(BuildError, match=r"portable\.cu is not there"):
        source.entry()
