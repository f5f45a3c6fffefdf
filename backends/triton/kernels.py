"""The kernels: decode rows split over the context, prefill rows tiled over the queries, merge.

All query heads of a KV head share a tile of rows, so keys and values are read once for the
group. Row m of a tile is query token ``m // GROUP`` of the tile and head ``m % GROUP`` of the
group.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl

from pagedattn.backends.triton.eight_bit import interleave
from pagedattn.backends.triton.load import query_part
from pagedattn.backends.triton.overlap import gdc_launch_dependents, gdc_wait
from pagedattn.backends.triton.tile import (
    LN2,
    LOG2E,
    key_range,
    names_no_block,
    share_of_split,
    walk,
)

# What differs from call to call. Specialising on integers would compile again for 1 and for each
# multiple of 16; on the alignment of pointers to single numbers, for nothing.
CHANGING = (
    "tables_ptr", "lens_ptr", "starts_ptr", "lse_ptr", "alibi_ptr", "sinks_ptr", "k_scale_ptr",
    "v_scale_ptr",
    "num_seqs", "num_tokens", "num_blocks", "max_len", "window", "table_stride", "q_token",
    "q_head", "o_token", "o_head", "num_splits", "min_tokens", "decode_queries", "max_queries",
)  # fmt: skip


def _jit(kernel: Any) -> Any:
    """`triton.jit` that specialises on nothing of `CHANGING`."""
    parameters = inspect.signature(kernel).parameters
    return triton.jit(do_not_specialize=[n for n in CHANGING if n in parameters])(kernel)


@triton.jit
def _attend_rows(
    query_ptr, key_ptr, value_ptr, table_row, out_ptr, lse_ptr, alibi_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, scale, softcap, v_scale, num_blocks, max_len, window, num_tokens,
    q_token, q_head, o_token, o_head, length, first_token, query_len, tile_start, kv_head, split,
    context, first, end, start, share, num_splits, NUM_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE_QUERIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    HAS_LSE: tl.constexpr, PARTIAL: tl.constexpr, V_RUN: tl.constexpr, DOT_TYPE: tl.constexpr,
    K_PARTS: tl.constexpr, WORDS: tl.constexpr, READ_ONCE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One split of one tile of rows, from its query to where its result goes.

    With PARTIAL the state goes to fp32 ``out_ptr``, for the merge: ``[token, head, split, D]``
    outputs (normalised), then ``[token, head, split]`` log2-sum-exps, so that a row's lie together.
    Without it the final output and natural log-sum-exp are written.
    """
    row = tl.arange(0, ROWS)
    row_token = tile_start + row // GROUP  # among the sequence's query tokens
    row_head = kv_head * GROUP + row % GROUP
    row_valid = (row // GROUP < TILE_QUERIES) & (row_token < query_len)
    row_valid = row_valid & (first_token + row_token < num_tokens) & (first_token >= 0)
    last_position = context + tl.minimum(tile_start + TILE_QUERIES, query_len) - 1
    row_position = context + row_token
    stop = tl.minimum(start + share, end)

    dim = tl.arange(0, D_PAD)
    token = (first_token + row_token).to(tl.int64)
    q_row = query_ptr + token * q_token + row_head * q_head
    q0 = query_part(q_row, row_valid, 0, K_PARTS, WORDS, D, D_PAD, DOT_TYPE)
    q1, q2, q3 = q0, q0, q0
    if K_PARTS > 1:
        q1 = query_part(q_row, row_valid, 1, K_PARTS, WORDS, D, D_PAD, DOT_TYPE)
    if K_PARTS > 2:
        q2 = query_part(q_row, row_valid, 2, K_PARTS, WORDS, D, D_PAD, DOT_TYPE)
        q3 = query_part(q_row, row_valid, 3, K_PARTS, WORDS, D, D_PAD, DOT_TYPE)
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + row_head, mask=row_valid, other=0.0) * LOG2E
    score_scale = scale
    if K_SCALES == 1:
        score_scale = scale * tl.load(k_scale_ptr)
    if K_SCALES > 1:
        score_scale = scale * tl.load(k_scale_ptr + kv_head)
    score_scale = score_scale / softcap if HAS_SOFTCAP else score_scale * LOG2E

    acc = tl.zeros([ROWS, D_PAD // 2 if WORDS else D_PAD], tl.float32)
    acc_high = acc
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    bad = tl.zeros([TILE], tl.int32)
    # tiles that every row of the tile sees whole need no mask: from the first behind no row's
    # window, to the last before the first row's position
    clear_start = start
    if HAS_WINDOW:
        behind = tl.maximum(last_position + 1 - window - start, 0)
        clear_start = tl.minimum(start + (behind + TILE - 1) // TILE * TILE, stop)
        acc, acc_high, m, total, bad = walk(
            q0, q1, q2, q3, acc, acc_high, m, total, bad, start, clear_start, first, end,
            row_position, slope, key_ptr, value_ptr, table_row, num_blocks, window, score_scale,
            softcap, kv_head, K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK, V_HEAD, V_TOKEN, V_DIM,
            BLOCK_SIZE, TILE, D, D_PAD, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, True, V_RUN, DOT_TYPE,
            K_PARTS, WORDS, READ_ONCE, CHUNKS,
        )  # fmt: skip
    whole = tl.minimum(stop, context + tile_start + 1) - clear_start
    clear_stop = clear_start + tl.maximum(whole, 0) // TILE * TILE
    acc, acc_high, m, total, bad = walk(
        q0, q1, q2, q3, acc, acc_high, m, total, bad, clear_start, clear_stop, first, end,
        row_position, slope, key_ptr, value_ptr, table_row, num_blocks, window, score_scale,
        softcap, kv_head, K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK, V_HEAD, V_TOKEN, V_DIM,
        BLOCK_SIZE, TILE, D, D_PAD, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, False, V_RUN, DOT_TYPE,
        K_PARTS, WORDS, READ_ONCE, CHUNKS,
    )  # fmt: skip
    acc, acc_high, m, total, bad = walk(
        q0, q1, q2, q3, acc, acc_high, m, total, bad, clear_stop, stop, first, end, row_position,
        slope, key_ptr, value_ptr, table_row, num_blocks, window, score_scale, softcap, kv_head,
        K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK, V_HEAD, V_TOKEN, V_DIM, BLOCK_SIZE, TILE, D,
        D_PAD, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, True, V_RUN, DOT_TYPE, K_PARTS, WORDS, READ_ONCE,
        CHUNKS,
    )  # fmt: skip

    if WORDS:
        acc = interleave(acc, acc_high, ROWS, D_PAD)
    if V_SCALES == 1:
        v_scale = v_scale * tl.load(v_scale_ptr)
    if V_SCALES > 1:
        v_scale = v_scale * tl.load(v_scale_ptr + kv_head)
    empty = total == 0.0
    if HAS_SINKS and not PARTIAL:
        sink = tl.load(sinks_ptr + row_head, mask=row_valid, other=0.0) * LOG2E
        m_all = tl.where(empty, 0.0, tl.maximum(m, sink))
        total = total * tl.math.exp2(m - m_all) + tl.math.exp2(sink - m_all)
        acc = acc * tl.math.exp2(m - m_all)[:, None]
        m = tl.where(empty, m, m_all)
    out = tl.where(empty[:, None], 0.0, acc * (v_scale / tl.where(empty, 1.0, total))[:, None])
    lse = tl.where(empty, float("-inf"), m + tl.math.log2(tl.where(empty, 1.0, total)))
    broken = (tl.max(bad, 0) > 0) | (length > max_len)
    out = tl.where(broken, float("nan"), out)
    lse = tl.where(broken, float("nan"), lse)
    out_mask = row_valid[:, None] & (dim[None, :] < D)
    if PARTIAL:
        place = (token * NUM_HEADS + row_head) * num_splits + split
        tl.store(out_ptr + place[:, None] * D + dim[None, :], out, mask=out_mask)
        lse_start = num_splits.to(tl.int64) * num_tokens * NUM_HEADS * D
        tl.store(out_ptr + lse_start + place, lse, mask=row_valid)
    else:
        o_ptrs = out_ptr + (token * o_token + row_head * o_head)[:, None] + dim[None, :]
        tl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        if HAS_LSE:
            tl.store(lse_ptr + token * NUM_HEADS + row_head, lse * LN2, mask=row_valid)


@_jit
def decode(
    query_ptr, key_ptr, value_ptr, tables_ptr, lens_ptr, starts_ptr, out_ptr, lse_ptr, alibi_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr, scale, softcap, v_scale, num_tokens, num_blocks,
    max_len, window, table_stride, q_token, q_head, o_token, o_head, num_splits, min_tokens,
    decode_queries, NUM_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE_QUERIES: tl.constexpr,
    VARLEN: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, HAS_LSE: tl.constexpr, PARTIAL: tl.constexpr, V_RUN: tl.constexpr,
    DOT_TYPE: tl.constexpr, K_PARTS: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sequences of few query tokens: a program per (KV head, split, sequence)."""
    if OVERLAP:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.maximum(tl.load(lens_ptr + sequence), 0)
    first_token = sequence
    query_len = 1
    if VARLEN:
        first_token = tl.load(starts_ptr + sequence)
        query_len = tl.load(starts_ptr + sequence + 1) - first_token
        if (query_len > decode_queries) | (query_len <= 0):
            return  # the prefill kernel's
    usable = tl.where(length > max_len, 0, length)
    context = usable - query_len  # tokens before this call's; below 0 if there are too few
    first, end = key_range(usable, context, usable - 1, window, HAS_WINDOW)
    share = share_of_split(first, end, num_splits, min_tokens, TILE)
    start = first // TILE * TILE + split * share
    if PARTIAL and ((start >= end) & (split > 0)):
        return  # no work, as the merge can tell
    _attend_rows(
        query_ptr, key_ptr, value_ptr, tables_ptr + sequence.to(tl.int64) * table_stride,
        out_ptr, lse_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, scale, softcap,
        v_scale, num_blocks, max_len, window, num_tokens, q_token, q_head, o_token, o_head,
        length, first_token, query_len, 0, kv_head, split, context, first, end, start, share,
        num_splits, NUM_HEADS, K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK, V_HEAD, V_TOKEN,
        V_DIM, BLOCK_SIZE, TILE, D, D_PAD, GROUP, ROWS, TILE_QUERIES, HAS_WINDOW, HAS_SOFTCAP,
        HAS_ALIBI, HAS_SINKS, K_SCALES, V_SCALES, HAS_LSE, PARTIAL, V_RUN, DOT_TYPE, K_PARTS, WORDS,
        True, CHUNKS,
    )  # fmt: skip


@triton.jit
def sequence_of(starts_ptr, token, num_seqs):
    """The sequence that owns a query token: the last whose start is at or before it."""
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@_jit
def merge(
    partial_ptr, lens_ptr, starts_ptr, out_ptr, lse_ptr, sinks_ptr, num_seqs,
    num_tokens, max_len, window, o_token, o_head, num_splits, min_tokens, decode_queries,
    max_queries, NUM_HEADS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    SPLITS: tl.constexpr, VARLEN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the splits' states of one query token and head, SPLITS of them and DIMS dimensions
    at a time."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = token
    query_len = 1
    owned = True
    too_many = False  # query tokens: some have no row in any tile
    if VARLEN:
        sequence = sequence_of(starts_ptr, token, num_seqs)
        query_len = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
        owned = (token >= tl.load(starts_ptr)) & (token < tl.load(starts_ptr + num_seqs))
        if owned & (query_len > decode_queries) & (max_queries > decode_queries):
            return  # written by the prefill kernel
        too_many = owned & (query_len > max_queries)
    length = tl.maximum(tl.load(lens_ptr + sequence), 0)
    usable = tl.where(length > max_len, 0, length)
    first, end = key_range(usable, usable - query_len, usable - 1, window, HAS_WINDOW)
    share = share_of_split(first, end, num_splits, min_tokens, TILE)
    active = (end - first // TILE * TILE + share - 1) // share
    active = tl.where(owned, tl.maximum(active, 1), 0)

    dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    lane = tl.arange(0, SPLITS)
    acc = tl.zeros([DIMS], tl.float32)
    total = (active * 0).to(tl.float32)  # a number that a loop may change, as a literal is not
    m = total + float("-inf")
    lse_start = num_splits.to(tl.int64) * num_tokens * NUM_HEADS * D
    row_start = (token.to(tl.int64) * NUM_HEADS + head) * num_splits
    if OVERLAP:
        gdc_wait()
    for base in range(0, active, SPLITS):
        split = base + lane
        place = row_start + split
        lse = tl.load(partial_ptr + lse_start + place, mask=split < active, other=float("-inf"))
        mask = (split < active)[:, None] & (dim[None, :] < D)
        part = tl.load(partial_ptr + place[:, None] * D + dim[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.math.exp2(lse - m_safe)
        alpha = tl.math.exp2(m - m_safe)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m = m_new
    empty = total == 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        m_all = tl.where(empty, 0.0, tl.maximum(m, sink))
        total = total * tl.math.exp2(m - m_all) + tl.where(empty, 0.0, tl.math.exp2(sink - m_all))
        acc = acc * tl.math.exp2(m - m_all)
        m = tl.where(empty, m, m_all)
    denominator = tl.where(empty, 1.0, total)
    out = tl.where(empty, 0.0, acc / denominator)
    out = tl.where(too_many, float("nan"), out)
    o_ptrs = out_ptr + token.to(tl.int64) * o_token + head * o_head + dim
    tl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), mask=dim < D)
    if HAS_LSE and tl.program_id(2) == 0:
        lse = tl.where(empty, float("-inf"), m + tl.math.log2(denominator)) * LN2
        lse = tl.where(too_many, float("nan"), lse)
        tl.store(lse_ptr + token * NUM_HEADS + head + tl.arange(0, 1), lse)


@_jit
def prefill(
    query_ptr, key_ptr, value_ptr, tables_ptr, lens_ptr, starts_ptr, out_ptr, lse_ptr, alibi_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr, scale, softcap, v_scale, num_tokens, num_blocks,
    max_len, window, table_stride, q_token, q_head, o_token, o_head, num_seqs, decode_queries,
    max_queries,
    NUM_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILE_QUERIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    HAS_LSE: tl.constexpr, V_RUN: tl.constexpr, DOT_TYPE: tl.constexpr,
    K_PARTS: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sequences of many query tokens: a program per (tile of queries, KV head).

    Tiles lie at multiples of TILE_QUERIES in a space where sequence b starts at
    ``starts[b] + b * TILE_QUERIES``, so that each sequence begins its own tile and the host
    need not know the lengths: a tile finds its sequence by bisection, and some find nothing.
    """
    kv_head = tl.program_id(0)
    # the last tiles have the most keys, so they go first
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    first_token = tl.load(starts_ptr + low)
    query_len = tl.load(starts_ptr + low + 1) - first_token
    tile_start = (tile - (first_token // TILE_QUERIES + low)) * TILE_QUERIES
    if (query_len <= decode_queries) | (tile_start >= query_len):
        return
    length = tl.maximum(tl.load(lens_ptr + low), 0)
    length = tl.where(query_len > max_queries, max_len + 1, length)  # too many: NaN, as too long
    # A bad id is the whole sequence's, also where these rows do not see its block. What they see
    # is among what is looked at here, so that the loop need not look again.
    table_row = tables_ptr + low.to(tl.int64) * table_stride
    usable = tl.where(length > max_len, 0, length)
    needed, end = key_range(usable, usable - query_len, usable - 1, window, HAS_WINDOW)
    if names_no_block(table_row, needed, end, num_blocks, BLOCK_SIZE):
        length = max_len + 1
    usable = tl.where(length > max_len, 0, length)
    context = usable - query_len
    last = context + tl.minimum(tile_start + TILE_QUERIES, query_len) - 1
    first, end = key_range(usable, context + tile_start, last, window, HAS_WINDOW)
    start = first // TILE * TILE
    _attend_rows(
        query_ptr, key_ptr, value_ptr, table_row,
        out_ptr, lse_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, scale, softcap,
        v_scale, num_blocks, max_len, window, num_tokens, q_token, q_head, o_token, o_head,
        length, first_token, query_len, tile_start, kv_head, 0, context, first, end, start,
        tl.maximum(end - start, 0), 1, NUM_HEADS, K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK,
        V_HEAD, V_TOKEN, V_DIM, BLOCK_SIZE, TILE, D, D_PAD, GROUP, ROWS, TILE_QUERIES,
        HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, HAS_SINKS, K_SCALES, V_SCALES, HAS_LSE, False,
        V_RUN, DOT_TYPE, K_PARTS, WORDS, False, CHUNKS,
    )  # fmt: skip
