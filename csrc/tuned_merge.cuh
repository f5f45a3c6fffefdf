// Phase 2 after the tuned kernel: a block per (query token, head, part of the dimensions).
//
// It may start while phase 1 still runs, learns its work from the lengths, and waits. Then a row's
// first partitions are asked for together with all the states.
#pragma once

#include "tuned_decode.cuh"

namespace pagedattn {

/// How a block's threads share the work: DIMS dimensions of the row, four of a lane, and WARPS of
/// them over the partitions.
template <int DIMS_, int WARPS_, int AHEAD_, int STATES_>
struct merge_shape {
  static constexpr int DIMS = DIMS_, WARPS = WARPS_;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int LANES = DIMS / 4;         // that share a partition
  static constexpr int SLOTS = THREADS / LANES;  // partitions side by side
  static constexpr int AHEAD = AHEAD_;           // partitions that a lane asks for at once
  static constexpr int STATES = STATES_;         // and their states; more do not fit beside them
  static constexpr int BLOCKS = ceil_div(HEAD_DIM, DIMS);  // of a row
};
// where few partitions meet: so small that those of some hundred rows fit beside phase 1, and none
// has to wait for its end to start
using light_merge = merge_shape<128, 4, 2, 1>;
using wide_merge = merge_shape<128, 16, 6, 3>;
// where there are too few rows to occupy the device: more and smaller blocks
using narrow_merge = merge_shape<32, 8, 4, 3>;
constexpr int FEW_ROWS = 16;

/// What all partitions' states amount to. Every warp does it for itself: no barrier is needed.
template <int STATES>
PA_DEVICE attention_partial combine_states(const attention_partial* states, int active, int lane) {
  attention_partial all = identity();
  for (int from = lane; from < active; from += 32 * STATES) {
    attention_partial some[STATES];
#pragma unroll
    for (int i = 0; i < STATES; ++i) {
      const int split = from + i * 32;
      some[i] = split < active ? states[split] : identity();
    }
#pragma unroll
    for (int i = 0; i < STATES; ++i) all = combine(all, some[i]).state;
  }
  const float top = group_max<32>(all.max_score);
  return {top, group_sum<32>(all.sum * weight_of(all.max_score, top))};
}

/// A row's partitions from `from` on, every SLOTS-th: their values and maxima.
template <class Shape>
struct partitions_ahead {
  float4 values[Shape::AHEAD];
  float top[Shape::AHEAD];

  PA_DEVICE void load(const attention_partial* states, const float* row_values, int from,
                      int active) {
#pragma unroll
    for (int i = 0; i < Shape::AHEAD; ++i) {
      const int split = from + i * Shape::SLOTS;
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), top[i] = minus_infinity();
      if (split >= active) continue;
      values[i] = *reinterpret_cast<const float4*>(row_values + int64_t{split} * HEAD_DIM);
      top[i] = states[split].max_score;
    }
  }

  PA_DEVICE void add_to(float (&sum)[4], float reference) const {
#pragma unroll
    for (int i = 0; i < Shape::AHEAD; ++i)
      add_scaled(sum, weight_of(top[i], reference), values[i]);
  }
};

// of two blocks a multiprocessor at least, so that one fits beside a block of phase 1
template <class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 2) tuned_merge_kernel(pagedattn_params p) {
  __shared__ float4 sums[Shape::WARPS][Shape::LANES];
  const int part = blockIdx.x % Shape::BLOCKS, place = blockIdx.x / Shape::BLOCKS;
  const query_row row(place / p.num_heads, place % p.num_heads, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot = threadIdx.x / Shape::LANES;
  const int dim = part * Shape::DIMS + lane % Shape::LANES * 4;
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
  const float* const values = store.values + first * HEAD_DIM + (has_dims ? dim : 0);

  wait_for_primary();
  constexpr int TURN = Shape::AHEAD * Shape::SLOTS;
  partitions_ahead<Shape> some;
  some.load(states, values, slot, active);
  attention_partial state = combine_states<Shape::STATES>(states, active, lane);
  if (refused) state = poison();
  float sum[4] = {};
  some.add_to(sum, state.max_score);
  for (int from = slot + TURN; from < active; from += TURN) {
    some.load(states, values, from, active);
    some.add_to(sum, state.max_score);
  }
#pragma unroll
  for (int offset = Shape::LANES; offset < 32; offset *= 2)  // over the slots of a warp
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[k] += __shfl_xor_sync(PA_ALL_LANES, sum[k], offset);
  if (lane < Shape::LANES) sums[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  if (threadIdx.x >= Shape::LANES || !has_dims) return;
#pragma unroll
  for (int w = 1; w < Shape::WARPS; ++w) add_scaled(sum, 1.0f, sums[w][lane]);
  const float factor = finish_row(p, row, row.head / GROUP, state, part == 0 && lane == 0);
  store_four(p, row, dim, sum, factor);
}

/// In place of a merge where phase 1 wrote the results itself, a block per query token: the rows
/// that it does not know of. Those are tokens of no sequence, whose results are zeros, and of
/// sequences that have more than the call allows.
constexpr int REST_THREADS = 128;
__global__ void __launch_bounds__(REST_THREADS) tuned_rest_kernel(pagedattn_params p) {
  constexpr int PIECES = HEAD_DIM / 4;  // of a row
  const int token = blockIdx.x;
  const int sequence = sequence_of(p, token);
  const bool refused = sequence >= 0 && span_of(p, sequence).refused;
  if (sequence < 0 || refused)
    for (int i = threadIdx.x; i < p.num_heads * PIECES; i += REST_THREADS) {
      const query_row row(token, i / PIECES, 0);
      const float nothing[4] = {};
      const float factor = finish_row(p, row, row.head / GROUP, refused ? poison() : identity(),
                                      i % PIECES == 0);
      store_four(p, row, i % PIECES * 4, nothing, factor);
    }
  wait_for_primary();  // the launch must not seem over before phase 1 is
}

}  // namespace pagedattn
