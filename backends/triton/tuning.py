"""Tile sizes, measured, by what decides them; and how many splits a launch gets."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from pagedattn.backends.protocol import Problem
from pagedattn.backends.triton import eight_bit, load


class Tiling(NamedTuple):
    tile: int  # tokens of a tile of keys
    num_warps: int
    num_stages: int
    programs_per_sm: float  # resident programs that the splits aim for
    key_parts: int  # tiles of 1, 2 or 4 ranges of dimensions, in which keys are loaded
    words: bool  # read eight-bit caches as 16-bit words, where their strides allow it
    min_tokens: int  # of a split: shorter ones cost more in the merge than they save
    #: packed keys are loaded as they lie: 1, when they are needed, 2, while the tile before is
    #: worked on; 0, as `key_parts` says
    chunks: int = 0


#: more would make the merge, and its memory, outweigh what they gain
MAX_SPLITS = 1024


def padded(head_dim: int) -> int:
    """The power of two that holds a head, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def decode_queries(group: int) -> int:
    """Sequences of up to so many query tokens are decode rows: they share a tile."""
    return max(1, min(16, 64 // group))


def rows(group: int, queries: int) -> int:
    """Rows of a tile: a power of two of at least 16, which is what `tl.dot` takes."""
    return max(16, 1 << (group * queries - 1).bit_length())


def decode_tiling(problem: Problem, num_rows: int, work: int) -> Tiling:
    """Measured on an H200 at 24/4/256; other sizes keep its bytes per tile.

    `work` is an upper bound of the tokens that all KV heads of all sequences walk together:
    where it is small, a program's latency counts and not how many bytes are in flight.
    """
    words = takes_words(problem)
    itemsize = 1 if words else max(2, problem.kv_dtype.itemsize)
    room = 32768 if roomy(problem.device) else 16384

    def tile(bytes_of_tile: int) -> int:
        tokens = min(bytes_of_tile, room) // (padded(problem.head_dim) * itemsize)
        return _within(tokens, 16, 64)

    if takes_chunks(problem) and work > 8192:
        if num_rows == 16:
            # more tokens of smaller heads are better for int8 alone
            tokens = tile(8192) if problem.kv_dtype == torch.int8 else 16
            return Tiling(tokens, 1, 2, 8.0, 1, False, 64, chunks=1)
        if num_rows == 32 and not (problem.window or problem.softcap or problem.alibi):  # it spills
            return Tiling(tile(16384), 2, 2, 4.0, 1, False, 64, chunks=1)
    if problem.kv_layout == "packed":
        if num_rows > 16:
            parts = key_parts(problem, 128)
            if num_rows == 32:
                return Tiling(tile(8192), 2, 2, 4.0, parts, False, 64)
            return Tiling(tile(16384), 4, 2, 2.0, parts, False, 64)
        parts = key_parts(problem, 256)
        if problem.kv_dtype.itemsize == 1 and work > 65536 and hopper(problem.device):
            # with so few values to a thread Triton 3.6 converts e5m2 by what sm_80 has not
            return Tiling(tile(8192), 1, 2, 8.0, parts, False, 64)
        if problem.kv_dtype.itemsize == 1 and work > 8192:
            return Tiling(tile(16384), 2, 2, 4.0, parts, False, 64)
        if work > 65536:
            return Tiling(tile(8192), 1, 1, 8.0, parts, False, 64)
        if work > 8192:
            return Tiling(tile(16384), 2, 1, 4.0, parts, False, 64)
        return Tiling(tile(32768), 4, 2, 2.0, parts, False, 64)
    parts = 2 if words else 1
    if num_rows == 16 and work > 8192:
        if problem.kv_dtype.itemsize == 1:
            return Tiling(tile(16384), 2, 2, 4.0, parts, words, 64)
        if work <= 65536:
            return Tiling(tile(16384), 4, 2, 3.0, parts, words, 64)
    return Tiling(tile(32768), 4, 2, 2.0, parts, words, 64)


def key_parts(problem: Problem, bytes_of_part: int) -> int:
    """Parts of so many bytes that a token's packed key has, at most 4.

    With 256 or fewer a warp reads two tokens' 16 bytes side by side, or more.
    """
    size = padded(problem.head_dim) * problem.kv_dtype.itemsize
    return _within(size // bytes_of_part, 1, 4)


def takes_words(problem: Problem) -> bool:
    """Whether eight-bit caches are read as words: packed ones took longer that way."""
    size = problem.head_dim
    return (
        eight_bit.AVAILABLE
        and problem.kv_layout != "packed"
        and problem.kv_dtype.itemsize == 1
        and problem.dtype != torch.float32
        and size == padded(size)
        and size >= 32
    )


def takes_chunks(problem: Problem) -> bool:
    """Whether decode loads packed eight-bit keys as they lie.

    Copied ahead of use that way they fill whole sectors: 15 % less time at 24/4/256 and e4m3, 37 %
    less at 32/8/128. Keys of 16 bits are left to `key_parts`: the best of 13 tilings took 3 % more.
    """
    return (
        load.CHUNKS_OF_LARGE_HEADS  # older ones were not tried
        and hopper(problem.device)  # as in `decode_tiling`
        and problem.kv_layout == "packed"
        and problem.kv_dtype.itemsize == 1
        and problem.dtype != torch.float32
        and padded(problem.head_dim) <= 256  # a warp's registers hold no more
    )


def takes_ahead(problem: Problem, tile: int) -> bool:
    """Whether prefill loads packed keys a tile ahead.

    In registers, of which heads of 256 leave few: with these it is only for what Triton 3.6 then
    compiles without a spill in the loop, and on sm_80 it spilled kilobytes. Smaller heads would do
    there; nothing was measured.
    """
    cramped = padded(problem.head_dim) > 128
    spills = problem.softcap or problem.window or problem.block_size < 8
    return (
        load.CHUNKS_AVAILABLE
        and hopper(problem.device)
        and problem.kv_layout == "packed"
        and problem.kv_dtype == problem.dtype != torch.float32
        # so that a token's place in its block is the same in every tile
        and tile % problem.block_size == 0
        and not (cramped and (spills or not load.CHUNKS_OF_LARGE_HEADS))
    )


def prefill_tiling(problem: Problem) -> Tiling:
    """Measured on an H200 at 24/4/256 in bf16: loading ahead pays with five stages, not three."""
    words = takes_words(problem)
    parts = 2 if words else 1
    if not roomy(problem.device):
        tile = _within(16384 // (2 * padded(problem.head_dim)), 16, 64)
        return Tiling(tile, 4, 1, 1.0, parts, words, 0)
    if problem.dtype == torch.float32 or padded(problem.head_dim) > 256:
        return Tiling(32, 8, 1, 1.0, 1, False, 0)  # words spill kilobytes
    if takes_ahead(problem, 64):
        return Tiling(64, 8, 5, 1.0, 1, False, 0, chunks=2)
    return Tiling(64, 8, 3, 1.0, parts, words, 0)


def prefill_queries(problem: Problem) -> int:
    """Query tokens of a tile: as many as fill its rows."""
    large = problem.dtype == torch.float32 or padded(problem.head_dim) > 256
    budget = 64 if large or not roomy(problem.device) else 128
    return max(1, budget // problem.group)


def _within(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


@functools.cache
def roomy(device: str) -> bool:
    """Whether a block may have the shared memory of a data centre's card: 160 KB and more, where
    others end at 99 KB or 64."""
    if not device.startswith("cuda"):
        return True  # the interpreter: the tiles of the card that they were measured on
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) == (8, 0) or major in (9, 10)


@functools.cache
def hopper(device: str) -> bool:
    """Whether the device is a Hopper or later."""
    if not device.startswith("cuda"):
        return True  # the interpreter
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def multiprocessors(device: str) -> int:
    if not device.startswith("cuda"):
        return 8  # the interpreter: enough to make splits happen
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def split_count(groups: int, max_len: int, device: str, tiling: Tiling) -> int:
    """Splits of each sequence, from the grid's upper bound: no length is read.

    `groups` is sequences × KV heads.
    """
    wanted = int(multiprocessors(device) * tiling.programs_per_sm) // groups
    most = -(-max_len // max(tiling.tile, tiling.min_tokens))
    return max(1, min(wanted, most, MAX_SPLITS))


def merge_tile(splits: int, head_dim: int, batch_invariant: bool) -> tuple[int, int]:
    """Splits and dimensions that a merge's program takes at a time: every further turn is as long
    as the memory takes to answer."""
    # fixed where the order of the sum must not follow the longest sequence
    lanes = 16 if batch_invariant else min(512, 1 << (splits - 1).bit_length())
    values = 8192 if lanes > 128 else 4096
    return lanes, min(padded(head_dim), values // lanes)
