// Phase 1: a block per (sequence, KV head, tile of query rows, partition of the keys).
//
// A row is a (query token, head of the group); up to 8 share a block, so that keys and values are
// read once for them. The row's state (attention_partial, weighted V) goes to the workspace.
#pragma once

#include "block_reduce.cuh"
#include "key_scores.cuh"
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
      : values(p.workspace), num_tokens(p.skip_longer ? static_cast<int64_t>(p.num_seqs) * p.max_query_len
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
  alignas(16) float query[ROWS][HEAD_DIM];
  // two of each: the next tile's are written while some threads still read the last one's
  float scores[2][ROWS][TILE];
  weighted_tile<ROWS> tile[2];
  token_weights<ROWS> rescale[2];
  float parts[Values::PARTS][HEAD_DIM];
  int bad;
};

/// The scaling of a KV head by a number times, perhaps, a tensor of one or of all heads.
PA_DEVICE float scale_of(float value, const float* tensor, int count, int kv_head) {
  return count == 0 ? value : value * tensor[count == 1 ? 0 : kv_head];
}

template <int ROWS>
PA_DEVICE void load_queries(float (&query)[ROWS][HEAD_DIM], const pagedattn_params& p,
                            const sequence_span& span, const block_work& work) {
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
    const query_row row(p, span, work.kv_head, work.row_tile * ROWS + i / HEAD_DIM);
    stored_vector<QUERY_TYPE, 1> q;
    q.clear();
    if (row.token >= 0)
      q.load(p.query, row.token * p.query_token_stride + row.head * p.query_head_stride +
                          i % HEAD_DIM);
    query[i / HEAD_DIM][i % HEAD_DIM] = q.get(0);
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

/// Sum each accumulator over the threads that share its element, and store it.
template <int ROWS, class Values>
PA_DEVICE void store_values(const float (&acc)[ROWS][Values::ACCUMULATORS],
                            decode_storage<ROWS, Values>& shared, const pagedattn_params& p,
                            const sequence_span& span, const block_work& work) {
  const partial_store store(p);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    __syncthreads();  // the last row's parts have been read
#pragma unroll
    for (int a = 0; a < Values::ACCUMULATORS; ++a)
      if (Values::dim_of(a) < HEAD_DIM) shared.parts[Values::part()][Values::dim_of(a)] = acc[r][a];
    __syncthreads();
    const query_row row(p, span, work.kv_head, work.row_tile * ROWS + r);
    if (row.token < 0) continue;  // the same for the whole block
    const int place = row.token + workspace_shift(p, span, work.sequence);
    float* values = store.values + store.place(work.split, place, row.head) * HEAD_DIM;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
      float sum = 0.0f;
      for (int part = 0; part < Values::PARTS; ++part) sum += shared.parts[part][d];
      values[d] = sum;
    }
  }
}

// How many blocks a multiprocessor should hold, which bounds the registers: as many as fit without
// spills. Elsewhere than on NVIDIA's the register file is not known.
#ifdef __ILUVATAR__
#define PA_DECODE_BOUNDS __launch_bounds__(THREADS)
#else
#define PA_DECODE_BOUNDS __launch_bounds__(THREADS, ROWS * Values::ACCUMULATORS > 48 ? 2 : 3)
#endif

template <int ROWS, int KEY_WIDTH, class Values>
__global__ void PA_DECODE_BOUNDS decode_kernel(pagedattn_params p) {
  __shared__ decode_storage<ROWS, Values> shared;
  static_assert(sizeof(shared) <= SHARED_LIMIT, "more shared memory than every device has");
  constexpr int ROWS_PER_WARP = ceil_div(ROWS, LOGICAL_WARPS);
  constexpr int KEYS_PER_LANE = TILE / LOGICAL_WARP;

  const block_work work = block_work::of<ROWS>(p);
  const sequence_span span = span_of(p, work.sequence);
  // the whole block leaves or stays
  if (work.split >= span.active) return;
  if (work.row_tile * ROWS >= static_cast<int64_t>(span.query_len) * GROUP) return;
  const paged_gather gather(p, work.sequence, work.kv_head, span.first, span.end);
  const int start = span.tile_start + work.split * span.share;
  const int stop = span.share < span.end - start ? start + span.share : span.end;

  const int warp = threadIdx.x / LOGICAL_WARP, lane = threadIdx.x % LOGICAL_WARP;
  const float scale = p.scale * scale_of(p.k_scale_value, p.k_scale, p.k_scale_count, work.kv_head);
  row_scoring scoring[ROWS_PER_WARP];
  attention_partial state[ROWS_PER_WARP];  // the sum: of this lane's keys alone until the end
#pragma unroll
  for (int k = 0; k < ROWS_PER_WARP; ++k) {
    const int r = warp + k * LOGICAL_WARPS;
    const query_row row(p, span, work.kv_head, work.row_tile * ROWS + r);
    scoring[k] = scoring_of(p, row, scale);
    state[k] = identity();
  }
  float acc[ROWS][Values::ACCUMULATORS] = {};
  bool bad = false;
  if (threadIdx.x == 0) shared.bad = 0;
  load_queries(shared.query, p, span, work);

  int32_t next[KEYS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < KEYS_PER_THREAD; ++i) next[i] = gather.block_of(start + key_of_thread(i));
  __syncthreads();

  int side = 0;
  for (int tile_start = start; tile_start < stop; tile_start += TILE, side ^= 1) {
    weighted_tile<ROWS>& tile = shared.tile[side];
    int32_t block[KEYS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < KEYS_PER_THREAD; ++i) {
      block[i] = next[i];
      bad = bad || block[i] == BAD_BLOCK;
      if (threadIdx.x % KEY_LANES == 0) tile.block[key_of_thread(i)] = block[i];
      // asked for one tile ahead, so that the keys need not wait for the table; what lies beyond
      // this partition is checked by the next, and a bad id there must not be told twice
      const int ahead = tile_start + TILE + key_of_thread(i);
      next[i] = ahead < stop ? gather.block_of(ahead) : NO_BLOCK;
    }
    key_scores<ROWS, KEY_WIDTH>(shared.scores[side], shared.query, block, p, gather, tile_start);
    __syncthreads();

    // a logical warp does a row; all of them go through the same shuffles
#pragma unroll
    for (int k = 0; k < ROWS_PER_WARP; ++k) {
      const int r = warp + k * LOGICAL_WARPS;
      const bool is_row = r < ROWS;
      float score[KEYS_PER_LANE], top = minus_infinity();
#pragma unroll
      for (int i = 0; i < KEYS_PER_LANE; ++i) {
        const int t = lane + i * LOGICAL_WARP;
        score[i] = is_row && gather.needs(tile_start + t)
                       ? scoring[k](shared.scores[side][is_row ? r : 0][t], tile_start + t)
                       : minus_infinity();
        top = fmaxf(top, score[i]);
      }
      top = fmaxf(group_max<LOGICAL_WARP>(top), state[k].max_score);
      attention_partial found = {top, 0.0f};
#pragma unroll
      for (int i = 0; i < KEYS_PER_LANE; ++i) {
        const float weight = weight_of(score[i], top);
        found.sum += weight;
        if (is_row) tile.weights[lane + i * LOGICAL_WARP].of[r] = weight;
      }
      const combined merged = combine(state[k], found);
      state[k] = merged.state;
      if (is_row && lane == 0) shared.rescale[side].of[r] = merged.left;
    }
    __syncthreads();

    const token_weights<ROWS> rescale = shared.rescale[side];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int a = 0; a < Values::ACCUMULATORS; ++a) acc[r][a] *= rescale.of[r];
    Values::template add<ROWS>(acc, tile, p, gather, tile_start);
  }

  if (bad) shared.bad = 1;  // whoever writes, writes the same
  __syncthreads();
  const partial_store store(p);
#pragma unroll
  for (int k = 0; k < ROWS_PER_WARP; ++k) {
    const int r = warp + k * LOGICAL_WARPS;
    state[k].sum = group_sum<LOGICAL_WARP>(state[k].sum);
    const query_row row(p, span, work.kv_head, work.row_tile * ROWS + r);
    if (r < ROWS && lane == 0 && row.token >= 0) {
      const int place = row.token + workspace_shift(p, span, work.sequence);
      store.states[store.place(work.split, place, row.head)] = shared.bad ? poison() : state[k];
    }
  }
  store_values(acc, shared, p, span, work);
}

}  // namespace pagedattn
