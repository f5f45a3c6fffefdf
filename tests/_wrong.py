"""Wrong arguments of the public functions: what is changed in a call that is right, the exception
and what its message must name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pagedattn

Given = dict[str, Any]
Wrong = tuple[str, Callable[[Given], Any], type[Exception], tuple[str, ...]]


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
    ("all: on the meta device",
     lambda g: [change(n, lambda t: t.to("meta"))(g) for n, t in list(g.items())
                if isinstance(t, Tensor)], ValueError, ("meta device", "no data")),
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
    ("out: rows over one another",
     put("out", torch.zeros(3 * 6 * 64).half().as_strided((3, 6, 64), (6 * 64, 32, 1))), ValueError,
     ("out", "overlaps itself", "(384, 32, 1)")),
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
    ("caches: expanded", change("value_cache", lambda t: t[:1].expand(9, 2, 64, 16)), ValueError,
     ("value_cache", "overlaps itself")),
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
