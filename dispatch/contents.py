"""Checks of tensor contents: those a CPU can do for nothing, and those that ``PAGEDATTN_CHECK=1``
asks for on a device, where they synchronise."""

from __future__ import annotations

import numbers
from itertools import pairwise

import torch
from torch import Tensor

from pagedattn.arguments import check_number


def host_lengths(seq_lens: Tensor, limit: int) -> list[int]:
    """The lengths as a list, each from 0 to `limit`.

    Raises
    ------
    ValueError
        Naming the first sequence whose length is negative or too long.
    """
    lengths: list[int] = seq_lens.tolist()
    if lengths and not (min(lengths) >= 0 and max(lengths) <= limit):
        sequence, length = next((i, n) for i, n in enumerate(lengths) if not 0 <= n <= limit)
        raise ValueError(
            f"seq_lens[{sequence}] = {length}, but a length must be from 0 to {limit}, "
            "the tokens that a row of block_tables can hold, or max_seq_len if that is less"
        )
    return lengths


def host_starts(query_start_loc: Tensor, num_tokens: int) -> list[int]:
    """`query_start_loc` as a list that starts at 0, never falls and stays within the query.

    Raises
    ------
    ValueError
        Naming the entry that breaks this.
    """
    starts: list[int] = query_start_loc.tolist()
    if starts[0] != 0:
        raise ValueError(f"query_start_loc must start at 0, not {starts[0]}")
    for i, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(
                f"query_start_loc must not fall, but entry {i + 1} is {end} after {start}"
            )
    if starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc ends at {starts[-1]}, but the query has {num_tokens} tokens"
        )
    return starts


def max_query_len(hint: int | None, starts: list[int] | None, num_tokens: int) -> int:
    """No sequence has more query tokens: counted where `starts` is known, else the hint.

    Raises
    ------
    ValueError, TypeError
        If the hint is no integer above 0, or a sequence has more tokens than it says.
    """
    if hint is not None and (hint.__class__ is not int or hint < 1):  # what is right costs nothing
        check_number("max_query_len", hint, above=0, kind=numbers.Integral)
        hint = int(hint)
    if starts is None:
        return num_tokens if hint is None else min(hint, num_tokens)
    longest = max((end - start for start, end in pairwise(starts)), default=0)
    if hint is not None and longest > hint:
        raise ValueError(f"max_query_len={hint}, but a sequence has {longest} query tokens")
    return longest


def check_tables(
    block_tables: Tensor,
    lengths: list[int],
    query_lens: list[int],
    window: int | None,
    block_size: int,
    num_blocks: int,
) -> None:
    """Every table entry that a sequence needs names a block of the cache.

    Needed are those within its length that do not lie wholly behind the window of the first of
    its query tokens.

    Raises
    ------
    ValueError
        Naming the sequence, the position in its table and the id.
    """
    width = block_tables.shape[1]
    end = _column([-(-n // block_size) for n in lengths])
    reach = [
        0 if window is None else n - q + 1 - window
        for n, q in zip(lengths, query_lens, strict=True)
    ]
    first = _column([max(0, n) // block_size for n in reach])
    table, columns = block_tables.cpu(), torch.arange(width, device="cpu")
    bad = ((table < 0) | (table >= num_blocks)) & (columns < end) & (columns >= first)
    if bool(bad.any()):
        sequence, position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{sequence}, {position}] = {int(table[sequence, position])} names no "
            f"block of the cache (ids are 0 to {num_blocks - 1}), and sequence {sequence} has "
            f"{lengths[sequence]} tokens, which reach it"
        )


def _column(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").unsqueeze(1)


def check_slots(slots: Tensor, slot_count: int) -> None:
    """No slot lies beyond the cache (a negative one is a token to skip).

    Raises
    ------
    ValueError
        Naming the first token whose slot does.
    """
    if int(slots.max()) >= slot_count:
        token = int((slots >= slot_count).nonzero()[0])
        raise ValueError(
            f"slot_mapping[{token}] = {int(slots[token])} lies beyond the cache, "
            f"whose last slot is {slot_count - 1}"
        )


def clamped_int32(values: Tensor, top: int) -> Tensor:
    """`values` as dense int32, those out of range kept out of range instead of wrapping.

    `top` is the smallest number that is already too large to be valid.
    """
    if values.dtype != torch.int32:
        values = values.clamp(-1, top).to(torch.int32)
    return values.contiguous()
