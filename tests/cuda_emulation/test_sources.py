"""What the portable sources may not name, to be right with any warp size and compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _emulation import sources

FORBIDDEN = {
    "inline assembly": r"\basm\b",
    "asynchronous copies, matrix instructions": r"cp_?async|ldmatrix|\bmma\b|wmma|memcpy_async",
    "votes and active masks": r"__(ballot|any|all|activemask|match|reduce)\w*\s*\(|__syncwarp",
    "shuffles without a mask": r"__shfl(_up|_down|_xor)?\s*\(",
    "the hardware's warp size": r"\bwarpSize\b",
    "a gate by CUDA's architecture": r"__CUDA_ARCH__",
    "double precision": r"\bdouble\b|(?<![\w.])\d+\.\d*(e[-+]?\d+)?(?![\dfep.])",
    "headers that CoreX's compiler cannot take": r"cuda_fp8|cuda_bf16|cooperative_groups|<mma",
    "shared memory given at launch": r"extern\s+__shared__",
}


TUNED_ALONE = re.compile(r"(?ms)^#ifdef PAGEDATTN_TUNED\n.*?(?=^#else|^#endif)")


def text_of(path: Path) -> str:
    """Without what is compiled only where there are tuned kernels."""
    return TUNED_ALONE.sub("", path.read_text(encoding="utf-8"))


def included_from(name: str) -> set[Path]:
    """A source and all of ours that it includes."""
    text = text_of(sources() / name)
    names = re.findall(r'^#include "([^"]+)"', text, flags=re.MULTILINE)
    return {sources() / name}.union(*(included_from(other) for other in names))


FILES = sorted(included_from("portable.cu"))


def code_of(text: str) -> str:
    """Without comments and texts."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_portable_sources_name_nothing_forbidden(path: Path) -> None:
    code = code_of(text_of(path))
    found = [what for what, pattern in FORBIDDEN.items() if re.search(pattern, code)]
    assert found == []
    for call in re.findall(r"__shfl_\w+\s*\([^;]*\);", code):
        assert "WIDTH)" in call, "a shuffle must name its width"


def test_the_rules_bite() -> None:
    for line in ("asm volatile", "__ballot_sync(m, p)", "__syncwarp()", "x * 0.5", "double y;"):
        assert any(re.search(pattern, code_of(line)) for pattern in FORBIDDEN.values()), line
    assert not any(
        re.search(pattern, code_of("x * 0.5f + 1.25e-3f")) for pattern in FORBIDDEN.values()
    )
    assert len(FILES) > 10
