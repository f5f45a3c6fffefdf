"""`write_kv` checks shapes and types once, and everything else each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagedattn
from pagedattn import cache, chain

GOOD: dict[str, Any] = {"kv_layout": "NHD", "k_scale": 1, "v_scale": 0.5}


def tensors() -> dict[str, Any]:
    return {
        "key": torch.randn(3, 2, 8),
        "value": torch.randn(3, 2, 8),
        "key_cache": torch.zeros(4, 16, 2, 8),
        "value_cache": torch.zeros(4, 16, 2, 8),
        "slot_mapping": torch.tensor([5, -1, 63]),
    }


def test_shapes_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    check = cache._check

    def counted(w: Any) -> Any:
        checked.append(w)
        return check(w)

    monkeypatch.setattr(cache, "_check", counted)
    for _ in range(3):
        pagedattn.write_kv(**tensors(), **GOOD)
    assert len(checked) == 1
    pagedattn.write_kv(**tensors(), **{**GOOD, "v_scale": 0.25})
    chain.reset()
    pagedattn.write_kv(**tensors(), **GOOD)
    assert len(checked) == 3


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"slot_mapping": torch.tensor([5, 64, 0])}, ValueError),
        ({"slot_mapping": torch.tensor([5, 6])}, ValueError),
        ({"slot_mapping": torch.tensor([5.0, 6.0, 7.0])}, TypeError),
        ({"key": torch.randn(3, 2, 8, dtype=torch.float16)}, TypeError),
        ({"key": torch.randn(3, 2, 8, requires_grad=True)}, ValueError),
        ({"key": [[[0.0]]]}, TypeError),
        ({"value": torch.randn(3, 1, 8)}, ValueError),
        ({"value": torch.empty(3, 2, 8, device="meta")}, ValueError),
        ({"key_cache": torch.zeros(1, 16, 2, 8).expand(4, 16, 2, 8)}, ValueError),
        ({"key_cache": torch.zeros(4, 16, 2, 8, dtype=torch.int8)}, TypeError),
        ({"kv_layout": "NDH"}, ValueError),
        ({"kv_layout": ["NHD"]}, TypeError),
        ({"k_scale": True}, TypeError),
        ({"k_scale": 0}, ValueError),
        ({"k_scale": torch.tensor([1, 2])}, TypeError),
        ({"v_scale": torch.ones(3)}, ValueError),
        ({"v_scale": torch.ones(2, requires_grad=True)}, ValueError),
    ],
)
def test_a_warm_call_refuses_what_a_cold_one_does(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    for warm in (False, True):
        chain.reset()
        given = tensors()
        if warm:
            pagedattn.write_kv(**given, **GOOD)
        before = given["key_cache"].clone()
        with pytest.raises(error):
            pagedattn.write_kv(**{**given, **GOOD, **changes})
        assert torch.equal(given["key_cache"], before)


def test_what_is_remembered_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_ADMITTED", 4)
    for number in range(1, 20):
        pagedattn.write_kv(**tensors(), **{**GOOD, "k_scale": float(number)})
        assert len(cache._admitted) <= 4
