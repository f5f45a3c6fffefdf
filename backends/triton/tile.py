"""Keys and values folded into a tile of query rows, and the range of keys that a tile walks.

Device functions that every kernel of the backend shares. Scores are kept in units of log2, so
that the exponentials are `exp2`. Only what Triton 2.1 and 3.x share is named here.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

from pagedattn.backends.triton.eight_bit import half_of_words
from pagedattn.backends.triton.load import (
    key_part,
    key_words,
    keys_of_chunks,
    load_chunks,
    locate,
)

# A jitted function reads only globals that are constexpr.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def _plain_range(start: int, stop: int, step: int, num_stages: int) -> range:
    return range(start, stop, step)


#: a loop of one stage. Triton 2.1 has only Python's `range` and reads no keyword of it; the
#: interpreter runs the loop as Python.
unpipelined: Any = (
    _plain_range if os.environ.get("TRITON_INTERPRET") == "1" else getattr(tl, "range", range)
)


@triton.jit
def key_range(length, first_position, last_position, window, HAS_WINDOW: tl.constexpr):
    """The keys ``[first, end)`` that some row at these positions sees; empty if end ≤ first."""
    end = tl.minimum(last_position + 1, length)
    first = first_position * 0
    if HAS_WINDOW:
        first = tl.maximum(first_position + 1 - window, 0)
    return first, end


@triton.jit
def names_no_block(table_row, first, end, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Whether an entry for the keys ``[first, end)`` lies outside the cache."""
    lane = tl.arange(0, 256)
    bad = tl.zeros([256], tl.int32)
    stop = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in range(first // BLOCK_SIZE, stop, 256):
        inside = start + lane < stop
        block = tl.load(table_row + start + lane, mask=inside, other=0)
        bad = bad | tl.where(inside & ((block < 0) | (block >= num_blocks)), 1, 0)
    return tl.max(bad, 0) > 0


@triton.jit
def share_of_split(first, end, num_splits, min_tokens, TILE: tl.constexpr):
    """Tokens that each split of ``[first, end)`` walks, a whole number of tiles.

    A function of the row's own range and of the launch alone, so that the merge can tell which
    splits had work.
    """
    tiles = (end - first // TILE * TILE + TILE - 1) // TILE
    share = tl.maximum((tiles + num_splits - 1) // num_splits, (min_tokens + TILE - 1) // TILE)
    return tl.maximum(share, 1) * TILE


@triton.jit
def scores(
    q0, q1, q2, q3, key_ptr, k_token, K_PARTS: tl.constexpr, WORDS: tl.constexpr,
    K_CHUNK: tl.constexpr, X: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Products of the queries' parts with the keys at `k_token`, ``[rows, tokens]``."""
    KV_TYPE: tl.constexpr = key_ptr.dtype.element_ty
    if WORDS:
        w = key_words(key_ptr, k_token, D, EVICT)
        s = tl.dot(q0, half_of_words(w, False, KV_TYPE).to(DOT_TYPE))
        s += tl.dot(q1, half_of_words(w, True, KV_TYPE).to(DOT_TYPE))
    else:
        k = key_part(key_ptr, k_token, 0, K_PARTS, K_CHUNK, X, D, D_PAD, EVICT)
        s = tl.dot(q0, k.to(DOT_TYPE), allow_tf32=False)
        if K_PARTS > 1:
            k = key_part(key_ptr, k_token, 1, K_PARTS, K_CHUNK, X, D, D_PAD, EVICT)
            s += tl.dot(q1, k.to(DOT_TYPE), allow_tf32=False)
        if K_PARTS > 2:
            k = key_part(key_ptr, k_token, 2, K_PARTS, K_CHUNK, X, D, D_PAD, EVICT)
            s += tl.dot(q2, k.to(DOT_TYPE), allow_tf32=False)
            k = key_part(key_ptr, k_token, 3, K_PARTS, K_CHUNK, X, D, D_PAD, EVICT)
            s += tl.dot(q3, k.to(DOT_TYPE), allow_tf32=False)
    return s


@triton.jit
def fold(
    q0, q1, q2, q3, acc, acc_high, m, total, bad, chunks, ids, tile_start, last_start, first, end,
    row_position, slope, key_ptr, value_ptr, table_row, num_blocks, window, score_scale, softcap,
    kv_head,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr, V_RUN: tl.constexpr, DOT_TYPE: tl.constexpr,
    K_PARTS: tl.constexpr, WORDS: tl.constexpr, READ_ONCE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Fold one tile into the rows' running state (acc, m, total).

    A mask on a load along the contiguous dimension breaks wide loads into single elements, so
    loads are never masked by position: with MASKED the logical block is clamped to those that
    the rows see, and what lies outside is masked in registers; values too, as 0 × NaN is NaN.
    Without MASKED every row must see every key. `acc_high` is in use with WORDS: `acc` then has
    the even dimensions of the values, and it the odd. With READ_ONCE no other program reads the
    sequence's keys and values: the table's entries are checked on the way, and loads that Triton
    does not pipeline ask the caches to give up first what they brought.

    With CHUNKS packed keys are loaded as they lie, then turned. With CHUNKS 2 and not MASKED they
    are `chunks`, in registers since a tile ago, and those of the next tile, whose blocks are `ids`,
    are loaded here; the tile at `last_start` stands for all that would follow it.
    """
    EVICT: tl.constexpr = "evict_first" if READ_ONCE else ""
    dim = tl.arange(0, D_PAD)
    token = tile_start + tl.arange(0, TILE)
    block, known = locate(token, table_row, num_blocks, first, end, BLOCK_SIZE, MASKED, READ_ONCE)
    if READ_ONCE:
        bad = bad | tl.where(known, 0, 1)
    offset = token % BLOCK_SIZE
    k_token = block * K_BLOCK + kv_head * K_HEAD + offset * K_TOKEN
    AHEAD: tl.constexpr = CHUNKS == 2 and not MASKED
    if CHUNKS > 0:
        mine = chunks
        if not AHEAD:
            mine = load_chunks(key_ptr, k_token, True, K_CHUNK, X, D, D_PAD, EVICT)
        s = tl.dot(q0, keys_of_chunks(mine, TILE, D_PAD).to(DOT_TYPE), allow_tf32=False)
    else:
        s = scores(
            q0, q1, q2, q3, key_ptr, k_token, K_PARTS, WORDS, K_CHUNK, X, D, D_PAD, DOT_TYPE, EVICT
        )
    if AHEAD:
        k_token = ids.to(tl.int64) * K_BLOCK + kv_head * K_HEAD + offset * K_TOKEN
        chunks = load_chunks(key_ptr, k_token, True, K_CHUNK, X, D, D_PAD, EVICT)
        after = tl.minimum(tile_start + 2 * TILE, last_start) + tl.arange(0, TILE)
        ids = tl.load(table_row + after // BLOCK_SIZE)
    if HAS_SOFTCAP:
        # tanh by way of exp2, which every Triton has; exact at both ends
        s = 1.0 - 2.0 / (tl.math.exp2(s * (score_scale * 2.0 * LOG2E)) + 1.0)
        s = s * (softcap * LOG2E)
    else:
        s = s * score_scale
    if HAS_ALIBI:
        s += slope[:, None] * (token[None, :] - row_position[:, None]).to(tl.float32)
    if MASKED:
        seen = (token[None, :] <= row_position[:, None]) & (token[None, :] < end)
        if HAS_WINDOW:
            seen = seen & (token[None, :] > row_position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))

    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = m_new
    if MASKED:  # a row that has seen nothing yet: −inf − −inf is NaN
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - m_safe[:, None])
    alpha = tl.math.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, 1)
    v_token = block * V_BLOCK + kv_head * V_HEAD + offset * V_TOKEN
    if WORDS:
        v_words = value_ptr.to(tl.pointer_type(tl.int16))
        w_ptrs = v_words + (v_token // 2)[:, None] + tl.arange(0, D // 2)[None, :]
        v = tl.load(w_ptrs, eviction_policy=EVICT)
    else:
        if V_RUN > 1:  # tokens lie side by side, in runs that start at multiples of V_RUN
            v_token = tl.max_contiguous(tl.multiple_of(v_token, V_RUN), V_RUN)
        v_ptrs = value_ptr + v_token[:, None] + dim[None, :] * V_DIM
        if D == D_PAD:
            v = tl.load(v_ptrs, eviction_policy=EVICT).to(DOT_TYPE)
        else:
            mask = dim[None, :] < D
            v = tl.load(v_ptrs, mask=mask, other=0.0, eviction_policy=EVICT).to(DOT_TYPE)
    v_high = v
    if WORDS:
        v_high = half_of_words(v, True, value_ptr.dtype.element_ty).to(DOT_TYPE)
        v = half_of_words(v, False, value_ptr.dtype.element_ty).to(DOT_TYPE)
    if MASKED:
        inside = (token >= first) & (token < end)
        v = tl.where(inside[:, None], v, tl.zeros_like(v))
        if WORDS:
            v_high = tl.where(inside[:, None], v_high, tl.zeros_like(v_high))
    p = p.to(DOT_TYPE)
    acc = acc * alpha[:, None]
    if WORDS:
        acc_high = acc_high * alpha[:, None] + tl.dot(p, v_high)
    acc += tl.dot(p, v, allow_tf32=False)
    return acc, acc_high, m_new, total, bad, chunks, ids


@triton.jit
def walk(
    q0, q1, q2, q3, acc, acc_high, m, total, bad, start, stop, first, end, row_position, slope,
    key_ptr, value_ptr, table_row, num_blocks, window, score_scale, softcap, kv_head,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr, V_RUN: tl.constexpr, DOT_TYPE: tl.constexpr,
    K_PARTS: tl.constexpr, WORDS: tl.constexpr, READ_ONCE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Fold the tiles from `start` up to `stop`; the state is as `fold` has it.

    Tiles to be masked are few, and pipelined their values would need shared memory twice, before
    and after the mask: more than the other loop has, so that fewer programs were resident.
    """
    chunks, ids = bad, bad  # read only where they are loaded ahead
    last_start = stop - TILE
    if CHUNKS == 2 and not MASKED:  # the first tile's keys, and where the second one's are
        some = start < stop
        token = start + tl.arange(0, TILE)
        ids = tl.load(table_row + token // BLOCK_SIZE, mask=some, other=0)
        k_token = ids.to(tl.int64) * K_BLOCK + kv_head * K_HEAD + token % BLOCK_SIZE * K_TOKEN
        chunks = load_chunks(key_ptr, k_token, some, K_CHUNK, X, D, D_PAD, "")
        token = tl.minimum(start + TILE, last_start) + tl.arange(0, TILE)
        ids = tl.load(table_row + token // BLOCK_SIZE, mask=some, other=0)
    if MASKED:
        for tile_start in unpipelined(start, stop, TILE, num_stages=1):
            acc, acc_high, m, total, bad, chunks, ids = fold(
                q0, q1, q2, q3, acc, acc_high, m, total, bad, chunks, ids, tile_start, last_start,
                first, end, row_position, slope, key_ptr, value_ptr, table_row, num_blocks, window,
                score_scale, softcap, kv_head, K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK,
                V_HEAD, V_TOKEN, V_DIM, BLOCK_SIZE, TILE, D, D_PAD, HAS_WINDOW, HAS_SOFTCAP,
                HAS_ALIBI, MASKED, V_RUN, DOT_TYPE, K_PARTS, WORDS, READ_ONCE, CHUNKS,
            )  # fmt: skip
    else:
        for tile_start in range(start, stop, TILE):
            acc, acc_high, m, total, bad, chunks, ids = fold(
                q0, q1, q2, q3, acc, acc_high, m, total, bad, chunks, ids, tile_start, last_start,
                first, end, row_position, slope, key_ptr, value_ptr, table_row, num_blocks, window,
                score_scale, softcap, kv_head, K_BLOCK, K_HEAD, K_TOKEN, K_CHUNK, X, V_BLOCK,
                V_HEAD, V_TOKEN, V_DIM, BLOCK_SIZE, TILE, D, D_PAD, HAS_WINDOW, HAS_SOFTCAP,
                HAS_ALIBI, MASKED, V_RUN, DOT_TYPE, K_PARTS, WORDS, READ_ONCE, CHUNKS,
            )  # fmt: skip
    return acc, acc_high, m, total, bad
