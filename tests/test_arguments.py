"""Wrong arguments: the right exception, a message that names what was given and what is expected,
and nothing written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from _scene import arrange_keys, arrange_values, make_scene
from _wrong import ATTENTION, SHARED, WRITE, Given, Wrong
from torch import Tensor

import pagedattn


def attention_arguments(layout: str = "packed", **options: Any) -> Given:
    """A call that is right: 3 sequences, 6 query heads on 2 KV heads of 64, fp16, blocks of 16."""
    scene = make_scene([1, 17, 40], dtype=torch.float16)
    given = {"query": scene.query, **vars(scene.page(layout)), **options}  # type: ignore[arg-type]
    given["out"] = torch.full_like(scene.query, 3)
    given["backend"] = "reference"
    return given


def write_arguments(layout: str = "packed") -> Given:
    """A right write of 4 tokens into the same caches."""
    given = attention_arguments(layout)
    new = {name: torch.randn(4, 2, 64).half() for name in ("key", "value")}
    caches = {name: given[name] for name in ("key_cache", "value_cache", "kv_layout")}
    return {**new, **caches, "slot_mapping": torch.tensor([3, 20, -1, 33])}


def contents(given: Given) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor)}


def assert_refused(
    function: Callable[..., Any], given: Given, kind: type[Exception], words: tuple[str, ...]
) -> None:
    before = contents(given)
    with pytest.raises(kind) as raised:
        function(**given)
    assert type(raised.value) is kind, "a wrong argument is told by the exact type"
    for word in words:
        assert word in str(raised.value)
    for name, tensor in before.items():
        assert _bytes(given[name]) == _bytes(tensor), f"{name} was written to"


def _bytes(t: Tensor) -> list[int]:
    """Bit by bit, since NaN is unequal to itself."""
    if t.device.type == "meta":
        return []
    bits: list[int] = t.detach().contiguous().flatten().view(torch.uint8).tolist()
    return bits


def _ids(wrong: list[Wrong]) -> list[str]:
    return [w[0] for w in wrong]


@pytest.mark.parametrize("wrong", ATTENTION + SHARED, ids=_ids(ATTENTION + SHARED))
def test_attention_refuses_wrong(wrong: Wrong) -> None:
    given = attention_arguments()
    wrong[1](given)
    assert_refused(pagedattn.paged_attention, given, *wrong[2:])


@pytest.mark.parametrize("wrong", WRITE + SHARED, ids=_ids(WRITE + SHARED))
def test_write_refuses_wrong(wrong: Wrong) -> None:
    given = write_arguments()
    wrong[1](given)
    assert_refused(pagedattn.write_kv, given, *wrong[2:])


def test_the_calls_that_the_wrong_ones_start_from_are_right() -> None:
    given = attention_arguments()
    assert bool(pagedattn.paged_attention(**given).isfinite().all())
    pagedattn.write_kv(**write_arguments())


@pytest.mark.parametrize("wrong", ATTENTION + SHARED, ids=_ids(ATTENTION + SHARED))
def test_a_warm_call_refuses_what_a_cold_one_does(wrong: Wrong) -> None:
    """What is remembered of arguments that passed must not let others through."""
    given = attention_arguments()
    pagedattn.paged_attention(**given)
    wrong[1](given)
    assert_refused(pagedattn.paged_attention, given, *wrong[2:])


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("window", 1, True),
        ("window", 8, 8.0),
        ("num_splits", 1, True),
        ("num_splits", 2, 2.0),
        ("return_lse", True, 1),
        ("batch_invariant", False, 0),
        ("scale", 1.0, True),
        ("softcap", 1.0, True),
        ("k_scale", 1.0, True),
        ("v_scale", 1, True),
    ],
)
def test_a_warm_call_refuses_what_only_compares_equal(name: str, right: Any, wrong: Any) -> None:
    """1 == 1.0 == True, but a bool is no number and 8.0 no integer."""
    given = attention_arguments(**{name: right})
    pagedattn.paged_attention(**given)
    given[name] = wrong
    words = (name, type(wrong).__name__)
    assert_refused(pagedattn.paged_attention, given, TypeError, words)


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 2), (2, 4), (24, 5), (3, 2)])
@pytest.mark.parametrize("layout", ["packed", "NHD", "HND"])
def test_case_05_head_counts_that_do_not_divide_are_both_named(
    heads: int, kv_heads: int, layout: Any
) -> None:
    keys = torch.zeros(4, 16, kv_heads, 64)
    given = {
        "query": torch.zeros(1, heads, 64),
        "key_cache": arrange_keys(keys, layout),
        "value_cache": arrange_values(keys, layout),
        "block_tables": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "kv_layout": layout,
    }
    words = (f"{heads} heads", f"{kv_heads} KV heads")
    assert_refused(pagedattn.paged_attention, given, ValueError, words)


@pytest.mark.parametrize("function", ["attention", "write"])
@pytest.mark.parametrize("made", ["packed", "NHD", "HND"])
@pytest.mark.parametrize("said", ["packed", "NHD", "HND"])
def test_case_24_a_cache_of_another_layout_is_refused_where_its_shape_tells(
    function: str, made: Any, said: Any
) -> None:
    """NHD and HND have the same rank: there the head counts or the values tell, or nothing can."""
    given = attention_arguments(made) if function == "attention" else write_arguments(made)
    given["kv_layout"] = said
    call = pagedattn.paged_attention if function == "attention" else pagedattn.write_kv
    if made == said:
        call(**given)
    elif "packed" in (made, said):
        form = "[num_blocks, kv_heads, head_dim/x" if said == "packed" else "[num_blocks, "
        assert_refused(call, given, ValueError, (f"the {said} layout", form))
    elif function == "attention":  # 6 query heads, 16 "KV heads"
        assert_refused(call, given, ValueError, ("6 heads", "16 KV heads"))
    else:
        assert_refused(call, given, ValueError, ("16 KV heads",))


def test_case_24_a_head_size_that_the_packing_does_not_divide() -> None:
    given = {
        "query": torch.zeros(1, 2, 20).half(),
        "key_cache": torch.zeros(4, 2, 2, 16, 8).half(),
        "value_cache": torch.zeros(4, 2, 20, 16).half(),
        "block_tables": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
    }
    words = ("head_dim 20", "x = 8", "NHD or HND")
    assert_refused(pagedattn.paged_attention, given, ValueError, words)


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "query_start_loc"])
def test_case_25_int64_is_converted_and_not_reinterpreted(name: str) -> None:
    given = attention_arguments(
        query_start_loc=torch.tensor([0, 1, 2, 3], dtype=torch.int32), return_lse=True
    )
    right = [t.clone() for t in pagedattn.paged_attention(**given)]
    given[name] = given[name].long()
    for got, expected in zip(pagedattn.paged_attention(**given), right, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("id_", [2**32, 2**32 + 3, 2**40, -(2**40), -(2**32), 2**31])
def test_case_25_an_int64_id_beyond_int32_does_not_wrap_into_the_cache(id_: int) -> None:
    given = attention_arguments()
    given["block_tables"] = given["block_tables"].long()
    given["block_tables"][1, 1] = id_
    out = pagedattn.paged_attention(**given)
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2]].isfinite().all())


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "sinks"])
def test_attention_refuses_what_requires_grad_and_serves_it_under_no_grad(name: str) -> None:
    given = attention_arguments(sinks=torch.zeros(6))
    given[name].requires_grad_()
    assert_refused(pagedattn.paged_attention, given, ValueError, (name, "grad", "no_grad"))
    with torch.no_grad():
        pagedattn.paged_attention(**given)
    assert_refused(pagedattn.paged_attention, given, ValueError, (name, "grad"))
    with torch.inference_mode():
        pagedattn.paged_attention(**given)


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "k_scale"])
def test_write_refuses_what_requires_grad(name: str) -> None:
    given = {**write_arguments(), "k_scale": torch.ones(2)}
    given[name].requires_grad_()
    assert_refused(pagedattn.write_kv, given, ValueError, (name, "grad"))


def test_out_may_be_a_slice_beside_the_query_in_one_fused_buffer() -> None:
    """Slices of each row that interleave in memory without sharing a byte."""
    given = attention_arguments()
    right = pagedattn.paged_attention(**given).clone()
    fused = torch.zeros(3, 12, 64).half()
    fused[:, :6] = given["query"]
    given["query"], given["out"] = fused[:, :6], fused[:, 6:]
    assert torch.equal(pagedattn.paged_attention(**given), right)
    assert torch.equal(fused[:, 6:], right)


@pytest.mark.parametrize("heads", [slice(5, 11), slice(1, 7), slice(0, 6)])
def test_out_may_not_share_a_head_with_the_query(heads: slice) -> None:
    given = attention_arguments()
    fused = torch.zeros(3, 12, 64).half()
    given["query"], given["out"] = fused[:, :6], fused[:, heads]
    assert_refused(pagedattn.paged_attention, given, ValueError, ("overlaps query",))


def test_out_may_lie_directly_behind_an_input() -> None:
    given = attention_arguments()
    right = pagedattn.paged_attention(**given).clone()
    memory = torch.zeros(2, 3, 6, 64).half()
    memory[0] = given["query"]
    given["query"], given["out"] = memory
    assert torch.equal(pagedattn.paged_attention(**given), right)


def test_overlap_is_seen_on_a_warm_call_too() -> None:
    """Addresses are no part of what is remembered."""
    given = attention_arguments()
    pagedattn.paged_attention(**given)
    given["out"] = given["query"]
    assert_refused(pagedattn.paged_attention, given, ValueError, ("overlaps query",))


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1])
def test_check_names_the_sequence_the_position_and_the_id(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = attention_arguments()
    given["block_tables"][1, 1] = bad
    assert bool(pagedattn.paged_attention(**given)[1].isnan().all())
    given["out"].fill_(3)
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    words = (f"block_tables[1, 1] = {bad}", "0 to 8", "17 tokens")
    assert_refused(pagedattn.paged_attention, given, ValueError, words)


def test_check_lets_padding_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    given = attention_arguments()
    assert int(given["block_tables"][0, 1:].max()) > 9
    assert bool(pagedattn.paged_attention(**given).isfinite().all())


def test_check_lets_ids_behind_the_window_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    given = attention_arguments(window=8)  # of 40 tokens: from 32, block 2
    given["block_tables"][2, :2] = -1
    assert bool(pagedattn.paged_attention(**given).isfinite().all())
    given["block_tables"][2, 2] = -1
    given["out"].fill_(3)
    words = ("block_tables[2, 2] = -1",)
    assert_refused(pagedattn.paged_attention, given, ValueError, words)


def test_check_of_another_value_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_CHECK", "maybe")
    with pytest.raises(pagedattn.ConfigurationError, match="maybe"):
        pagedattn.paged_attention(**attention_arguments())


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_a_window_of_few_bits_is_not_counted_in_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    np = pytest.importorskip("numpy")
    given = attention_arguments()
    given["block_tables"][0, 0] = -1
    for check in ("0", "1"):
        monkeypatch.setenv("PAGEDATTN_CHECK", check)
        with (
            pytest.raises(ValueError, match=r"block_tables\[0, 0\] = -1")
            if check == "1"
            else (contextlib.nullcontext())
        ):
            out = pagedattn.paged_attention(**given, window=getattr(np, kind)(100))
    assert bool(out[0].isnan().all())


def test_numbers_of_other_libraries_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    given = attention_arguments()
    right = pagedattn.paged_attention(**given, window=8, scale=0.5).clone()
    got = pagedattn.paged_attention(**given, window=np.int64(8), scale=np.float64(0.5))
    assert torch.equal(got, right)
    bounds = {"max_seq_len": np.int64(320), "max_query_len": np.int32(1), "num_splits": np.int8(2)}
    got = pagedattn.paged_attention(**given, **bounds)
    assert torch.equal(got, pagedattn.paged_attention(**given, max_seq_len=320, num_splits=2))
    exact = pagedattn.paged_attention(**given, softcap=0.25, k_scale=0.5).clone()
    quarter: Any = Fraction(1, 4)
    got = pagedattn.paged_attention(**given, softcap=quarter, k_scale=2 * quarter)
    assert torch.equal(got, exact)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_batch_of_no_sequences_gives_empty_rows(num_tokens: int, backend: str) -> None:
    """An idle step of an engine: nothing but padding tokens, if that."""
    given = attention_arguments(query_start_loc=torch.zeros(1, dtype=torch.int32))
    for name in ("query", "out"):
        given[name] = given[name][:num_tokens]
    given |= {name: given[name][:0] for name in ("block_tables", "seq_lens")}
    out, lse = pagedattn.paged_attention(**{**given, "backend": backend}, return_lse=True)
    assert out.shape == (num_tokens, 6, 64)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("name", ["out", "query", "sinks", "alibi_slopes", "k_scale"])
def test_a_warm_call_refuses_what_requires_grad(name: str) -> None:
    ones = torch.ones(6)
    given = attention_arguments(sinks=ones, alibi_slopes=ones, k_scale=torch.ones(2))
    pagedattn.paged_attention(**given)
    given[name] = given[name].clone().requires_grad_()
    assert_refused(pagedattn.paged_attention, given, ValueError, (name, "grad"))
    with torch.no_grad():
        pagedattn.paged_attention(**given)
