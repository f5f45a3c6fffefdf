"""torch's defaults are the caller's: an engine may have set them to half precision or its GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from _backends import fresh_chain as fresh_chain
from _backends import small_problem

import pagedattn
from pagedattn import shortcut, verify
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.backend import run
from pagedattn.backends.reference import attend

pytestmark = pytest.mark.usefixtures("fresh_chain")


@contextlib.contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# the meta device stands for a GPU: whatever is made there by mistake cannot be computed with
DEFAULTS: dict[str, Any] = {
    "float64": lambda: _dtype(torch.float64),
    "float16": lambda: _dtype(torch.float16),
    "bfloat16": lambda: _dtype(torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
}
every_default = pytest.mark.parametrize("default", DEFAULTS)

FULL: dict[str, Any] = {
    "window": True, "varlen_query": True, "softcap": True, "alibi": True, "sinks": True,
    "kv_scales": "per_head", "return_lse": True,
}  # fmt: skip


def device_road(call: Call) -> None:
    run(replace(call, host_seq_lens=None, host_query_start=None))


@every_default
@pytest.mark.parametrize("features", [{}, {"alibi": True}, FULL], ids=["plain", "alibi", "full"])
@pytest.mark.parametrize(
    "runner", [attend, run, device_road], ids=["reference", "host road", "device road"]
)
def test_a_proof_finds_the_same_error(default: str, features: Any, runner: Any) -> None:
    problem = small_problem(**features)
    expected = verify.judge(runner, problem)
    with DEFAULTS[default]():
        found = verify.judge(runner, problem)
    assert expected.outcome == "ok"
    assert found == expected


@every_default
def test_a_first_call_binds_and_is_right(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    keys, values, new = torch.randn(4, 16, 2, 32), torch.randn(4, 16, 2, 32), torch.randn(2, 2, 32)
    query, slots = torch.randn(2, 4, 32), torch.tensor([3 * 16 + 3, 2 * 16 + 8])
    table = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)
    lengths = torch.tensor([20, 9], dtype=torch.int32)

    def step(backend: str) -> torch.Tensor:
        caches = keys.clone(), values.clone()
        pagedattn.write_kv(new, new, *caches, slots, kv_layout="NHD")
        return pagedattn.paged_attention(
            query, *caches, table, lengths, kv_layout="NHD", backend=backend
        )

    expected = step("reference")
    with DEFAULTS[default]():
        found = step("auto")
    assert found.dtype == expected.dtype
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2), "the two rows tell nothing"


@every_default
def test_the_shortcut_is_judged_the_same(default: str) -> None:
    """Under defaults of others it must not be given up; every torch from 2.1 on has it."""
    assert shortcut.check_of is not None
    with DEFAULTS[default]():
        assert shortcut._usable(shortcut._of_torch) is not None
