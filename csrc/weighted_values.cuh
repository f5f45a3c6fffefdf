// The weighted V of a tile, accumulated in registers that are spread over the block.
//
// A policy says how the threads share the work: which elements of V a thread adds up (`dim_of`,
// ACCUMULATORS of them for each row) and over which of the tile's tokens. PARTS threads hold the
// same elements over different tokens; their sum is taken once, at the end.
#pragma once

#include "paged_gather.cuh"

namespace pagedattn {

/// The rows' weights of one token, side by side so that they are read as a whole.
template <int ROWS>
struct alignas(16) token_weights {
  float of[ceil_div(ROWS, 4) * 4];
};

template <int ROWS>
struct weighted_tile {
  token_weights<ROWS> weights[TILE];
  int32_t block[TILE];  // of each token, NO_BLOCK or BAD_BLOCK
};

/// Values whose head_dim is dense (NHD, HND): a thread loads WIDTH elements of one token. With
/// WIDTH = 1 any strides will do.
template <int WIDTH>
struct values_by_dim {
  static constexpr int SLOTS = HEAD_DIM / WIDTH;
  static constexpr int SLOTS_PER_THREAD = ceil_div(SLOTS, THREADS);
  static constexpr int PARTS = smaller(SLOTS_PER_THREAD > 1 ? 1 : THREADS / SLOTS, TILE);
  static constexpr int ACCUMULATORS = WIDTH * SLOTS_PER_THREAD;
  static constexpr int AT_ONCE = SLOTS_PER_THREAD > 1 ? 2 : 4;  // tokens whose loads overlap

  static PA_DEVICE int part() { return SLOTS_PER_THREAD > 1 ? 0 : threadIdx.x / SLOTS; }
  static PA_DEVICE int slot(int i) {
    return SLOTS_PER_THREAD > 1 ? threadIdx.x + i * THREADS : threadIdx.x % SLOTS;
  }
  /// The element that accumulator `a` belongs to; HEAD_DIM or more: none.
  static PA_DEVICE int dim_of(int a) {
    return part() < PARTS ? slot(a / WIDTH) * WIDTH + a % WIDTH : HEAD_DIM;
  }

  template <int ROWS>
  static PA_DEVICE void add(float (&acc)[ROWS][ACCUMULATORS], const weighted_tile<ROWS>& tile,
                            const pagedattn_params& p, const paged_gather& gather,
                            int tile_start) {
    if (part() >= PARTS) return;
    for (int from = part(); from < TILE; from += PARTS * AT_ONCE) {
      stored_vector<KV_TYPE, WIDTH> stored[AT_ONCE][SLOTS_PER_THREAD];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int t = from + u * PARTS;
        const int32_t block = t < TILE ? tile.block[t] : NO_BLOCK;
        const bool read = block >= 0 && gather.needs(tile_start + t);
        const int64_t base = read ? gather.value_token(p, block, tile_start + t) : 0;
#pragma unroll
        for (int i = 0; i < SLOTS_PER_THREAD; ++i) {
          if (read && slot(i) < SLOTS)
            stored[u][i].load(p.value_cache, base + slot(i) * WIDTH * p.value_dim_stride);
          else
            stored[u][i].clear();  // 0 times what lies in memory may be NaN
        }
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int t = from + u * PARTS;
        if (t >= TILE) break;
        const token_weights<ROWS> weights = tile.weights[t];
#pragma unroll
        for (int a = 0; a < ACCUMULATORS; ++a) {
          const float value = stored[u][a / WIDTH].get(a % WIDTH);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) acc[r][a] += weights.of[r] * value;
        }
      }
    }
  }
};

/// Values whose tokens are dense (packed): a thread loads WIDTH tokens of one element.
template <int WIDTH>
struct values_by_token {
  static_assert(BLOCK_SIZE % WIDTH == 0 && TILE % WIDTH == 0, "a load must stay in its block");
  static constexpr int VECTORS = TILE / WIDTH;
  static constexpr int PARTS = smaller(VECTORS, 4);
  static constexpr int STEP = THREADS / PARTS;
  static constexpr int ACCUMULATORS = ceil_div(HEAD_DIM, STEP);

  static PA_DEVICE int part() { return threadIdx.x % PARTS; }
  static PA_DEVICE int dim_of(int a) { return threadIdx.x / PARTS + a * STEP; }

  template <int ROWS>
  static PA_DEVICE void add(float (&acc)[ROWS][ACCUMULATORS], const weighted_tile<ROWS>& tile,
                            const pagedattn_params& p, const paged_gather& gather,
                            int tile_start) {
    for (int v = part(); v < VECTORS; v += PARTS) {
      const int t = v * WIDTH;
      const int32_t block = tile.block[t];
      if (block < 0) continue;
      const int64_t base = gather.value_token(p, block, tile_start + t);
      stored_vector<KV_TYPE, WIDTH> stored[ACCUMULATORS];
#pragma unroll
      for (int a = 0; a < ACCUMULATORS; ++a) {
        if (dim_of(a) < HEAD_DIM)
          stored[a].load(p.value_cache, base + dim_of(a) * p.value_dim_stride);
        else
          stored[a].clear();
      }
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        if (!gather.needs(tile_start + t + j)) continue;  // 0 times what lies there may be NaN
        const token_weights<ROWS> weights = tile.weights[t + j];
#pragma unroll
        for (int a = 0; a < ACCUMULATORS; ++a) {
          const float value = stored[a].get(j);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) acc[r][a] += weights.of[r] * value;
        }
      }
    }
  }
};

}  // namespace pagedattn
