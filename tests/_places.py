"""Where a test of the public function's numbers runs: every backend on every kind of device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from pagedattn import registry
from pagedattn.backends.protocol import Problem
from pagedattn.probe import facts


class Place(NamedTuple):
    backend: str
    device: str


def _on_cpu(backend: str) -> bool:
    ordinary = Problem(
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        kv_layout="NHD",
    )
    candidate = registry.get(backend)
    return not (candidate.not_present_reasons(facts()) or candidate.not_supported_reasons(ordinary))


def _on_gpu(backend: str) -> bool:
    # the oracle computes on the CPU wherever its inputs are
    return backend != "reference" and not registry.get(backend).not_present_reasons(facts())


def usable_backends() -> list[str]:
    """The names of the backends that can serve an ordinary problem on this machine's CPU."""
    return [name for name in registry.names() if _on_cpu(name)]


def _places() -> list[Place]:
    found = [Place(name, "cpu") for name in usable_backends()]
    if facts().vendor != "cpu" and facts().devices:
        found += [Place(name, "cuda") for name in registry.names() if _on_gpu(name)]
    return found


PLACES = _places()

every_place = pytest.mark.parametrize(
    "place",
    [
        pytest.param(p, id="-".join(p), marks=[pytest.mark.gpu] if p.device == "cuda" else [])
        for p in PLACES
    ],
)
every_layout = pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
every_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16],
    ids=["fp32", "fp16", "bf16"],
)
KV_DTYPES = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "int8")
    if hasattr(torch, name)
]
every_kv_dtype = pytest.mark.parametrize(
    "kv_dtype", KV_DTYPES, ids=[str(t).removeprefix("torch.") for t in KV_DTYPES]
)
