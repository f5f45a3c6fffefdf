// Phase 2 after the tuned kernel: a block per (query token, head, part of the dimensions).
//
// It may start while phase 1 still runs, learns its work from the lengths, and waits. Then a row's
// first partitions are asked for together with all the states.
#pragma once

#include "tuned_decode.cuh"

namespace pagedattn {

constexpr int MERGE_WARPS = 16;  // a partition's values are a warp's
constexpr int MERGE_THREADS = MERGE_WARPS * 32;
constexpr int MERGE_DIMS = 128;  // four of a lane
constexpr int MERGE_PARTS = ceil_div(HEAD_DIM, MERGE_DIMS);
constexpr int MERGE_AHEAD = 6;     // partitions that a warp asks for at once
constexpr int MERGE_STATES = 3;    // states that a lane does; more do not fit beside the values

/// What all partitions' states amount to. Every warp does it for itself: no barrier is needed.
PA_DEVICE attention_partial combine_states(const attention_partial* states, int64_t apart,
                                           int active, int lane) {
  attention_partial all = identity();
  for (int from = lane; from < active; from += 32 * MERGE_STATES) {
    attention_partial some[MERGE_STATES];
#pragma unroll
    for (int i = 0; i < MERGE_STATES; ++i) {
      const int split = from + i * 32;
      some[i] = split < active ? states[split * apart] : identity();
    }
#pragma unroll
    for (int i = 0; i < MERGE_STATES; ++i) all = combine(all, some[i]).state;
  }
  const float top = group_max<32>(all.max_score);
  return {top, group_sum<32>(all.sum * weight_of(all.max_score, top))};
}

/// A row's partitions from `from` on, every MERGE_WARPS-th: their values and maxima.
struct partitions_ahead {
  float4 values[MERGE_AHEAD];
  float top[MERGE_AHEAD];

  PA_DEVICE void load(const attention_partial* states, const float* row_values, int64_t apart,
                      int from, int active) {
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; ++i) {
      const int split = from + i * MERGE_WARPS;
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), top[i] = minus_infinity();
      if (split >= active) continue;
      values[i] = *reinterpret_cast<const float4*>(row_values + split * apart * HEAD_DIM);
      top[i] = states[split * apart].max_score;
    }
  }

  PA_DEVICE void add_to(float (&sum)[4], float reference) const {
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; ++i) add_scaled(sum, weight_of(top[i], reference), values[i]);
  }
};

// of two blocks a multiprocessor, so that one fits beside a block of phase 1
__global__ void __launch_bounds__(MERGE_THREADS, 2) tuned_merge_kernel(pagedattn_params p) {
  __shared__ float4 sums[MERGE_WARPS][32];
  const int part = blockIdx.x % MERGE_PARTS, place = blockIdx.x / MERGE_PARTS;
  const query_row row(place / p.num_heads, place % p.num_heads, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = part * MERGE_DIMS + lane * 4;
  const int sequence = sequence_of(p, row.token);
  bool refused = false;
  int active = 0, shift = 0;
  if (sequence >= 0) {
    const sequence_span span = span_of(p, sequence);
    if (span.elsewhere) {  // the whole block; the launch must not seem over before phase 1 is
      wait_for_primary();
      return;
    }
    shift = workspace_shift(p, span, sequence);
    refused = span.refused;
    active = span.active;
  }
  const partial_store store(p);
  const int64_t first = store.place(0, row.token + shift, row.head);
  const attention_partial* const states = store.states + first;
  const bool has_dims = dim < HEAD_DIM;
  const float* const values =
      store.values + first * HEAD_DIM + (has_dims ? dim : 0);
  const int64_t apart = store.num_tokens * p.num_heads;

  wait_for_primary();
  constexpr int TURN = MERGE_AHEAD * MERGE_WARPS;
  partitions_ahead some;
  some.load(states, values, apart, warp, active);
  attention_partial state = combine_states(states, apart, active, lane);
  if (refused) state = poison();
  float sum[4] = {};
  some.add_to(sum, state.max_score);
  for (int from = warp + TURN; from < active; from += TURN) {
    some.load(states, values, apart, from, active);
    some.add_to(sum, state.max_score);
  }
  sums[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  if (warp != 0 || !has_dims) return;
#pragma unroll
  for (int w = 1; w < MERGE_WARPS; ++w) add_scaled(sum, 1.0f, sums[w][lane]);
  const float factor = finish_row(p, row, row.head / GROUP, state, part == 0 && lane == 0);
  store_four(p, row, dim, sum, factor);
}

}  // namespace pagedattn
