"""Keys and values folded into a tile of query rows, and the range of keys that a tile walks.

Device functions that every kernel of the backend shares. Scores are kept in units of log2, so
that the exponentials are `exp2`. Only what Triton 2.1 and 3.x share is named here.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A jitted function reads only globals that are constexpr.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_range(length, first_position, last_position, window, HAS_WINDOW: tl.constexpr):
    """The keys ``[first, end)`` that some row at these positions sees; empty if end ≤ first."""
    end = tl.minimum(last_position + 1, length)
    first = first_position * 0
    if HAS_WINDOW:
        first = tl.maximum(first_position + 1 - window, 0)
    return first, end


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
def walk(
    q, acc, m, total, bad, start, stop, first, end, row_position, slope,
    key_ptr, value_ptr, table_row, num_blocks, window, score_scale, softcap, kv_head,
    K_BLOCK: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, V_BLOCK: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr, V_RUN: tl.constexpr, DOT_TYPE: tl.constexpr,
    K_CUBE: tl.constexpr,
):  # fmt: skip
    """Fold the tiles from `start` up to `stop` into the rows' running state (acc, m, total).

    A mask on a load along the contiguous dimension breaks wide loads into single elements, so
    loads are never masked by position: with MASKED the logical block is clamped to those that
    the rows see, and what lies outside is masked in registers; values too, as 0 × NaN is NaN.
    Without MASKED every row must see every key.
    """
    dim = tl.arange(0, D_PAD)
    k_dim = (dim // X) * K_CHUNK + dim % X
    last = tl.maximum(end - 1, 0) // BLOCK_SIZE
    for tile_start in range(start, stop, TILE):
        token = tile_start + tl.arange(0, TILE)
        logical = token // BLOCK_SIZE
        if MASKED:
            logical = tl.minimum(tl.maximum(logical, first // BLOCK_SIZE), last)
        # a vector even where one block holds the tile: loads through a scalar id are not pipelined
        block = tl.load(table_row + logical)
        known = (block >= 0) & (block < num_blocks)
        bad = bad | tl.where(known, 0, 1)
        block = tl.where(known, block, 0).to(tl.int64)
        offset = token % BLOCK_SIZE
        k_token = block * K_BLOCK + kv_head * K_HEAD + offset * K_TOKEN
        v_token = block * V_BLOCK + kv_head * V_HEAD + offset * V_TOKEN
        if V_RUN > 1:  # tokens lie side by side, in runs that start at multiples of V_RUN
            v_token = tl.max_contiguous(tl.multiple_of(v_token, V_RUN), V_RUN)
        v_ptrs = value_ptr + v_token[:, None] + dim[None, :] * V_DIM
        if K_CUBE:
            # packed keys as [D/x, N, x]: neighbouring threads take neighbouring tokens, whose
            # 16 bytes lie side by side
            chunk = tl.arange(0, D_PAD // X)
            lane = tl.arange(0, X)
            k_ptrs = key_ptr + (chunk * K_CHUNK)[:, None, None]
            k_ptrs += k_token[None, :, None] + lane[None, None, :]
            k = tl.load(k_ptrs).to(DOT_TYPE)
            k = tl.reshape(tl.permute(k, (0, 2, 1)), (D_PAD, TILE))
        else:
            k_ptrs = key_ptr + k_token[:, None] + k_dim[None, :]
            if D == D_PAD:
                k = tl.trans(tl.load(k_ptrs).to(DOT_TYPE))
            else:
                k = tl.trans(tl.load(k_ptrs, mask=dim[None, :] < D, other=0.0).to(DOT_TYPE))
        if D == D_PAD:
            v = tl.load(v_ptrs).to(DOT_TYPE)
        else:
            v = tl.load(v_ptrs, mask=dim[None, :] < D, other=0.0).to(DOT_TYPE)

        s = tl.dot(q, k, allow_tf32=False)
        if HAS_SOFTCAP:
            # tanh by way of exp2, which every Triton has; exact at both ends
            s = 1.0 - 2.0 / (tl.exp2(s * (score_scale * 2.0 * LOG2E)) + 1.0)
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
            inside = (token >= first) & (token < end)
            v = tl.where(inside[:, None], v, tl.zeros_like(v))

        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = m_new
        if MASKED:  # a row that has seen nothing yet: −inf − −inf is NaN
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(DOT_TYPE), v, allow_tf32=False)
        m = m_new
    return acc, m, total, bad
