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

// Tiles of query rows that a warp of the second form serves with one read of the keys and values:
// as many as its registers hold the weighted values of, at heads of 256.
constexpr int SHARING_TILES = 3;

/// Which part of the work is this warp's, by its team's index: KV head fastest, then TILES tiles of
/// rows, partition, sequence; or the partition fastest, where a cluster has all of a row's.
struct team_work {
  int kv_head, row_tile, split, sequence;  // row_tile: the first of them

  template <int TILES, bool CLUSTERED>
  static PA_DEVICE team_work of(const pagedattn_params& p, int warp) {
    // unsigned: half the instructions of a division
    const unsigned tiles = ceil_div(p.max_query_len * GROUP, TILES * TILE_ROWS);
    const unsigned heads = p.num_kv_heads, splits = p.num_splits, team = p.team;
    unsigned index = blockIdx.x * (TUNED_WARPS / team) + warp / team;
    team_work w;
    if constexpr (CLUSTERED) w.split = index % splits, index /= splits;
    w.kv_head = index % heads, index /= heads;
    w.row_tile = index % tiles * TILES, index /= tiles;
    if constexpr (!CLUSTERED) w.split = index % splits, index /= splits;
    w.sequence = index;
    return w;
  }

  PA_DEVICE query_row row(const pagedattn_params& p, const sequence_span& span, int row) const {
    return query_row(p, span, kv_head, row_tile * TILE_ROWS + row);
  }
};

/// Where a row's query begins.
PA_DEVICE const unsigned short* query_of(const pagedattn_params& p, const query_row& row) {
  return static_cast<const unsigned short*>(p.query) + row.token * p.query_token_stride +
         row.head * p.query_head_stride;
}

/// Half `half` of a lane's part of the row's query in one product, as the products with the keys
/// take it; `elements` is where the query begins.
template <class Shape>
PA_DEVICE unsigned query_pair(const query_row& row, const unsigned short* elements, int step,
                              int half, int lane) {
  if (row.token < 0) return 0u;
  return *reinterpret_cast<const unsigned*>(elements + Shape::query_dim(step, half, lane));
}

/// One tile's rows, in registers: the lane's part of the queries, and how the two columns of the
/// scores that it holds are scored.
struct own_rows {
  unsigned query[STEPS][2];
  row_scoring scoring[2];

  template <class Shape>
  PA_DEVICE void load(const pagedattn_params& p, const sequence_span& span, const team_work& work,
                      float scale, int lane) {
    const query_row row = work.row(p, span, lane / 4);
    const unsigned short* const elements = query_of(p, row);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        query[step][half] = query_pair<Shape>(row, elements, step, half, lane);
#pragma unroll
    for (int c = 0; c < 2; ++c)
      scoring[c] = scoring_of(p, work.row(p, span, lane % 4 * 2 + c), scale);
  }
  PA_DEVICE uint2 of(int, int step) const { return {query[step][0], query[step][1]}; }
  PA_DEVICE const row_scoring& scoring_at(int, int column) const { return scoring[column]; }
};

/// The same of several tiles, in shared memory: all of a block's warps have the same rows.
struct block_rows {
  uint2 query[SHARING_TILES][STEPS][32];
  row_scoring scoring[SHARING_TILES * TILE_ROWS];
};

/// A lane's view of them.
struct shared_rows {
  block_rows* rows;
  int lane;

  /// The block's threads fill them together.
  template <class Shape>
  PA_DEVICE void load(const pagedattn_params& p, const sequence_span& span, const team_work& work,
                      float scale) const {
    constexpr int EACH = ceil_div(STEPS, TUNED_WARPS);
    const int warp = threadIdx.x / 32, thread = threadIdx.x;
    const auto step_of = [&](int k) { return smaller(warp + k * TUNED_WARPS, STEPS - 1); };
    unsigned query[SHARING_TILES][EACH][2];  // all of them are asked for before one is needed
#pragma unroll
    for (int tile = 0; tile < SHARING_TILES; ++tile) {
      const query_row row = work.row(p, span, tile * TILE_ROWS + lane / 4);
      const unsigned short* const elements = query_of(p, row);
#pragma unroll
      for (int i = 0; i < 2 * EACH; ++i)
        query[tile][i / 2][i % 2] =
            query_pair<Shape>(row, elements, step_of(i / 2), i % 2, lane);
    }
#pragma unroll
    for (int tile = 0; tile < SHARING_TILES; ++tile)
#pragma unroll
      for (int k = 0; k < EACH; ++k)
        rows->query[tile][step_of(k)][lane] = {query[tile][k][0], query[tile][k][1]};
    if (thread < SHARING_TILES * TILE_ROWS)
      rows->scoring[thread] = scoring_of(p, work.row(p, span, thread), scale);
    __syncthreads();
  }
  PA_DEVICE uint2 of(int tile, int step) const { return rows->query[tile][step][lane]; }
  PA_DEVICE const row_scoring& scoring_at(int tile, int column) const {
    return rows->scoring[tile * TILE_ROWS + lane % 4 * 2 + column];
  }
};

/// A warp's running state: of its two rows of each tile, the maxima, the lane's part of the sums,
/// and its part of the weighted values.
template <int TILES>
struct warp_state {
  float top[TILES][2], sum[TILES][2] = {};
  float acc[TILES][STEPS][4] = {};

  PA_DEVICE warp_state() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) top[tile][0] = top[tile][1] = minus_infinity();
  }

  /// Make `score` weights and count them; what there was is rescaled only if a maximum rose. The
  /// tiles go side by side, as each is a chain of exchanges.
  PA_DEVICE void weigh(float (&score)[TILES][4]) {
    float next[TILES][2];
    bool rose = false;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      next[i / 2][i % 2] = fmaxf(score[i / 2][i % 2], score[i / 2][2 + i % 2]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        float& most = next[i / 2][i % 2];
        most = fmaxf(most, __shfl_xor_sync(PA_ALL_LANES, most, offset));
      }
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const float last = top[i / 2][i % 2];
      next[i / 2][i % 2] = fmaxf(next[i / 2][i % 2], last);
      rose = rose || next[i / 2][i % 2] > last;
    }
    if (__any_sync(PA_ALL_LANES, rose)) rescale(next);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float most = top[tile][i % 2];
        score[tile][i] = exp2_fast(score[tile][i] - (most == minus_infinity() ? 0.0f : most));
        sum[tile][i % 2] += score[tile][i];
      }
  }

 private:
  PA_DEVICE void rescale(const float (&next)[TILES][2]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const float factor[2] = {weight_of(top[tile][0], next[tile][0]),
                               weight_of(top[tile][1], next[tile][1])};
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][step][i] *= factor[i % 2];
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[tile][c] *= factor[c], top[tile][c] = next[tile][c];
    }
  }
};

}  // namespace pagedattn
