"""How tiles of keys, values and queries come from memory."""

from __future__ import annotations

import triton
import triton.language as tl
from packaging.version import Version

#: whether the installed Triton can turn `load_chunks`' keys (3.0 and later)
CHUNKS_AVAILABLE = hasattr(tl, "permute")
#: whether it was seen to keep them in registers beside heads of 256; 3.2 and 3.4 spilled
CHUNKS_OF_LARGE_HEADS = Version(triton.__version__.split("+")[0]) >= Version("3.6")


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
    X: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One part of the keys at `k_token`, as stored, ``[dimensions, tokens]``.

    A warp's loads of 16 bytes a thread run along the dimensions first. Rows cut into parts of
    256 bytes leave threads for the next tokens, whose packed 16 bytes share a 32-byte sector.
    """
    dim = PART * (D_PAD // PARTS) + tl.arange(0, D_PAD // PARTS)
    k_ptrs = key_ptr + k_token[:, None] + ((dim // X) * K_CHUNK + dim % X)[None, :]
    if D == D_PAD:
        return tl.trans(tl.load(k_ptrs, eviction_policy=EVICT))
    mask = dim[None, :] < D
    return tl.trans(tl.load(k_ptrs, mask=mask, other=0.0, eviction_policy=EVICT))


@triton.jit
def load_chunks(
    key_ptr, k_token, mask, K_CHUNK: tl.constexpr, X: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """The packed keys at `k_token` as they lie, ``[chunk, token, X]``; none unless `mask`.

    Loaded to registers they come through the L1 cache, which two tokens' 16 bytes of one sector
    share; pipelined copies to shared memory, which `key_part`'s become in prefill, pass it by.
    Copied to shared memory as chunks, they still fill whole sectors.
    """
    chunk = tl.arange(0, D_PAD // X)[:, None, None]
    k_ptrs = key_ptr + chunk * K_CHUNK + k_token[None, :, None] + tl.arange(0, X)[None, None, :]
    if D == D_PAD:
        return tl.load(k_ptrs, mask=mask, eviction_policy=EVICT)
    mask = (chunk < D // X) & mask
    return tl.load(k_ptrs, mask=mask, other=0.0, eviction_policy=EVICT)


# Triton looks up every name of a function, also in branches not taken, so one that an older one
# lacks stands in a function that it never sees.
if CHUNKS_AVAILABLE:

    @triton.jit
    def keys_of_chunks(chunks, TILE: tl.constexpr, D_PAD: tl.constexpr):
        """What `load_chunks` loaded, ``[dimensions, tokens]``."""
        return tl.trans(tl.reshape(tl.permute(chunks, (1, 0, 2)), (TILE, D_PAD)))
else:
    keys_of_chunks = tl.debug_barrier  # never called; any name that a jitted function may see


@triton.jit
def key_words(key_ptr, k_token, D: tl.constexpr, EVICT: tl.constexpr):
    """Keys of an eight-bit cache whose dimensions lie side by side, as words of two of them,
    ``[words, tokens]``."""
    words = key_ptr.to(tl.pointer_type(tl.int16))
    w_ptrs = words + (k_token // 2)[:, None] + tl.arange(0, D // 2)[None, :]
    return tl.trans(tl.load(w_ptrs, eviction_policy=EVICT))


@triton.jit
def locate(
    token, table_row, num_blocks, first, end, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Physical blocks of tokens, and whether the table's entries are blocks at all.

    With MASKED tokens outside ``[first, end)`` count as the nearest inside. Without CHECKED an
    entry is followed whatever it is: all for ``[first, end)`` must have been looked at.
    """
    logical = token // BLOCK_SIZE
    if MASKED:
        last = tl.maximum(end - 1, 0) // BLOCK_SIZE
        logical = tl.minimum(tl.maximum(logical, first // BLOCK_SIZE), last)
    # a vector even where one block holds the tile: loads through a scalar id are not pipelined
    block = tl.load(table_row + logical)
    known = (block >= 0) & (block < num_blocks)
    if CHECKED:
        block = tl.where(known, block, 0)
    return block.to(tl.int64), known
