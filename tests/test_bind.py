"""`bind`: what it binds is what the first call finds; what means nothing is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _backends import fresh_chain as fresh_chain
from _backends import inputs

from pagedattn import bind, chain, paged_attention

pytestmark = pytest.mark.usefixtures("fresh_chain")

SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "kv_layout": "NHD"}


def test_the_first_call_finds_what_was_bound() -> None:
    bound = bind("cpu", **SIZES, window=True, kv_scales="float")
    paged_attention(*inputs(), kv_layout="NHD", window=3, k_scale=0.5)
    assert chain.bindings() == (bound,)
    assert bound.calls == 1


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        # as a number it would bind a class of calls that no call is of
        ({"window": 128}, TypeError, ("window", "bool", "128")),
        ({"sinks": torch.zeros(4)}, TypeError, ("sinks", "bool")),
        ({"windw": True}, TypeError, ("windw", "did you mean window")),
        ({"kv_scales": "perhead"}, ValueError, ("perhead", "none, float, tensor, per_head")),
        ({"dtype": torch.int32}, TypeError, ("int32", "float16")),
        ({"dtype": torch.float16, "kv_dtype": torch.float32}, TypeError, ("float32", "float16")),
        ({"head_dim": 30, "kv_layout": "packed"}, ValueError, ("head_dim 30", "x = 4")),
        ({"head_dim": 40, "kv_layout": "packed", "kv_dtype": torch.int8}, ValueError, ("x = 16",)),
        ({"num_heads": 5}, ValueError, ("5 heads", "2 KV heads")),
        ({"block_size": 0}, ValueError, ("block_size", "greater than 0")),
        ({"device": "meta"}, ValueError, ("meta",)),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(
    fields: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as raised:
        bind(**{"device": "cpu", **SIZES, **fields})
    for word in words:
        assert word in str(raised.value)
    assert chain.bindings() == ()
