// Phase 2: a block per (query token, head) merges the partitions' states and writes the result.
#pragma once

#include "portable_decode.cuh"

namespace pagedattn {

struct merge_storage {
  block_reduce_storage reduce;
  float factor[THREADS];
};

constexpr int DIMS_PER_THREAD = ceil_div(HEAD_DIM, THREADS);

/// One row's result: zeros and -inf where it saw no key, with the sink where there is one.
PA_DEVICE void write_row(const pagedattn_params& p, int token, int head, attention_partial state,
                         const float (&acc)[DIMS_PER_THREAD]) {
  const bool empty = state.sum == 0.0f;
  float factor = 1.0f;
  if (p.sinks && !empty) {
    const combined with_sink = combine(state, {p.sinks[head] * LOG2E, 1.0f});
    state = with_sink.state;
    factor = with_sink.left;
  }
  factor *= scale_of(p.v_scale_value, p.v_scale, p.v_scale_count, head / GROUP);
  const int64_t row = token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
  for (int i = 0; i < DIMS_PER_THREAD; ++i) {
    const int d = threadIdx.x + i * THREADS;
    if (d < HEAD_DIM) store_output(p.out, row + d, empty ? 0.0f : acc[i] / state.sum * factor);
  }
  if (p.lse && threadIdx.x == 0) {
    const float lse = empty ? minus_infinity() : (state.max_score + log2f(state.sum)) * LN2;
    p.lse[static_cast<int64_t>(token) * p.num_heads + head] = lse;
  }
}

__global__ void __launch_bounds__(THREADS) merge_kernel(pagedattn_params p) {
  __shared__ merge_storage shared;
  static_assert(sizeof(shared) <= SHARED_LIMIT, "more shared memory than every device has");
  const int token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  const int sequence = sequence_of(p, token);
  attention_partial state = identity();
  float acc[DIMS_PER_THREAD] = {};
  int active = 0, shift = 0;
  if (sequence >= 0) {
    const sequence_span span = span_of(p, sequence);
    if (span.elsewhere) return;  // the whole block
    shift = workspace_shift(p, span, sequence);
    if (span.refused) state = poison();
    else active = span.active;
  }

  const partial_store store(p);
  for (int from = 0; from < active; from += THREADS) {
    const int split = from + threadIdx.x;
    attention_partial mine = identity();
    if (split < active) mine = store.states[store.place(split, token + shift, head)];
    const float top =
        fmaxf(block_max(mine.max_score, shared.reduce), state.max_score);
    shared.factor[threadIdx.x] = weight_of(mine.max_score, top);
    // the sum's barriers let every factor be seen, and the last round's be read
    const float sum =
        block_sum(mine.sum * shared.factor[threadIdx.x], shared.reduce);
    const combined merged = combine(state, {top, sum});
    state = merged.state;
#pragma unroll
    for (int i = 0; i < DIMS_PER_THREAD; ++i) acc[i] *= merged.left;
    const int count = min(active - from, THREADS);
    for (int s = 0; s < count; ++s) {
      const float* values = store.values + store.place(from + s, token + shift, head) * HEAD_DIM;
      const float factor = shared.factor[s];
#pragma unroll
      for (int i = 0; i < DIMS_PER_THREAD; ++i) {
        const int d = threadIdx.x + i * THREADS;
        if (d < HEAD_DIM) acc[i] += factor * values[d];
      }
    }
  }
  write_row(p, token, head, state, acc);
}

}  // namespace pagedattn
