"""Make .typing/pagedattn: the package under its import name, as links into the tree.

The folders are named otherwise (dispatch/ is pagedattn, backends/ is pagedattn.backends), which
type checkers cannot follow. Run it again after adding a file to dispatch/.
"""

from __future__ import annotations

import shutil
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TREE = REPO / ".typing" / "pagedattn"


def main() -> None:
    shutil.rmtree(TREE, ignore_errors=True)  # links to files that are gone
    TREE.mkdir(parents=True)
    (TREE.parent / ".gitignore").write_text("*\n")
    for path in sorted((REPO / "dispatch").iterdir()):
        if path.name != "__pycache__":
            link(TREE / path.name, path)
    for folder in ("backends", "csrc"):
        link(TREE / folder, REPO / folder)


def link(where: Path, target: Path) -> None:
    up = Path(*[".."] * len(where.parent.relative_to(REPO).parts))
    where.symlink_to(up / target.relative_to(REPO))  # relative, so that the tree can be moved


if __name__ == "__main__":
    main()
