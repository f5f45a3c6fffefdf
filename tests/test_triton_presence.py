"""Where the Triton backend may run, decided from facts alone: nothing is launched or imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _platforms import PLATFORMS

from pagedattn.backends.facts import TritonFacts
from pagedattn.backends.protocol import Problem
from pagedattn.backends.triton.backend import TritonBackend
from pagedattn.probe import probe

PROBLEM = Problem("cuda:0", torch.float16, torch.float16, 24, 4, 256, 16)


@pytest.mark.parametrize("name", ["bi_v100", "bi_v100_bare", "bi_v150"])
def test_refused_on_corex_with_a_stock_triton(name: str, tmp_path: Path) -> None:
    facts = probe(PLATFORMS[name]().sources(tmp_path))
    facts = replace(facts, triton=TritonFacts("2.3.1", ("nvidia",)))
    (reason,) = TritonBackend().not_present_reasons(facts)
    assert "has no backend for CoreX" in reason
    assert TritonBackend().remedy(facts) is None  # installing another one there is no remedy


def test_refused_on_a_bi_v100_whatever_the_triton(tmp_path: Path) -> None:
    facts = probe(PLATFORMS["bi_v100"]().sources(tmp_path))
    facts = replace(facts, triton=TritonFacts("3.1.0", ("iluvatar",)))
    (reason,) = TritonBackend().not_present_reasons(facts)
    assert "hang" in reason
    assert "PAGEDATTN_COREX_TRITON=1" in reason
    assert TritonBackend().not_present_reasons(replace(facts, corex_triton=True)) == []


def test_accepted_with_the_vendors_backend_on_a_later_card(tmp_path: Path) -> None:
    facts = probe(PLATFORMS["bi_v150"]().sources(tmp_path))
    facts = replace(facts, triton=TritonFacts("3.1.0", ("iluvatar",)))
    assert TritonBackend().not_present_reasons(facts) == []


def test_nvidia_without_triton_is_told_how_to_get_it(tmp_path: Path) -> None:
    facts = replace(probe(PLATFORMS["nvidia"]().sources(tmp_path)), triton=TritonFacts())
    assert TritonBackend().not_present_reasons(facts) == ["Triton is not installed"]
    assert TritonBackend().remedy(facts) == "pip install 'triton>=2.1'"


def test_a_cpu_is_served_only_by_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = replace(probe(PLATFORMS["cpu_only"]().sources(tmp_path)), triton=TritonFacts("3.6.0"))
    assert "no GPU was found" in TritonBackend().not_present_reasons(facts)[0]
    on_cpu = replace(PROBLEM, device="cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "on a CPU" in TritonBackend().not_supported_reasons(on_cpu)[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().not_supported_reasons(on_cpu) == []


def test_every_reason_is_given() -> None:
    monster = replace(PROBLEM, head_dim=1024, num_heads=512, num_kv_heads=2)
    assert len(TritonBackend().not_supported_reasons(monster)) == 2
    assert TritonBackend().not_supported_reasons(PROBLEM) == []


def test_asking_imports_no_triton() -> None:
    code = (
        "import sys; from pagedattn.backends.triton.backend import TritonBackend; "
        "from pagedattn.probe import facts; TritonBackend().not_present_reasons(facts()); "
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
