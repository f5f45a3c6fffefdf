// Scores of a logical warp's 32 tokens: dot products of the rows' queries with their keys, and what
// is done to them.
//
// Four lanes share a key. A lane takes part in one token of each of four runs of 8, so that an
// element of the query, once read from shared memory, meets four keys.
#pragma once

#include "attention_partial.cuh"
#include "logical_warp.cuh"
#include "paged_gather.cuh"

namespace pagedattn {

constexpr int KEY_LANES = 4;
static_assert(RUN == 8, "lane_of_token shifts by its logarithm");
static_assert(KEY_LANES == RUNS, "each of a key's lanes ends with the token of one run");

/// The token of the logical warp's 32 whose scores a lane ends with.
PA_DEVICE int token_of_lane(int lane) { return lane / KEY_LANES + lane % KEY_LANES * RUN; }
/// By bits, as nvcc 13.0 compiled `token % RUN * KEY_LANES + token / RUN` on ints wrongly: in a
/// loop that it kept it left the division out where the token was odd.
PA_DEVICE unsigned lane_of_token(unsigned token) {
  return (token & (RUN - 1)) * KEY_LANES + ((token >> 3) & (RUNS - 1));
}

/// Where a lane's keys begin.
struct key_places {
  int64_t base[RUNS];
  bool read[RUNS];

  PA_DEVICE key_places(const pagedattn_params& p, const paged_gather& gather,
                       const run_blocks& blocks, int start, int lane) {
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
      const int32_t block = blocks.of(i);
      const int token = start + i * RUN + lane / KEY_LANES;
      read[i] = block >= 0 && gather.needs(token);
      base[i] = gather.key_token(p, block, token);
    }
  }
};

/// A lane's share of its four keys in one step: WIDTH elements of each.
template <int WIDTH>
struct key_batch {
  static constexpr int VECTORS = HEAD_DIM / WIDTH;
  static constexpr int STEPS = ceil_div(VECTORS, KEY_LANES);
  static constexpr bool EVEN = VECTORS % (2 * KEY_LANES) == 0;  // no step lacks a vector
  static constexpr int PART = smaller(WIDTH, 4);  // elements that are floats at a time
  stored_vector<KV_TYPE, WIDTH> key[RUNS];

  PA_DEVICE void load(const pagedattn_params& p, const key_places& places, int step, int lane) {
    const int v = step * KEY_LANES + lane % KEY_LANES;
    const int64_t element = key_element(p, v * WIDTH);
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
      key[i].clear();
      if (places.read[i] && v < VECTORS) key[i].load(p.key_cache, places.base[i] + element);
    }
  }

  template <int ROWS>
  PA_DEVICE void add_products(float (&dot)[RUNS][ROWS], const float (&query)[ROWS][HEAD_DIM],
                              int step, int lane) const {
    const int v = step * KEY_LANES + lane % KEY_LANES;
    if (!EVEN && v >= VECTORS) return;
#pragma unroll
    for (int first = 0; first < WIDTH; first += PART) {
      float element[RUNS][PART];
#pragma unroll
      for (int i = 0; i < RUNS; ++i)
#pragma unroll
        for (int e = 0; e < PART; ++e) element[i][e] = key[i].get(first + e);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float q[PART];
        load_floats(q, &query[r][v * WIDTH + first]);
#pragma unroll
        for (int e = 0; e < PART; ++e)
#pragma unroll
          for (int i = 0; i < RUNS; ++i) dot[i][r] += q[e] * element[i][e];
      }
    }
  }
};

/// Of two sums over this lane and the one `distance` away, the one that this lane keeps.
PA_DEVICE float sum_halves(float low, float high, bool keeps_high, int distance) {
  // by value: a choice between elements of an array would put the array into memory
  return (keeps_high ? high : low) + group_exchange<KEY_LANES>(keeps_high ? low : high, distance);
}

/// Add up a key's four lanes, each of which ends with the sums of another token.
template <int ROWS>
PA_DEVICE void sum_products(float (&product)[ROWS], const float (&dot)[RUNS][ROWS], int lane) {
  const bool upper = lane & 2, odd = lane & 1;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) pair[i] = sum_halves(dot[i][r], dot[2 + i][r], upper, 2);
    product[r] = sum_halves(pair[0], pair[1], odd, 1);
  }
}

/// How a row turns its products into scores.
struct row_scoring {
  float scale;    // of the product, k_scale included
  float softcap;  // 0: none
  float slope;    // of ALiBi
  int position;   // of the query token; negative: it sees nothing
  int first_key;  // the least that it sees

  /// In units of log2; -inf for a key that the row does not see.
  PA_DEVICE float operator()(float product, int key) const {
    if (key > position || key < first_key) return minus_infinity();
    float score = product * scale;
    if (softcap > 0.0f) score = softcap * tanhf(score / softcap);
    score += slope * static_cast<float>(key - position);
    return score * LOG2E;
  }
};

}  // namespace pagedattn
