"""What a proof accepts and what it refuses: the oracle passes, each planted mistake fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _backends import FakeBackend, small_problem
from _backends import fresh_chain as fresh_chain

from pagedattn import chain, hard_problems, register_backend, verify, verify_command
from pagedattn.backends.protocol import Call, Problem
from pagedattn.backends.reference import attend

pytestmark = pytest.mark.usefixtures("fresh_chain")

FULL = small_problem(
    num_heads=4, window=True, varlen_query=True, softcap=True, alibi=True, sinks=True,
    kv_scales="per_head", return_lse=True,
)  # fmt: skip


@pytest.mark.parametrize("problem", list(verify_command.problems("cpu")), ids=str)
def test_the_oracle_passes_its_own_proof(problem: Problem) -> None:
    small = replace(problem, num_heads=problem.group, num_kv_heads=1, head_dim=32)
    assert verify.judge(attend, small).outcome == "ok"


def _change(**changes: Callable[[Call], Any]) -> Callable[[Call], None]:
    def run(call: Call) -> None:
        attend(replace(call, **{name: change(call) for name, change in changes.items()}))

    return run


def _swap_heads(call: Call) -> None:
    """``h % num_kv_heads`` instead of ``h // group``."""
    heads = call.query.shape[1]
    kv_heads = call.key_cache.shape[1]
    order = torch.arange(heads).view(kv_heads, -1).T.flatten()
    wrong = replace(call, query=call.query[:, order].contiguous())
    attend(wrong)
    call.out.copy_(call.out[:, order.argsort()])


def _after(act: Callable[[Call], Any]) -> Callable[[Call], None]:
    def run(call: Call) -> None:
        attend(call)
        act(call)

    return run


def _lse(call: Call) -> torch.Tensor:
    assert call.lse is not None
    return call.lse


def _window(call: Call) -> int:
    assert call.window is not None
    return call.window


_oracle = verify.oracle


@functools.cache
def _truth(problem: Problem) -> Call:
    """The oracle's answer, which is the same for every mistake."""
    return _oracle(hard_problems.make_call(problem), problem)


MISTAKES = {
    "none": attend,
    "a key too many": _change(seq_lens=lambda c: c.seq_lens + (c.seq_lens == 17).int()),
    "a key too few": _change(seq_lens=lambda c: c.seq_lens - (c.seq_lens == 17).int()),
    "window one wide": _change(window=lambda c: _window(c) + 1),
    "window one narrow": _change(window=lambda c: _window(c) - 1),
    "no window": _change(window=lambda c: None),
    "no softcap": _change(softcap=lambda c: None),
    "no alibi": _change(alibi_slopes=lambda c: None),
    "no sinks": _change(sinks=lambda c: None),
    "scales swapped": _change(k_scale=lambda c: c.v_scale, v_scale=lambda c: c.k_scale),
    "no scales": _change(k_scale=lambda c: None, v_scale=lambda c: None),
    "no scale": _change(scale=lambda c: 1.0),
    "heads mapped wrong": _swap_heads,
    "a row left unwritten": _after(lambda c: c.out[0].fill_(torch.nan)),
    "a row not zero": _after(lambda c: c.out[1].fill_(1e-6)),
    "a corrupt table answered": _after(lambda c: c.out[-2].nan_to_num_(0.5)),
    "all zeros": _after(lambda c: c.out.zero_()),
    "log-sum-exp in base 2": _after(lambda c: _lse(c).mul_(1.4427)),
    "log-sum-exp of an empty row 0": _after(lambda c: _lse(c).nan_to_num_(neginf=0.0)),
    "log-sum-exp unwritten": _after(lambda c: _lse(c).fill_(torch.nan)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(
    mistake: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(FULL, dtype=dtype, kv_dtype=dtype)
    first = _truth(problem)

    def oracle(call: Call, problem: Problem) -> Call:
        return first if len(call.query) == len(first.query) else _oracle(call, problem)

    monkeypatch.setattr(verify, "oracle", oracle)
    verdict = verify.judge(MISTAKES[mistake], problem)
    assert verdict.outcome == ("ok" if mistake == "none" else "wrong"), verdict


def test_what_is_wrong_for_one_sequence_alone_is_found() -> None:
    """Where a merge has more partitions, say."""

    def run(call: Call) -> None:
        attend(call)
        if call.seq_lens.numel() == 1:
            assert call.host_seq_lens == [301]
            assert bool(call.block_tables[0, : -(-301 // 16)].ge(0).all())
            call.out.mul_(1.1)

    verdict = verify.judge(run, small_problem())
    assert verdict.outcome == "wrong"
    assert verdict.error == pytest.approx(0.1, rel=1e-3)
    assert verify.judge(run, small_problem(varlen_query=True)).outcome == "ok"


def test_products_in_tf32_are_found() -> None:
    def run(call: Call) -> None:
        attend(replace(call, query=_tf32(call.query), key_cache=_tf32(call.key_cache)))

    assert verify.judge(run, small_problem()).outcome == "wrong"


def _tf32(t: torch.Tensor) -> torch.Tensor:
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 10 bits of mantissa


def test_a_verdict_says_how_far_off() -> None:
    verdict = verify.judge(_after(lambda c: c.out.mul_(1.5)), small_problem())
    assert verdict.error == pytest.approx(0.5, rel=1e-3)
    assert verdict.lse_error is None
    assert verdict.detail.startswith("wrong numbers on cpu: relative error 5.0e-01 (at most 1e-05")


def test_a_proof_poisons_what_must_not_be_read() -> None:
    call = hard_problems.make_call(small_problem(varlen_query=True, return_lse=True))
    assert bool(call.out.isnan().all())
    assert bool(_lse(call).isnan().all())
    used = -(-call.seq_lens // 16)
    pads = torch.arange(call.block_tables.shape[1]) >= used.unsqueeze(1)
    assert set(call.block_tables[pads].tolist()) == {-1, 2**31 - 1}
    assert bool(call.key_cache.isnan().any())
    assert bool(call.value_cache.isnan().any())


def test_verification_off_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
    register_backend(FakeBackend("acme", run_fails="wrong"))
    binding = chain.binding_for(small_problem(), "acme")
    assert (binding.candidates[0].verified, binding.candidates[0].selected) == (None, True)
