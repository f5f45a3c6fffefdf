"""How a call's keys are split over the device. From bounds that the host knows: no length is
read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedattn.backends.protocol import Call, Problem

#: tokens of a partition in the batch-invariant mode: fixed, so that a row's are its own
INVARIANT_TOKENS = 2048

# the portable kernel, as in csrc/sequence_span.cuh and csrc/portable_decode.cuh
TILE = 128  # tokens: a partition is a whole number of tiles
MAX_SPLITS = 256  # more would make the merge outweigh what they gain
RESIDENT = 3  # blocks that a multiprocessor holds at a time, by their registers
RESIDENT_WIDE = 2  # with tiles of more than 6 rows, or where values are converted from e4m3
WAVES = 4  # of blocks that follow one another, at most: a part-filled last one is waste
FULL = 0.9  # of the places of all waves taken is good enough
MIN_TOKENS = 128  # of a partition: shorter ones cost more in the merge than they save
_PORTABLE_ROWS = 8  # of a block

# the tuned kernel, as in csrc/tuned_item.cuh and csrc/tuned_rows.cuh
ITEM = 16  # tokens that a warp takes at a time
TILE_ROWS = 8  # query rows of a team
SHARING_ROWS = 24  # of a block that walks several tiles of them, which share what is read
#: bytes in flight that saturate a multiprocessor's share of an H200's memory, measured: with more,
#: one long sequence takes longer, as more has to drain in the end
_BYTES_IN_FLIGHT = 65536
#: items that a warp takes one after the other in less time than a merge takes, measured
_ALONE = 3
MOST_CLUSTERED = 16  # partitions that one cluster of blocks merges, as in csrc/tuned_cluster.cuh
#: fewer partitions for a cluster pay where a warp then has at most so many items, and the clusters
#: take such a share of the multiprocessors; measured
_CLUSTERED_ITEMS, _CLUSTERED_SHARE = 4, 1 / 3


class Partition(NamedTuple):
    splits: int  # that the grid and the workspace hold
    tokens: int  # of each; 0: the kernel shares the keys out evenly
    team: int = 0  # warps of the tuned kernel that share a partition; 0: the portable kernel


def portable(call: Call, problem: Problem, multiprocessors: int) -> Partition:
    """For the portable kernel: some blocks of 128 threads for each multiprocessor."""
    tokens = max(1, call.max_seq_len)
    if call.batch_invariant:
        return Partition(-(-tokens // INVARIANT_TOKENS), INVARIANT_TOKENS)
    if call.window is not None:
        tokens = min(tokens, call.window + call.max_query_len + TILE)
    if call.num_splits is not None:
        return Partition(max(1, min(call.num_splits, -(-tokens // TILE))), 0)
    rows = max(1, problem.group * call.max_query_len)
    tiles = -(-rows // min(_PORTABLE_ROWS, rows))
    groups = max(1, call.seq_lens.shape[0] * problem.num_kv_heads * tiles)
    most = min(-(-tokens // MIN_TOKENS), MAX_SPLITS)
    e4m3 = problem.kv_dtype == getattr(torch, "float8_e4m3fn", None)
    wide = call.max_query_len > 1 or rows > 6 or e4m3
    places = multiprocessors * (RESIDENT_WIDE if wide else RESIDENT)
    return Partition(max(1, min(_filling(places, groups), most)), 0)


def _filling(places: int, groups: int) -> int:
    """Into how many partitions each of `groups` goes so that few places of the waves stay empty."""
    best, best_share = 1, 0.0
    for waves in range(1, WAVES + 1):
        splits = places * waves // groups
        share = splits * groups / (places * waves)
        if share > best_share:
            best, best_share = splits, share
        if share >= FULL:
            break
    return max(1, best)


def tuned(call: Call, problem: Problem, multiprocessors: int, warps: int) -> Partition:
    """For the tuned kernel, whose blocks have `warps`: what the device runs at a time is shared out
    evenly, so that all of it finishes together.

    A team within a block merges in shared memory, several partitions through the workspace.
    """
    if call.batch_invariant:
        tokens = max(1, call.max_seq_len)
        return Partition(-(-tokens // INVARIANT_TOKENS), INVARIANT_TOKENS, warps)
    items = _items(call)
    if call.num_splits is not None:
        return Partition(max(1, min(call.num_splits, -(-items // warps))), 0, warps)
    rows = problem.group * call.max_query_len
    sharing = rows > TILE_ROWS
    tiles = max(1, -(-rows // (SHARING_ROWS if sharing else TILE_ROWS)))
    units = max(1, call.seq_lens.shape[0] * problem.num_kv_heads * tiles)
    item_bytes = 2 * ITEM * problem.head_dim * problem.kv_dtype.itemsize
    # of a multiprocessor; more than four of small heads' need not fit
    blocks = min(max(1, _BYTES_IN_FLIGHT // (item_bytes * warps)), 4)
    if sharing:  # an item takes longer; at heads of 256 no more fit by their registers
        blocks = 2
    if units >= blocks * multiprocessors:  # none is split, and a second block fills the gaps
        blocks = max(2, blocks)
    workers = max(1, min(items, blocks * multiprocessors * warps // units))
    if items <= _ALONE * warps:
        workers = min(workers, warps)
    if workers >= warps or sharing:  # whose blocks are one team
        workers = max(workers, warps)
        return Partition(workers // warps, 0, warps)
    team = 1 << (workers.bit_length() - 1)
    return Partition(1, 0, team)


def for_a_cluster(part: Partition, call: Call, problem: Problem, multiprocessors: int) -> Partition:
    """Fewer partitions than `tuned` says where that is no slower with a cluster that merges them,
    as it saves a merge's launch. Otherwise `part`."""
    if call.num_splits is not None or part.tokens:
        return part
    blocks = call.seq_lens.shape[0] * problem.num_kv_heads * MOST_CLUSTERED
    few_items = _items(call) <= MOST_CLUSTERED * part.team * _CLUSTERED_ITEMS
    if not few_items or blocks < multiprocessors * _CLUSTERED_SHARE:
        return part
    return part._replace(splits=min(part.splits, MOST_CLUSTERED))


def _items(call: Call) -> int:
    """Of the longest sequence that the call may have, as far as its rows see."""
    tokens = max(1, call.max_seq_len)
    if call.window is not None:
        tokens = min(tokens, call.window + call.max_query_len + ITEM)
    return -(-tokens // ITEM)
