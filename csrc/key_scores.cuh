// Scores of a tile: dot products of the rows' queries with its keys, then what is done to them.
#pragma once

#include "attention_partial.cuh"
#include "logical_warp.cuh"
#include "paged_gather.cuh"

namespace pagedattn {

constexpr int KEY_LANES = 4;  // threads that share a token's key
constexpr int KEYS_AT_ONCE = THREADS / KEY_LANES;
constexpr int KEYS_PER_THREAD = TILE / KEYS_AT_ONCE;

/// A thread's tokens in the tile.
PA_DEVICE int key_of_thread(int i) { return threadIdx.x / KEY_LANES + i * KEYS_AT_ONCE; }

/// Unscaled scores of the thread's tokens into `scores`; keys are loaded WIDTH elements at a time.
template <int ROWS, int WIDTH>
PA_DEVICE void key_scores(float (&scores)[ROWS][TILE], const float (&query)[ROWS][HEAD_DIM],
                          const int32_t (&block)[KEYS_PER_THREAD], const pagedattn_params& p,
                          const paged_gather& gather, int tile_start) {
  constexpr int VECTORS = HEAD_DIM / WIDTH;
  constexpr int AT_ONCE = 4;  // loads that overlap
  constexpr int PART = smaller(WIDTH, 8);  // elements that are floats at a time
  const int lane = threadIdx.x % KEY_LANES;
  float dot[KEYS_PER_THREAD][ROWS] = {};
  bool read[KEYS_PER_THREAD];
  int64_t base[KEYS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < KEYS_PER_THREAD; ++i) {
    const int token = tile_start + key_of_thread(i);
    read[i] = block[i] >= 0 && gather.needs(token);
    base[i] = read[i] ? gather.key_token(p, block[i], token) : 0;
  }
  for (int from = lane; from < VECTORS; from += KEY_LANES * AT_ONCE) {
    stored_vector<KV_TYPE, WIDTH> stored[AT_ONCE][KEYS_PER_THREAD];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int v = from + u * KEY_LANES;
      const int64_t element = key_element(p, v * WIDTH);
#pragma unroll
      for (int i = 0; i < KEYS_PER_THREAD; ++i) {
        if (v < VECTORS && read[i]) stored[u][i].load(p.key_cache, base[i] + element);
        else stored[u][i].clear();
      }
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int v = from + u * KEY_LANES;
      if (v >= VECTORS) continue;
#pragma unroll
      for (int first = 0; first < WIDTH; first += PART) {
        float key[KEYS_PER_THREAD][PART];
#pragma unroll
        for (int i = 0; i < KEYS_PER_THREAD; ++i)
#pragma unroll
          for (int e = 0; e < PART; ++e) key[i][e] = stored[u][i].get(first + e);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int e = 0; e < PART; ++e) {
            const float q = query[r][v * WIDTH + first + e];
#pragma unroll
            for (int i = 0; i < KEYS_PER_THREAD; ++i) dot[i][r] += q * key[i][e];
          }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < KEYS_PER_THREAD; ++i)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float sum = group_sum<KEY_LANES>(dot[i][r]);
      if (lane == 0) scores[r][key_of_thread(i)] = sum;
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
