// Phase 1: a block per (sequence, KV head, tile of query rows, partition of the keys).
//
// A row is a (query token, head of the group); up to 8 share a block, so that keys and values are
// read once for them. Each logical warp of the block takes 32 tokens at a time and keeps a state of
// its own, without barriers; at the end they are merged and the row's state (attention_partial,
// weighted V) goes to the workspace.
#pragma once

#include "block_reduce.cuh"
#include "weighted_values.cuh"

namespace pagedattn {

constexpr int MAX_ROWS = 8;

/// The workspace: weighted Vs [token][head][split][HEAD_DIM], then states [token][head][split], so
/// that what a row's merge reads lies together. Where only short sequences are served, it has room
/// for these alone: `workspace_shift` leads from a token of the call to one of the workspace.
struct partial_store {
  float* values;
  attention_partial* states;
  int64_t num_tokens;
  int num_heads, num_splits;

  PA_DEVICE explicit partial_store(const pagedattn_params& p)
      : values(p.workspace),
        num_tokens(p.skip_longer ? static_cast<int64_t>(p.num_seqs) * p.max_query_len
                                 : p.num_tokens),
        num_heads(p.num_heads), num_splits(p.num_splits) {
    states = reinterpret_cast<attention_partial*>(
        values + p.num_splits * num_tokens * num_heads * HEAD_DIM);
  }
  PA_DEVICE int64_t place(int split, int token, int head) const {
    return (token * static_cast<int64_t>(num_heads) + head) * num_splits + split;
  }
};

/// Which part of the work is this block's, by its index: KV head fastest, then tile of rows,
/// partition, sequence.
struct block_work {
  int kv_head, row_tile, split, sequence;

  template <int ROWS>
  static PA_DEVICE block_work of(const pagedattn_params& p) {
    const int tiles = ceil_div(p.max_query_len * GROUP, ROWS);
    int index = blockIdx.x;
    block_work w;
    w.kv_head = index % p.num_kv_heads, index /= p.num_kv_heads;
    w.row_tile = index % tiles, index /= tiles;
    w.split = index % p.num_splits;
    w.sequence = index / p.num_splits;
    return w;
  }
};

/// A row of the tile: its query token and head; `token` is -1 where there is none.
struct query_row {
  int token, head, position;

  PA_DEVICE query_row(int token, int head, int position)
      : token(token), head(head), position(position) {}
  PA_DEVICE query_row(const pagedattn_params& p, const sequence_span& span, int kv_head, int row) {
    const int within = row / GROUP;
    token = span.first_token + within;
    if (within >= span.query_len || token < 0 || token >= p.num_tokens) token = -1;
    head = kv_head * GROUP + row % GROUP;
    position = token < 0 ? -1 : span.length - span.query_len + within;
  }
};

template <int ROWS, class Values>
struct decode_storage {
  static constexpr int PARTS = LOGICAL_WARPS * Values::PARTS;
  alignas(16) float query[ROWS][HEAD_DIM];
  float parts[PARTS][HEAD_DIM];
  // each thread's own: the sum is of its tokens alone until the end
  attention_partial state[ROWS][THREADS];
  row_scoring scoring[ROWS];
  int64_t place[ROWS];  // in the workspace; negative: there is no such row
  paged_gather gather;
  int stop;  // where the partition ends
  int bad;
};

/// The scaling of a KV head by a number times, perhaps, a tensor of one or of all heads.
PA_DEVICE float scale_of(float value, const float* tensor, int count, int kv_head) {
  return count == 0 ? value : value * tensor[count == 1 ? 0 : kv_head];
}

template <int ROWS>
PA_DEVICE void load_queries(float (&query)[ROWS][HEAD_DIM], const pagedattn_params& p,
                            const sequence_span& span, const block_work& work) {
  constexpr unsigned COUNT = ROWS * HEAD_DIM, EACH = (COUNT + THREADS - 1) / THREADS;
  stored_vector<QUERY_TYPE, 1> element[EACH];  // all of them are asked for before one is needed
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned i = threadIdx.x + k * THREADS;
    const query_row row(p, span, work.kv_head, work.row_tile * ROWS + i / HEAD_DIM);
    element[k].clear();
    if (i < COUNT && row.token >= 0)
      element[k].load(p.query, row.token * p.query_token_stride +
                                   row.head * p.query_head_stride + i % HEAD_DIM);
  }
#pragma unroll
  for (unsigned k = 0; k < EACH; ++k) {
    const unsigned i = threadIdx.x + k * THREADS;
    if (i < COUNT) query[i / HEAD_DIM][i % HEAD_DIM] = element[k].get(0);
  }
}

PA_DEVICE row_scoring scoring_of(const pagedattn_params& p, const query_row& row, float scale) {
  row_scoring s;
  s.scale = scale;
  s.softcap = p.softcap;
  s.slope = row.token >= 0 && p.alibi_slopes ? p.alibi_slopes[row.head] : 0.0f;
  s.position = row.position;
  s.first_key = p.window > 0 ? row.position - p.window + 1 : 0;
  return s;
}

/// The products of this lane's token become weights, and what was found before is rescaled.
template <int ROWS, class Values>
PA_DEVICE void weigh(float (&product)[ROWS], float (&acc)[ROWS][Values::ACCUMULATORS],
                     decode_storage<ROWS, Values>& shared, int token, bool needed) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    attention_partial& state = shared.state[r][threadIdx.x];
    const float score = needed ? shared.scoring[r](product[r], token) : minus_infinity();
    const float last = state.max_score;
    const float top = fmaxf(group_max<LOGICAL_WARP>(score), last);
    const float factor = weight_of(last, top);
    product[r] = weight_of(score, top);
    state = {top, state.sum * factor + product[r]};
#pragma unroll
    for (int a = 0; a < Values::ACCUMULATORS; ++a) acc[r][a] *= factor;
  }
}

/// A row's state over the whole block.
template <int ROWS>
PA_DEVICE attention_partial block_state(const attention_partial (&state)[ROWS][THREADS], int row) {
  attention_partial all = state[row][0];
#pragma unroll
  for (int w = 1; w < LOGICAL_WARPS; ++w) all = combine(all, state[row][w * LOGICAL_WARP]).state;
  return all;
}

/// Merge what the logical warps found, row by row, and store it.
template <int ROWS, class Values>
PA_DEVICE void store_partial(const float (&acc)[ROWS][Values::ACCUMULATORS],
                             decode_storage<ROWS, Values>& shared, const pagedattn_params& p) {
  const int warp = threadIdx.x / LOGICAL_WARP, lane = threadIdx.x % LOGICAL_WARP;
  const partial_store store(p);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float& sum = shared.state[r][threadIdx.x].sum;
    sum = group_sum<LOGICAL_WARP>(sum);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    __syncthreads();  // the states are there, and the last row's parts have been read
    const attention_partial all = block_state(shared.state, r);
    const float factor = weight_of(shared.state[r][threadIdx.x].max_score, all.max_score);
#pragma unroll
    for (int a = 0; a < Values::ACCUMULATORS; ++a) {
      const int d = Values::dim_of(lane, a);
      if (d < HEAD_DIM)
        shared.parts[warp * Values::PARTS + Values::part(lane)][d] = acc[r][a] * factor;
    }
    __syncthreads();
    const int64_t place = shared.place[r];
    if (place < 0) continue;  // the same for the whole block
    if (threadIdx.x == 0) store.states[place] = shared.bad ? poison() : all;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < shared.PARTS; ++part) sum += shared.parts[part][d];
      store.values[place * HEAD_DIM + d] = sum;
    }
  }
}

// How many warps a multiprocessor should hold, which bounds the registers: as many as fit without
// spills. Elsewhere than on NVIDIA's the register file is not known.
constexpr int RESIDENT_WARPS = 12;
#ifdef __ILUVATAR__
#define PA_DECODE_BOUNDS __launch_bounds__(THREADS)
#else
#define PA_DECODE_BOUNDS                                                                       \
  __launch_bounds__(THREADS, (ROWS * Values::ACCUMULATORS > 48 || KV_TYPE == PA_E4M3 ? 8       \
                              : RESIDENT_WARPS) / LOGICAL_WARPS)
#endif

template <int ROWS, int KEY_WIDTH, class Values>
__global__ void PA_DECODE_BOUNDS decode_kernel(pagedattn_params p) {
  using Keys = key_batch<KEY_WIDTH>;
  __shared__ decode_storage<ROWS, Values> shared;
  static_assert(sizeof(shared) <= SHARED_LIMIT, "more shared memory than every device has");

  const block_work work = block_work::of<ROWS>(p);
  const sequence_span span = span_of(p, work.sequence);
  // the whole block leaves or stays
  if (work.split >= span.active) return;
  if (work.row_tile * ROWS >= static_cast<int64_t>(span.query_len) * GROUP) return;
  const paged_gather own = {work.sequence, work.kv_head, span.first, max(span.first, span.end)};
  const int warp = threadIdx.x / LOGICAL_WARP, lane = threadIdx.x % LOGICAL_WARP;
  const int first = span.tile_start + work.split * span.share;
  const int stop = span.share < span.end - first ? first + span.share : span.end;
  int start = first + warp * LOGICAL_WARP;  // of the logical warp's tokens

  run_blocks blocks(p, own, start, stop, lane);
  load_queries(shared.query, p, span, work);
  if (threadIdx.x == 0) {
    // values are read from the first block where they are in none, so there must be a block
    shared.bad = p.num_blocks == 0 && first < stop;
    shared.gather = own, shared.stop = p.num_blocks == 0 ? first : stop;
  }
  if (threadIdx.x < ROWS) {
    const query_row row(p, span, work.kv_head, work.row_tile * ROWS + threadIdx.x);
    const float k_scale = scale_of(p.k_scale_value, p.k_scale, p.k_scale_count, work.kv_head);
    shared.scoring[threadIdx.x] = scoring_of(p, row, p.scale * k_scale);
    const int token = row.token + workspace_shift(p, span, work.sequence);
    shared.place[threadIdx.x] =
        row.token < 0 ? -1 : partial_store(p).place(work.split, token, row.head);
  }
  __syncthreads();

  const paged_gather& gather = shared.gather;  // there, to save registers
  float acc[ROWS][Values::ACCUMULATORS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) shared.state[r][threadIdx.x] = identity();
  // There are two batches of keys, so that one is under way while the other is used. A load that
  // is not needed is masked, since a branch would keep the compiler from moving it up.
  Keys key, key_after;
  key.load(p, key_places(p, gather, blocks, start, lane), 0, lane);
  // logical warps go on independently, but equally often: a hardware warp may hold two
  for (; start - warp * LOGICAL_WARP < shared.stop; start += TILE) {
    if (blocks.own == BAD_BLOCK) shared.bad = 1;  // whoever writes, writes the same
    // asked for one tile ahead, so that the keys need not wait for the table; what lies beyond
    // this partition is checked by the next, and a bad id there must not be told twice
    const run_blocks next(p, gather, start + TILE, shared.stop, lane);
    const key_places places(p, gather, blocks, start, lane);
    float dot[RUNS][ROWS] = {};
#pragma unroll 1
    for (int step = 0; step < Keys::STEPS; step += 2) {
      key_after.load(p, places, step + 1, lane);
      key.add_products(dot, shared.query, step, lane);
      key.load(p, places, step + 2, lane);
      key_after.add_products(dot, shared.query, step + 1, lane);
    }

    Values value;
    value.load(p, gather, blocks, start, 0, lane);  // the weights do not bear on where they are
    float weight[ROWS];
    sum_products(weight, dot, lane);
    const int token = start + token_of_lane(lane);
    weigh(weight, acc, shared, token, gather.needs(token));
    key.load(p, key_places(p, gather, next, start + TILE, lane), 0, lane);
#pragma unroll 1
    for (int round = 0; round < Values::ROUNDS; ++round) {
      value.add(acc, weight, gather, start, round, lane);
      value.load(p, gather, blocks, start, round + 1, lane);
    }
    blocks = next;
  }
  store_partial(acc, shared, p);
}

}  // namespace pagedattn
