// Phase 2: a block per (query token, head, part of the dimensions) merges the partitions' states
// and writes the result.
#pragma once

#include "portable_decode.cuh"

namespace pagedattn {

constexpr int ROW_DIMS = 64;                    // of a block
constexpr int ROW_SLOTS = ROW_DIMS / 4;         // threads that share a partition's values
constexpr int ROW_TEAMS = THREADS / ROW_SLOTS;  // partitions
constexpr int ROW_PARTS = ceil_div(HEAD_DIM, ROW_DIMS);

struct merge_storage {
  block_reduce_storage reduce;
  float factor[THREADS];
  alignas(16) float sums[ROW_TEAMS][ROW_DIMS];
};

/// A part of one row's result: zeros and -inf where it saw no key, with the sink where there is
/// one.
PA_DEVICE void write_row(const pagedattn_params& p, int token, int head, int part,
                         attention_partial state, const float (&sums)[ROW_TEAMS][ROW_DIMS]) {
  const bool empty = state.sum == 0.0f;
  float factor = 1.0f;
  if (p.sinks && !empty) {
    const combined with_sink = combine(state, {p.sinks[head] * LOG2E, 1.0f});
    state = with_sink.state;
    factor = with_sink.left;
  }
  factor *= scale_of(p.v_scale_value, p.v_scale, p.v_scale_count, head / GROUP);
  const int dim = part * ROW_DIMS + threadIdx.x;
  if (threadIdx.x < ROW_DIMS && dim < HEAD_DIM) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_TEAMS; ++i) sum += sums[i][threadIdx.x];
    store_output(p.out, token * p.out_token_stride + head * p.out_head_stride + dim,
                 empty ? 0.0f : sum / state.sum * factor);
  }
  if (p.lse && part == 0 && threadIdx.x == 0) {
    const float lse = empty ? minus_infinity() : (state.max_score + log2f(state.sum)) * LN2;
    p.lse[static_cast<int64_t>(token) * p.num_heads + head] = lse;
  }
}

__global__ void __launch_bounds__(THREADS) merge_kernel(pagedattn_params p) {
  __shared__ merge_storage shared;
  static_assert(sizeof(shared) <= SHARED_LIMIT, "more shared memory than every device has");
  const int part = blockIdx.x % ROW_PARTS, row = blockIdx.x / ROW_PARTS;
  const int token = row / p.num_heads, head = row % p.num_heads;
  const int slot = threadIdx.x % ROW_SLOTS, team = threadIdx.x / ROW_SLOTS;
  const int dim = part * ROW_DIMS + slot * 4;
  const int sequence = sequence_of(p, token);
  attention_partial state = identity();
  int active = 0, shift = 0;
  if (sequence >= 0) {
    const sequence_span span = span_of(p, sequence);
    if (span.elsewhere) return;  // the whole block
    shift = workspace_shift(p, span, sequence);
    if (span.refused) state = poison();
    else active = span.active;
  }

  const partial_store store(p);
  float acc[4] = {};
  for (int from = 0; from < active; from += THREADS) {
    const int split = from + threadIdx.x;
    attention_partial mine = identity();
    if (split < active) mine = store.states[store.place(split, token + shift, head)];
    const float top = fmaxf(block_max(mine.max_score, shared.reduce), state.max_score);
    shared.factor[threadIdx.x] = weight_of(mine.max_score, top);
    // the sum's barriers let every factor be seen, and the last round's be read
    const float sum = block_sum(mine.sum * shared.factor[threadIdx.x], shared.reduce);
    const combined merged = combine(state, {top, sum});
    state = merged.state;
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] *= merged.left;
    const int count = dim < HEAD_DIM ? min(active - from, THREADS) : 0;
#pragma unroll 8
    for (int s = team; s < count; s += ROW_TEAMS) {
      float values[4];
      const int64_t place = store.place(from + s, token + shift, head);
      load_floats(values, store.values + place * HEAD_DIM + dim);
      const float factor = shared.factor[s];
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] += factor * values[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) shared.sums[team][slot * 4 + i] = acc[i];
  __syncthreads();
  write_row(p, token, head, part, state, shared.sums);
}

}  // namespace pagedattn
