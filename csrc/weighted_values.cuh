// The weighted V of a logical warp's 32 tokens, accumulated in registers that are spread over it.
//
// A policy says how the lanes share the work: which elements of V a lane adds up (`dim_of`,
// ACCUMULATORS of them for each row) and over which tokens. PARTS lanes hold the same elements over
// different tokens; their sum is taken once, at the end. The tokens come in ROUNDS batches, each
// loaded as soon as the last one has been added.
#pragma once

#include "key_scores.cuh"

namespace pagedattn {

constexpr int VALUE_LOADS = 8;  // of a batch of values_by_dim, as values_by_token's has at 256

__host__ __device__ constexpr int power_of_two_below(int n) {
  int power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
}

/// The rows' weights of one of the 32 tokens, which its lane holds.
template <int ROWS>
PA_DEVICE void weights_of(float (&weights)[ROWS], const float (&own)[ROWS], int token) {
  const int source = lane_of_token(token);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) weights[r] = group_broadcast<LOGICAL_WARP>(own[r], source);
}

/// Values whose head_dim is dense (NHD, HND): a lane loads WIDTH elements of one token. With
/// WIDTH = 1 any strides will do.
template <int WIDTH>
struct values_by_dim {
  static constexpr int SLOTS = HEAD_DIM / WIDTH;
  static constexpr int SLOTS_PER_LANE = ceil_div(SLOTS, LOGICAL_WARP);
  static constexpr int PARTS =
      SLOTS_PER_LANE > 1 ? 1 : power_of_two_below(smaller(LOGICAL_WARP / SLOTS, RUN));
  static constexpr int ACCUMULATORS = WIDTH * SLOTS_PER_LANE;
  static constexpr int TOKENS = power_of_two_below(  // of a lane, in a batch
      smaller(ceil_div(VALUE_LOADS, SLOTS_PER_LANE), LOGICAL_WARP / PARTS));
  static constexpr int ROUNDS = LOGICAL_WARP / (TOKENS * PARTS);

  stored_vector<KV_TYPE, WIDTH> value[TOKENS][SLOTS_PER_LANE];

  static PA_DEVICE int part(int lane) { return SLOTS_PER_LANE > 1 ? 0 : lane / SLOTS; }
  static PA_DEVICE int slot(int lane, int i) {
    return SLOTS_PER_LANE > 1 ? lane + i * LOGICAL_WARP : lane % SLOTS;
  }
  /// The element that accumulator `a` belongs to; HEAD_DIM or more: none.
  static PA_DEVICE int dim_of(int lane, int a) {
    return part(lane) < PARTS ? slot(lane, a / WIDTH) * WIDTH + a % WIDTH : HEAD_DIM;
  }

  /// Every lane loads, whatever its tokens are: from the first block where there is none, and from
  /// another's place where it has none. With a condition, nvcc loads to other registers and copies
  /// them, and a copy waits for the load.
  PA_DEVICE void load(const pagedattn_params& p, const paged_gather& gather,
                      const run_blocks& blocks, int start, int round, int lane) {
    if (round >= ROUNDS) return;
    constexpr int EACH = smaller(TOKENS, RUN / PARTS);  // of the lane's tokens, in a run
#pragma unroll
    for (int from = 0; from < TOKENS; from += EACH) {
      const int whole = (round * TOKENS + from) * PARTS;  // its run is all parts'
      const int32_t block = blocks.of(whole / RUN);
      const int token = start + whole + smaller(part(lane), PARTS - 1);
      const int64_t step = block >= 0 ? PARTS * p.value_token_stride : 0;
      int64_t base = block >= 0 ? gather.value_token(p, block, token) : 0;
#pragma unroll
      for (int u = 0; u < EACH; ++u, base += step)
#pragma unroll
        for (int i = 0; i < SLOTS_PER_LANE; ++i)
          value[from + u][i].load(p.value_cache, base + smaller(slot(lane, i), SLOTS - 1) * WIDTH *
                                                            p.value_dim_stride);
    }
  }

  template <int ROWS>
  PA_DEVICE void add(float (&acc)[ROWS][ACCUMULATORS], const float (&own)[ROWS],
                     const paged_gather& gather, int start, int round, int lane) {
    const int token = start + round * TOKENS * PARTS + part(lane);
    if (!gather.needs(token) || !gather.needs(token + (TOKENS - 1) * PARTS)) {
#pragma unroll
      for (int u = 0; u < TOKENS; ++u)
#pragma unroll
        for (int i = 0; i < SLOTS_PER_LANE; ++i)  // 0 times what lies there may be NaN
          if (!gather.needs(token + u * PARTS)) value[u][i].clear();
    }
#pragma unroll
    for (int u = 0; u < TOKENS; ++u) {
      float weights[ROWS];
      weights_of(weights, own, (round * TOKENS + u) * PARTS + part(lane));
#pragma unroll
      for (int a = 0; a < ACCUMULATORS; ++a) {
        const float element = value[u][a / WIDTH].get(a % WIDTH);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) acc[r][a] += weights[r] * element;
      }
    }
  }
};

/// Values whose tokens are dense (packed): a lane loads WIDTH tokens of one element.
template <int WIDTH>
struct values_by_token {
  static_assert(BLOCK_SIZE % WIDTH == 0, "a load must stay in its block");
  static constexpr int VECTORS = LOGICAL_WARP / WIDTH;
  static constexpr int PARTS =
      power_of_two_below(smaller(VECTORS, LOGICAL_WARP * 8 / HEAD_DIM));
  static constexpr int STEP = LOGICAL_WARP / PARTS;
  static constexpr int ACCUMULATORS = ceil_div(HEAD_DIM, STEP);
  static constexpr int ROUNDS = VECTORS / PARTS;

  stored_vector<KV_TYPE, WIDTH> value[ACCUMULATORS];

  static PA_DEVICE int part(int lane) { return lane % PARTS; }
  static PA_DEVICE int dim_of(int lane, int a) { return lane / PARTS + a * STEP; }

  PA_DEVICE void load(const pagedattn_params& p, const paged_gather& gather,
                      const run_blocks& blocks, int start, int round, int lane) {
    const int t = (round * PARTS + part(lane)) * WIDTH;
    const int32_t block = blocks.of(t / RUN);
    const int64_t base = gather.value_token(p, block, start + t);
    if (HEAD_DIM % STEP == 0 && block >= 0 && round < ROUNDS) {  // nearly always: no masks
#pragma unroll
      for (int a = 0; a < ACCUMULATORS; ++a)
        value[a].load(p.value_cache, base + dim_of(lane, a) * p.value_dim_stride);
      return;
    }
#pragma unroll
    for (int a = 0; a < ACCUMULATORS; ++a) {
      const int dim = dim_of(lane, a);
      value[a].clear();
      if (block >= 0 && dim < HEAD_DIM && round < ROUNDS)
        value[a].load(p.value_cache, base + dim * p.value_dim_stride);
    }
  }

  template <int ROWS>
  PA_DEVICE void add(float (&acc)[ROWS][ACCUMULATORS], const float (&own)[ROWS],
                     const paged_gather& gather, int start, int round, int lane) {
    const int t = (round * PARTS + part(lane)) * WIDTH;
    if (!gather.needs(start + t) || !gather.needs(start + t + WIDTH - 1)) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {  // 0 times what lies there may be NaN
        const bool needed = gather.needs(start + t + j);
#pragma unroll
        for (int a = 0; a < ACCUMULATORS; ++a) value[a].keep(j, needed);
      }
    }
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      float weights[ROWS];
      weights_of(weights, own, t + j);
#pragma unroll
      for (int a = 0; a < ACCUMULATORS; ++a) {
        const float element = value[a].get(j);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) acc[r][a] += weights[r] * element;
      }
    }
  }
};

}  // namespace pagedattn
