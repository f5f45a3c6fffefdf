"""Merging attention states: the whole from its parts, in any order, empty ones included."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from _places import every_dtype
from torch import Tensor

import pagedattn


def state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 softmax over the last dimension of ``[T, H, L]`` and the natural log-sum-exp."""
    lse = torch.logsumexp(scores, dim=-1)
    return torch.softmax(scores, dim=-1) @ values, lse


@every_dtype
@pytest.mark.parametrize("cuts", [[8], [1], [1, 2, 3], [5, 5], [0]])
def test_case_09_parts_merge_into_the_whole(dtype: torch.dtype, cuts: list[int]) -> None:
    """Cuts at 0 or twice at one place leave an empty part."""
    scores = 5 * torch.randn(3, 6, 16, dtype=torch.float64)
    values = torch.randn(16, 32, dtype=torch.float64)
    edges = [0, *cuts, 16]
    parts = []
    for first, end in pairwise(edges):
        out, lse = state(scores[..., first:end], values[first:end])
        parts.append((out.nan_to_num(nan=math.nan).to(dtype), lse.float()))
    out, lse = pagedattn.merge_states([o for o, _ in parts], [s for _, s in parts])
    whole, whole_lse = state(scores, values)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # one rounding of each part and of the whole, and of the log-sum-exps that weigh them
    relative = 2 * torch.finfo(dtype).eps + 1.2e-7 * float(whole_lse.abs().max())
    assert float((out.double() - whole).abs().max()) <= relative * float(values.abs().max())
    assert torch.allclose(lse.double(), whole_lse, rtol=1e-6, atol=1e-6)


@every_dtype
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_case_08_empty_states_merge_into_an_empty_state(
    dtype: torch.dtype, count: int, garbage: float
) -> None:
    """Whatever their outputs hold."""
    outputs = torch.full((count, 3, 6, 32), garbage, dtype=dtype)
    out, lse = pagedattn.merge_states(outputs, torch.full((count, 3, 6), -math.inf))
    assert torch.equal(out, torch.zeros(3, 6, 32, dtype=dtype))
    assert torch.equal(lse, torch.full((3, 6), -math.inf))


@every_dtype
def test_case_08_an_empty_state_changes_nothing(dtype: torch.dtype) -> None:
    """The identity, row by row, with garbage in the empty output."""
    out, lse = torch.randn(3, 6, 32).to(dtype), torch.randn(3, 6)
    empty_out, empty_lse = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for states, lses in (
        ([out, empty_out], [lse, empty_lse]),
        ([empty_out, out], [empty_lse, lse]),
    ):
        merged, merged_lse = pagedattn.merge_states(states, lses)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)


def test_case_08_rows_are_empty_one_by_one() -> None:
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    lse[0, 0] = lse[:, 1] = lse[1, 2] = -math.inf
    merged, merged_lse = pagedattn.merge_states(out, lse)
    assert torch.equal(merged[0], out[1, 0])
    assert torch.equal(merged[1], torch.zeros(8))
    assert torch.equal(merged[2], out[0, 2])
    assert torch.equal(merged_lse, torch.stack([lse[1, 0], lse[0, 1], lse[0, 2]]))


@pytest.mark.parametrize("level", [-1e4, -200.0, 200.0, 1e4])
def test_log_sum_exps_far_from_zero_do_not_overflow(level: float) -> None:
    out = torch.tensor([[[1.0]], [[3.0]]])
    merged, lse = pagedattn.merge_states(out, torch.tensor([[level], [level]]))
    assert merged.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(level + math.log(2.0), rel=1e-6)


def test_case_09_weights_are_powers_of_e() -> None:
    """With base 2 the first would weigh 2/3 and not e/(1+e); with the sign wrong, the rest."""
    merged, lse = pagedattn.merge_states(torch.tensor([[1.0], [0.0]]), torch.tensor([1.0, 0.0]))
    assert merged.item() == pytest.approx(math.e / (1 + math.e), rel=1e-6)
    assert lse.item() == pytest.approx(math.log(1 + math.e), rel=1e-6)


def test_order_and_grouping_do_not_matter() -> None:
    outs, lses = list(torch.randn(3, 4, 8)), list(5 * torch.randn(3, 4))
    at_once = pagedattn.merge_states(outs, lses)
    first = pagedattn.merge_states(outs[:2], lses[:2])
    stepwise = pagedattn.merge_states([first[0], outs[2]], [first[1], lses[2]])
    backwards = pagedattn.merge_states(outs[::-1], lses[::-1])
    for other in (stepwise, backwards):
        assert torch.allclose(at_once[0], other[0], rtol=1e-5, atol=1e-6)
        assert torch.allclose(at_once[1], other[1], rtol=1e-5, atol=1e-6)


def test_the_inputs_are_left_alone() -> None:
    outs, lses = torch.randn(2, 4, 8), torch.tensor([[-math.inf] * 4, [1.0] * 4])
    before = outs.clone(), lses.clone()
    pagedattn.merge_states(outs, lses)
    assert torch.equal(outs, before[0])
    assert torch.equal(lses, before[1])


@pytest.mark.parametrize(
    ("outputs", "lses", "kind", "word"),
    [
        (torch.zeros(2, 3, 8), torch.zeros(2, 4), ValueError, "(2, 4)"),
        (torch.zeros(2, 3, 8), torch.zeros(3), ValueError, "(3,)"),
        (torch.zeros(0, 3, 8), torch.zeros(0, 3), ValueError, "at least one"),
        (torch.zeros(2, 3, 8).long(), torch.zeros(2, 3), TypeError, "int64"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 3).long(), TypeError, "int64"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 3, device="meta"), ValueError, "meta"),
        ([], [], ValueError, "at least one"),
        ([torch.zeros(3, 8)], [torch.zeros(3), torch.zeros(3)], ValueError, "(2, 3)"),
        ([torch.zeros(3, 8), torch.zeros(4, 8)], [torch.zeros(3)] * 2, ValueError, "(4, 8)"),
        ([1.0, 2.0], [torch.zeros(3)] * 2, TypeError, "float"),
        (3, 4, TypeError, "int"),
    ],
    ids=range(11),
)
def test_states_that_do_not_go_together(
    outputs: Any, lses: Any, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind) as raised:
        pagedattn.merge_states(outputs, lses)
    assert word in str(raised.value)
