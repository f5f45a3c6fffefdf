"""The addresses that a call gives its backend: those of its own tensors, however they were had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from _backends import FakeBackend, inputs
from _backends import fresh_chain as fresh_chain
from torch import Tensor

import pagedattn
from pagedattn.backends.protocol import Call

FIELDS = (
    "query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc", "out",
    "lse", "alibi_slopes", "sinks", "k_scale", "v_scale",
)  # fmt: skip


@dataclass
class Kept(FakeBackend):
    calls: list[Call] = field(default_factory=list)

    def run(self, call: Call) -> None:
        self.calls.append(call)


@pytest.fixture
def kept(fresh_chain: None, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")  # it computes nothing
    backend = Kept("kept")
    pagedattn.register_backend(backend)
    return backend


def by_hand(call: Call) -> tuple[int, ...]:
    values = [getattr(call, name) for name in FIELDS]
    return tuple(v.data_ptr() if isinstance(v, Tensor) else 0 for v in values)


def _out() -> Tensor:
    return torch.empty(1, 4, 32)


#: by name: options of a call, and whether the dispatcher had to look for the addresses itself
WAYS: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "plain": (dict, False),
    "out": (lambda: {"out": _out()}, True),
    "out and lse": (lambda: {"out": _out(), "return_lse": True}, False),
    "out and slopes": (lambda: {"out": _out(), "alibi_slopes": torch.ones(4)}, True),
    "out and sinks": (lambda: {"out": _out(), "sinks": torch.ones(4), "v_scale": 0.5}, True),
    "out and one scale": (lambda: {"out": _out(), "k_scale": 0.5, "v_scale": torch.ones(2)}, True),
    "all": (
        lambda: {
            "out": _out(), "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
            "alibi_slopes": torch.ones(4), "sinks": torch.ones(4), "k_scale": torch.ones(1),
            "v_scale": torch.ones(2),
        },
        True,
    ),
    "converted": (lambda: {"out": _out(), "sinks": torch.ones(4, dtype=torch.float64)}, False),
}  # fmt: skip


@pytest.mark.parametrize("way", list(WAYS))
def test_they_are_those_of_the_calls_tensors(kept: Kept, way: str) -> None:
    options, known = WAYS[way]
    for _ in range(3):  # cold, then warm, each with tensors of its own
        given = options()
        query, keys, _, tables, lengths = inputs()
        tensors = (query, keys, keys.clone(), tables, lengths)
        pagedattn.paged_attention(*tensors, kv_layout="NHD", backend="kept", **given)
        call = kept.calls[-1]
        assert call.addresses() == by_hand(call)
        assert call.addresses()[0] == query.data_ptr()
        assert (call.known_addresses is not None) == known


def test_a_call_with_another_tensor_has_its_addresses(kept: Kept) -> None:
    query, keys, _, tables, lengths = inputs()
    tensors = (query, keys, keys.clone(), tables, lengths)
    pagedattn.paged_attention(*tensors, kv_layout="NHD", backend="kept", out=_out())
    call = kept.calls[-1]
    other = replace(call, out=_out())
    assert other.addresses() == by_hand(other) != call.addresses()
