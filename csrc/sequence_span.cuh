// What one sequence asks for: its query tokens, the keys they see, and how these are split.
//
// A function of the sequence's own lengths and of the launch, so that both phases agree on it
// and no length is read on the host.
#pragma once

#include "problem_class.cuh"

namespace pagedattn {

constexpr int TILE = THREADS;  // tokens that a block takes at a time; partitions are whole tiles

struct sequence_span {
  int first_token;  // of its query tokens
  int query_len;
  int length;       // its keys; 0 where it is not served
  bool refused;     // longer than its table, or beyond a bound that the host gave: NaN
  bool elsewhere;   // its rows are another launch's
  int first, end;   // the keys [first, end) that some query token sees
  int tile_start;   // `first`, down to a whole tile
  int share;        // tokens of a partition
  int active;       // partitions that have work
};

constexpr int ITEM = 16;  // tokens that a warp of the tuned kernel takes at a time

/// How the tuned kernel splits: items are dealt out in turn over the warps of all partitions, or
/// partitions have a fixed size.
PA_DEVICE sequence_span split_items(sequence_span s, const pagedattn_params& p) {
  s.tile_start = s.first / ITEM * ITEM;
  s.share = p.tokens_per_split;
  const int items = ceil_div(max(s.end - s.tile_start, 0), ITEM);
  const int each = s.share > 0 ? s.share / ITEM : p.team;
  s.active = smaller(ceil_div(items, each), p.num_splits);
  return s;
}

PA_DEVICE sequence_span span_of(const pagedattn_params& p, int sequence) {
  sequence_span s;
  s.first_token = p.query_start_loc ? p.query_start_loc[sequence] : sequence;
  s.query_len = p.query_start_loc ? p.query_start_loc[sequence + 1] - s.first_token : 1;
  const int length = max(p.seq_lens[sequence], 0);
  const int64_t capacity = static_cast<int64_t>(p.max_blocks) * BLOCK_SIZE;
  const bool too_many = s.query_len > p.max_query_len;
  s.elsewhere = too_many && p.skip_longer;
  s.refused = !s.elsewhere && (length > p.max_seq_len || length > capacity || too_many);
  s.length = s.refused || s.elsewhere ? 0 : length;
  s.first = 0;
  s.end = s.query_len > 0 ? s.length : 0;
  // behind the window of the first query token lies nothing that any of them sees
  if (p.window > 0) s.first = max(max(s.length - s.query_len, 0) + 1 - p.window, 0);
  s.tile_start = s.first / TILE * TILE;
  if (p.team > 0) return split_items(s, p);
  const int tiles = ceil_div(max(s.end - s.tile_start, 0), TILE);
  // the least that leaves no key over, whatever the host thought
  s.share = max(max(p.tokens_per_split, ceil_div(tiles, p.num_splits) * TILE), TILE);
  s.active = ceil_div(tiles * TILE, s.share);
  return s;
}

/// From a query token of the sequence to its place in the workspace.
PA_DEVICE int workspace_shift(const pagedattn_params& p, const sequence_span& s, int sequence) {
  return p.skip_longer ? sequence * p.max_query_len - s.first_token : 0;
}

/// The sequence that owns a query token: the last one that starts at or before it; -1: none.
PA_DEVICE int sequence_of(const pagedattn_params& p, int token) {
  if (!p.query_start_loc) return token < p.num_seqs ? token : -1;
  if (p.num_seqs == 0 || token < p.query_start_loc[0] || token >= p.query_start_loc[p.num_seqs])
    return -1;
  int low = 0, high = p.num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.query_start_loc[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

}  // namespace pagedattn
