"""Fixtures of the tests that compile: a fake CoreX tree of their own, and an empty cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from _fake_corex import GCC, make_tree

from pagedattn.backends.cuda import source

needs_gcc = pytest.mark.skipif(GCC is None, reason="needs a C compiler, to make the fake one")


@pytest.fixture(scope="session")
def tree_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("corex-template") / "corex-3.2.3")


@pytest.fixture
def tree(tree_template: Path, tmp_path: Path) -> Path:
    """A CoreX tree whose compiler works until `_fake_corex.set_mode` says otherwise."""
    root = tmp_path / "corex-3.2.3"
    shutil.copytree(tree_template, root)
    return root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "build-cache"
    monkeypatch.setenv("PAGEDATTN_CACHE_DIR", str(folder))
    # the fake compiler reads no source
    monkeypatch.setattr(source, "entry", lambda: Path("/nowhere/portable.cu"))
    return folder
