// The query rows of a warp's work: which they are, and what they have seen so far.
#pragma once

#include "portable_decode.cuh"
#include "tuned_item.cuh"

// With 16 KB a warp, four saturate the memory of a multiprocessor's share; more in flight only
// lengthens the drain. Small items take more blocks: see backends/cuda/partition.py.
#ifndef PAGEDATTN_TUNED_WARPS
#define PAGEDATTN_TUNED_WARPS 4
#endif

namespace pagedattn {

constexpr int TUNED_WARPS = PAGEDATTN_TUNED_WARPS;
constexpr int TUNED_THREADS = TUNED_WARPS * 32;

/// Which part of the work is this warp's, by its team's index: KV head fastest, then tile of rows,
/// partition, sequence.
struct team_work {
  int kv_head, row_tile, split, sequence;

  static PA_DEVICE team_work of(const pagedattn_params& p, int warp) {
    // unsigned: half the instructions of a division
    const unsigned tiles = ceil_div(p.max_query_len * GROUP, TILE_ROWS);
    const unsigned heads = p.num_kv_heads, splits = p.num_splits, team = p.team;
    unsigned index = blockIdx.x * (TUNED_WARPS / team) + warp / team;
    team_work w;
    w.kv_head = index % heads, index /= heads;
    w.row_tile = index % tiles, index /= tiles;
    w.split = index % splits;
    w.sequence = index / splits;
    return w;
  }
};

/// The two columns of the scores that a lane holds: a row of the tile each.
struct column_scoring {
  row_scoring row[2];
  bool is_plain;

  PA_DEVICE column_scoring(const pagedattn_params& p, const sequence_span& span,
                           const team_work& work, float scale, int lane) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const query_row at(p, span, work.kv_head, work.row_tile * TILE_ROWS + lane % 4 * 2 + c);
      row[c] = scoring_of(p, at, scale);
    }
    is_plain = p.softcap == 0.0f && !p.alibi_slopes;
  }

  /// Whether a score is the scaled product and no more.
  PA_DEVICE bool plain() const { return is_plain; }
};

/// A warp's running state: of its two rows, the maxima, the lane's part of the sums, and its part
/// of the weighted values.
struct warp_state {
  float top[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {};
  float acc[STEPS][4] = {};

  /// Make `score` weights and count them; what there was is rescaled only if a maximum rose.
  PA_DEVICE void weigh(float (&score)[4]) {
    float next[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        next[c] = fmaxf(next[c], __shfl_xor_sync(PA_ALL_LANES, next[c], offset));
      next[c] = fmaxf(next[c], top[c]);
    }
    if (__any_sync(PA_ALL_LANES, next[0] > top[0] || next[1] > top[1])) {
      const float factor[2] = {weight_of(top[0], next[0]), weight_of(top[1], next[1])};
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[step][i] *= factor[i % 2];
      sum[0] *= factor[0], sum[1] *= factor[1];
      top[0] = next[0], top[1] = next[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float reference = top[i % 2] == minus_infinity() ? 0.0f : top[i % 2];
      score[i] = exp2_fast(score[i] - reference);
      sum[i % 2] += score[i];
    }
  }
};

/// The lane's part of the tile's queries, as the products with the keys take them.
template <class Shape>
PA_DEVICE void load_query_tile(unsigned (&query)[STEPS][2], const pagedattn_params& p,
                               const sequence_span& span, const team_work& work, int lane) {
  const query_row row(p, span, work.kv_head, work.row_tile * TILE_ROWS + lane / 4);
  const unsigned short* elements = static_cast<const unsigned short*>(p.query) +
                                   row.token * p.query_token_stride +
                                   row.head * p.query_head_stride;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      query[step][half] = row.token < 0 ? 0u
                                        : *reinterpret_cast<const unsigned*>(
                                              elements + Shape::query_dim(step, half, lane));
}

}  // namespace pagedattn
