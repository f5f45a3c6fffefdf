"""How tiles of keys, values and queries come from memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_part(
    q_row, row_valid, PART: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DOT_TYPE: tl.constexpr,
):  # fmt: skip
    """One part of the queries at `q_row`, ``[rows, dimensions]``.

    Parts are ranges that lie side by side; with WORDS the even dimensions, then the odd ones,
    which are the low and the high bytes of words.
    """
    SIZE: tl.constexpr = D_PAD // PARTS
    dim = PART + 2 * tl.arange(0, SIZE) if WORDS else PART * SIZE + tl.arange(0, SIZE)
    mask = row_valid[:, None] & (dim[None, :] < D)
    return tl.load(q_row[:, None] + dim[None, :], mask=mask, other=0.0).to(DOT_TYPE)


@triton.jit
def key_part(
    key_ptr, k_token, PART: tl.constexpr, PARTS: tl.constexpr, K_CHUNK: tl.constexpr,
    X: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """One part of the keys at `k_token`, as stored, ``[dimensions, tokens]``.

    A warp's loads of 16 bytes a thread run along the dimensions first. Rows cut into parts of
    256 bytes leave threads for the next tokens, whose packed 16 bytes share a 32-byte sector.
    """
    dim = PART * (D_PAD // PARTS) + tl.arange(0, D_PAD // PARTS)
    k_ptrs = key_ptr + k_token[:, None] + ((dim // X) * K_CHUNK + dim % X)[None, :]
    if D == D_PAD:
        return tl.trans(tl.load(k_ptrs))
    return tl.trans(tl.load(k_ptrs, mask=dim[None, :] < D, other=0.0))


@triton.jit
def key_words(key_ptr, k_token, D: tl.constexpr):
    """Keys of an eight-bit cache whose dimensions lie side by side, as words of two of them,
    ``[words, tokens]``."""
    words = key_ptr.to(tl.pointer_type(tl.int16))
    return tl.trans(tl.load(words + (k_token // 2)[:, None] + tl.arange(0, D // 2)[None, :]))


@triton.jit
def locate(
    token, table_row, num_blocks, first, end, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr
):
    """Physical blocks of tokens, and whether the table's entries are blocks at all.

    With MASKED tokens outside ``[first, end)`` count as the nearest inside.
    """
    logical = token // BLOCK_SIZE
    if MASKED:
        last = tl.maximum(end - 1, 0) // BLOCK_SIZE
        logical = tl.minimum(tl.maximum(logical, first // BLOCK_SIZE), last)
    # a vector even where one block holds the tile: loads through a scalar id are not pipelined
    block = tl.load(table_row + logical)
    known = (block >= 0) & (block < num_blocks)
    return tl.where(known, block, 0).to(tl.int64), known
