"""Wrong arguments: the right exception, a message that names what was given and what is expected,
and nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _scene import arrange_keys, arrange_values, make_scene
from torch import Tensor

import pagedattn

Given = dict[str, Any]
Wrong = tuple[str, Callable[[Given], Any], type[Exception], tuple[str, ...]]


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


def put(name: str, value: Any) -> Callable[[Given], None]:
    return lambda given: given.__setitem__(name, value)


def change(name: str, function: Callable[[Any], Any]) -> Callable[[Given], None]:
    return lambda given: given.__setitem__(name, function(given[name]))


def _not_dense(t: Tensor) -> Tensor:
    return torch.stack([t, t], dim=-1)[..., 0]


def _out_over(name: str) -> Callable[[Given], None]:
    """`out` laid over an input's memory."""

    def lay(given: Given) -> None:
        given[name] = given[name].contiguous()
        out = given["out"]
        memory = torch.zeros(max(out.numel(), given[name].numel()), dtype=given[name].dtype)
        given[name] = memory[: given[name].numel()].view(given[name].shape).copy_(given[name])
        given["out"] = memory.view(out.dtype)[: out.numel()].view(out.shape)

    return lay


SHARED: list[Wrong] = [
    ("caches: a list", put("key_cache", [[1.0]]), TypeError, ("key_cache", "Tensor", "list")),
    ("caches: rank", change("key_cache", lambda t: t[..., 0]), ValueError,
     ("packed", "[num_blocks, kv_heads, head_dim/x, block_size, x]", "(9, 2, 8, 16)")),
    ("caches: rank of the values", change("value_cache", lambda t: t[..., None]), ValueError,
     ("packed", "[num_blocks, kv_heads, head_dim, block_size]", "(9, 2, 64, 16, 1)")),
    ("caches: packing", change("key_cache", lambda t: t.reshape(9, 2, 16, 16, 4)), ValueError,
     ("packing factor", "8", "4", "(9, 2, 16, 16, 4)")),
    ("caches: two dtypes", change("value_cache", lambda t: t.float()), TypeError,
     ("float16", "float32", "same")),
    ("caches: dtype", lambda g: [change(n, lambda t: t.double())(g) for n in
                                 ("key_cache", "value_cache")], TypeError,
     ("float64", "float16", "int8")),
    ("caches: key blocks", change("key_cache", lambda t: t[:5]), ValueError,
     ("(5, 2, 8, 16, 8)", "(9, 2, 8, 16, 8)")),
    ("caches: value heads", change("value_cache", lambda t: t[:, :1]), ValueError,
     ("(9, 1, 64, 16)", "(9, 2, 8, 16, 8)")),
    ("caches: empty", lambda g: [change(n, lambda t: t[:0])(g) for n in
                                 ("key_cache", "value_cache")], ValueError, ("empty",)),
    ("caches: not dense", change("value_cache", _not_dense), ValueError,
     ("value_cache", "dense", "stride")),
    ("caches: another device", change("key_cache", lambda t: t.to("meta")), ValueError,
     ("key_cache", "meta", "cpu")),
    ("layout: a guess", put("kv_layout", "nhd"), ValueError,
     ("nhd", "did you mean NHD", "packed, NHD, HND")),
    ("layout: none", put("kv_layout", None), TypeError, ("kv_layout", "NoneType")),
    ("scale: text", put("k_scale", "0.5"), TypeError, ("k_scale", "str")),
    ("scale: bool", put("v_scale", True), TypeError, ("v_scale", "bool")),
    ("scale: zero", put("k_scale", 0.0), ValueError, ("k_scale", "greater than 0")),
    ("scale: NaN", put("v_scale", math.nan), ValueError, ("v_scale", "finite")),
    ("scale: elements", put("k_scale", torch.ones(3)), ValueError, ("k_scale", "2", "(3,)")),
    ("scale: integers", put("v_scale", torch.ones(2, dtype=torch.int32)), TypeError,
     ("v_scale", "int32")),
]  # fmt: skip

ATTENTION: list[Wrong] = [
    ("query: a list", put("query", [1.0]), TypeError, ("query", "Tensor", "list")),
    ("query: none", put("query", None), TypeError, ("query", "NoneType")),
    ("query: rank", change("query", lambda t: t[0]), ValueError,
     ("query", "[num_tokens, num_heads, head_dim]", "(6, 64)")),
    ("query: dtype", change("query", lambda t: t.double()), TypeError, ("query", "float64")),
    ("query: head_dim", change("query", lambda t: t[..., :32].contiguous()), ValueError,
     ("head_dim", "64", "32")),
    ("query: not dense", change("query", _not_dense), ValueError, ("query", "dense")),
    ("query: no heads", change("query", lambda t: t[:, :0]), ValueError, ("query", "(3, 0, 64)")),
    ("query: tokens", change("query", lambda t: t[:2]), ValueError, ("2 tokens", "3 sequences")),
    ("tables: a list", put("block_tables", [[0]]), TypeError, ("block_tables", "list")),
    ("tables: rank", change("block_tables", lambda t: t[0]), ValueError,
     ("block_tables", "2 dimensions", "(5,)")),
    ("tables: rows", change("block_tables", lambda t: t[:2]), ValueError,
     ("block_tables", "3", "(2, 5)")),
    ("tables: no columns", change("block_tables", lambda t: t[:, :0]), ValueError,
     ("block_tables", "column")),
    ("tables: floating point", change("block_tables", lambda t: t.float()), TypeError,
     ("block_tables", "int32", "float32")),
    ("tables: int16", change("block_tables", lambda t: t.short()), TypeError, ("int16",)),
    ("tables: not dense", change("block_tables", _not_dense), ValueError,
     ("block_tables", "dense")),
    ("lengths: a list", put("seq_lens", [1, 17, 40]), TypeError, ("seq_lens", "list")),
    ("lengths: rank", change("seq_lens", lambda t: t[:, None]), ValueError,
     ("seq_lens", "1 dimension", "(3, 1)")),
    ("lengths: floating point", change("seq_lens", lambda t: t.float()), TypeError, ("seq_lens",)),
    ("lengths: negative", put("seq_lens", torch.tensor([1, -2, 3])), ValueError,
     ("seq_lens[1] = -2", "0 to 80")),
    ("lengths: beyond the table", put("seq_lens", torch.tensor([1, 17, 81])), ValueError,
     ("seq_lens[2] = 81", "0 to 80")),
    ("lengths: beyond int32", put("seq_lens", torch.tensor([1, 2**32 + 1, 3])), ValueError,
     (f"seq_lens[1] = {2**32 + 1}",)),
    ("lengths: beyond the hint", put("max_seq_len", 39), ValueError,
     ("seq_lens[2] = 40", "0 to 39", "max_seq_len")),
    ("hint: negative", put("max_seq_len", -1), ValueError, ("max_seq_len", "-1")),
    ("hint: floating point", put("max_seq_len", 40.0), TypeError, ("max_seq_len", "float")),
    ("hint: bool", put("max_seq_len", True), TypeError, ("max_seq_len", "bool")),
    ("out: a list", put("out", []), TypeError, ("out", "list")),
    ("out: shape", change("out", lambda t: t[:2]), ValueError,
     ("out", "(3, 6, 64)", "(2, 6, 64)")),
    ("out: dtype", change("out", lambda t: t.float()), ValueError, ("out", "float16", "float32")),
    ("out: not dense", change("out", _not_dense), ValueError, ("out", "dense")),
    ("out: expanded", put("out", torch.zeros(1, 6, 64).half().expand(3, 6, 64)), ValueError,
     ("out", "overlaps itself")),
    ("out: another device", put("out", torch.empty(3, 6, 64, device="meta").half()), ValueError,
     ("out", "meta")),
    ("out: over the query", lambda g: g.__setitem__("out", g["query"]), ValueError,
     ("out", "overlaps query")),
    ("out: over the keys", _out_over("key_cache"), ValueError, ("out", "overlaps key_cache")),
    ("out: over the values", _out_over("value_cache"), ValueError, ("overlaps value_cache",)),
    ("window: zero", put("window", 0), ValueError, ("window", "greater than 0")),
    ("window: negative", put("window", -1), ValueError, ("window", "-1")),
    ("window: floating point", put("window", 4.0), TypeError, ("window", "integer", "float")),
    ("window: bool", put("window", True), TypeError, ("window", "bool")),
    ("softcap: zero", put("softcap", 0.0), ValueError, ("softcap", "greater than 0")),
    ("softcap: infinite", put("softcap", math.inf), ValueError, ("softcap", "finite")),
    ("softcap: a tensor", put("softcap", torch.tensor(1.0)), TypeError, ("softcap", "Tensor")),
    ("scale: text", put("scale", "1"), TypeError, ("scale", "str")),
    ("scale: NaN", put("scale", math.nan), ValueError, ("scale", "finite")),
    ("alibi: a list", put("alibi_slopes", [0.5] * 6), TypeError, ("alibi_slopes", "list")),
    ("alibi: elements", put("alibi_slopes", torch.ones(5)), ValueError,
     ("alibi_slopes", "[6]", "(5,)")),
    ("alibi: integers", put("alibi_slopes", torch.ones(6, dtype=torch.int64)), TypeError,
     ("alibi_slopes", "int64")),
    ("sinks: elements", put("sinks", torch.ones(2)), ValueError, ("sinks", "[6]", "(2,)")),
    ("sinks: rank", put("sinks", torch.ones(6, 1)), ValueError, ("sinks", "(6, 1)")),
    ("splits: zero", put("num_splits", 0), ValueError, ("num_splits", "greater than 0")),
    ("splits: bool", put("num_splits", True), TypeError, ("num_splits", "bool")),
    ("return_lse: a number", put("return_lse", 1), TypeError, ("return_lse", "bool", "int")),
    ("batch_invariant: text", put("batch_invariant", "yes"), TypeError, ("batch_invariant",)),
    ("starts: a list", put("query_start_loc", [0, 1, 2, 3]), TypeError,
     ("query_start_loc", "list")),
    ("starts: entries", put("query_start_loc", torch.tensor([0, 1, 3])), ValueError,
     ("query_start_loc", "[4]", "(3,)")),
    ("starts: not at 0", put("query_start_loc", torch.tensor([1, 1, 2, 3])), ValueError,
     ("query_start_loc", "start at 0", "1")),
    ("starts: falling", put("query_start_loc", torch.tensor([0, 2, 1, 3])), ValueError,
     ("query_start_loc", "entry 2 is 1 after 2")),
    ("starts: beyond the query", put("query_start_loc", torch.tensor([0, 1, 2, 4])), ValueError,
     ("query_start_loc", "4", "3 tokens")),
    ("starts: floating point", put("query_start_loc", torch.tensor([0.0, 1, 2, 3])), TypeError,
     ("query_start_loc", "int32")),
    ("query hint: too short",
     lambda g: g.update(query_start_loc=torch.tensor([0, 0, 0, 3]), max_query_len=2), ValueError,
     ("max_query_len=2", "3 query tokens")),
    ("query hint: zero",
     lambda g: g.update(query_start_loc=torch.tensor([0, 1, 2, 3]), max_query_len=0), ValueError,
     ("max_query_len", "greater than 0")),
    ("query hint: text",
     lambda g: g.update(query_start_loc=torch.tensor([0, 1, 2, 3]), max_query_len="3"), TypeError,
     ("max_query_len", "str")),
    ("query hint: text, of no use", put("max_query_len", "3"), TypeError, ("max_query_len",)),
    ("backend: unknown", put("backend", "tritn"), pagedattn.UnknownBackend,
     ("tritn", "did you mean triton")),
    ("backend: a number", put("backend", 3), TypeError, ("backend", "3")),
]  # fmt: skip

WRITE: list[Wrong] = [
    ("key: a list", put("key", []), TypeError, ("key", "list")),
    ("key: rank", change("key", lambda t: t[0]), ValueError,
     ("key", "[num_tokens, kv_heads, head_dim]", "(2, 64)")),
    ("key: dtype", change("key", lambda t: t.double()), TypeError, ("float64",)),
    ("key and value: two dtypes", change("value", lambda t: t.float()), TypeError,
     ("float16", "float32")),
    ("key: heads", change("key", lambda t: t[:, :1]), ValueError, ("2 KV heads", "(4, 1, 64)")),
    ("value: tokens", change("value", lambda t: t[:3]), ValueError, ("value (3, 2, 64)",)),
    ("value: head_dim", change("value", lambda t: t[..., :8]), ValueError, ("(4, 2, 8)",)),
    ("slots: a list", put("slot_mapping", [0, 1, 2, 3]), TypeError, ("slot_mapping", "list")),
    ("slots: rank", change("slot_mapping", lambda t: t[:, None]), ValueError, ("(4, 1)",)),
    ("slots: number", change("slot_mapping", lambda t: t[:3]), ValueError, ("(3,)",)),
    ("slots: a scalar", put("slot_mapping", torch.tensor(3)), ValueError, ("slot_mapping",)),
    ("slots: floating point", change("slot_mapping", lambda t: t.float()), TypeError,
     ("slot_mapping", "int64", "float32")),
    ("slots: beyond the cache", put("slot_mapping", torch.tensor([0, 144, 2, 3])), ValueError,
     ("slot_mapping[1] = 144", "143")),
    ("slots: far beyond", put("slot_mapping", torch.tensor([0, 1, 2, 2**40])), ValueError,
     (f"slot_mapping[3] = {2**40}",)),
]  # fmt: skip


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


def test_numbers_of_other_libraries_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    given = attention_arguments()
    right = pagedattn.paged_attention(**given, window=8, scale=0.5).clone()
    got = pagedattn.paged_attention(**given, window=np.int64(8), scale=np.float64(0.5))
    assert torch.equal(got, right)
