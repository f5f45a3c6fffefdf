// From the states of a team's warps to a row of the result, or of the workspace.
#pragma once

#include "portable_merge.cuh"
#include "tuned_copies.cuh"
#include "tuned_rows.cuh"

namespace pagedattn {

/// What a warp leaves in shared memory for its team's merge: [row][dimension], padded so that the
/// lanes' stores fall into different banks.
constexpr int LEFT_STRIDE = HEAD_DIM + 4;

/// Where that and, before, the warps' items are.
template <kv_order ORDER, int TILES>
struct tuned_memory {
  static constexpr int ROWS = TILES * TILE_ROWS;
  static constexpr int LEFT_BYTES = ROWS * LEFT_STRIDE * 4;
  static constexpr int ITEM_BYTES = item_place<ORDER>::BYTES;
  // a warp of one tile leaves it in its own place: others may still copy to theirs
  static constexpr int MOST_BYTES = TILES == 1 && LEFT_BYTES > ITEM_BYTES ? LEFT_BYTES : ITEM_BYTES;
  static constexpr int WARP_BYTES = ceil_div(MOST_BYTES, 1024) * 1024;  // for swizzled copies
  static constexpr int LEFT_PITCH = TILES == 1 ? WARP_BYTES : LEFT_BYTES;  // of the warps
  static constexpr int ITEMS_BYTES = TUNED_WARPS * WARP_BYTES;  // the shared rows are behind
  static constexpr int USED_BYTES = ITEMS_BYTES + (TILES > 1 ? sizeof(block_rows) : 0);
  static constexpr int ALL_LEFT = TUNED_WARPS * LEFT_PITCH;
  static constexpr int BYTES = USED_BYTES > ALL_LEFT ? USED_BYTES : ALL_LEFT;
};

template <kv_order ORDER, int TILES>
PA_DEVICE void leave(float* left, attention_partial* states, warp_state<TILES>& mine, bool bad,
                     int lane) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      mine.sum[i / 2][i % 2] += __shfl_xor_sync(PA_ALL_LANES, mine.sum[i / 2][i % 2], offset);
  if (lane < 4)
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      states[i / 2 * TILE_ROWS + lane * 2 + i % 2] =
          bad ? poison() : attention_partial{mine.top[i / 2][i % 2], mine.sum[i / 2][i % 2]};
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[(tile * TILE_ROWS + lane % 4 * 2 + i % 2) * LEFT_STRIDE +
             item<ORDER>::dim_of_row(step, lane / 4 + i / 2 * 8)] = mine.acc[tile][step][i];
}

PA_DEVICE void add_scaled(float (&sum)[4], float factor, float4 v) {
  sum[0] += factor * v.x, sum[1] += factor * v.y, sum[2] += factor * v.z, sum[3] += factor * v.w;
}

/// Four consecutive outputs of a row: its weighted values times `factor`; zeros where that is 0,
/// whatever they are.
PA_DEVICE void store_four(const pagedattn_params& p, const query_row& row, int dim,
                          const float (&weighted)[4], float factor) {
  float value[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) value[k] = factor == 0.0f ? 0.0f : weighted[k] * factor;
  const uint2 bits = {pack_pair<QUERY_TYPE>(value[0], value[1]),
                      pack_pair<QUERY_TYPE>(value[2], value[3])};
  unsigned short* out = static_cast<unsigned short*>(p.out) + row.token * p.out_token_stride +
                        row.head * p.out_head_stride + dim;
  *reinterpret_cast<uint2*>(out) = bits;
}

/// What multiplies a row's weighted values in the end, its log-sum-exp written on the way.
PA_DEVICE float finish_row(const pagedattn_params& p, const query_row& row, int kv_head,
                           attention_partial state, bool writes_lse) {
  const bool empty = state.sum == 0.0f;
  float factor = 1.0f;
  if (p.sinks && !empty) {
    const combined with_sink = combine(state, {p.sinks[row.head] * LOG2E, 1.0f});
    state = with_sink.state;
    factor = with_sink.left;
  }
  if (p.lse && writes_lse)
    p.lse[static_cast<int64_t>(row.token) * p.num_heads + row.head] =
        empty ? minus_infinity() : (state.max_score + log2f(state.sum)) * LN2;
  factor *= scale_of(p.v_scale_value, p.v_scale, p.v_scale_count, kv_head);
  return empty ? 0.0f : factor / state.sum;
}

constexpr int TURNS = ceil_div(HEAD_DIM, 128);  // of a row: four dimensions of a lane at a time

/// A row of a team's tile as its warps have left it, all of them merged at once: a chain of merges
/// would cost a microsecond.
struct team_row {
  attention_partial state = identity();
  float factor[TUNED_WARPS];  // of each warp's values

  template <int ROWS>
  PA_DEVICE team_row(const attention_partial (*states)[ROWS], int tile_row, int team) {
    attention_partial from[TUNED_WARPS];
#pragma unroll
    for (int w = 0; w < TUNED_WARPS; ++w) {
      from[w] = w < team ? states[w][tile_row] : identity();
      state.max_score = fmaxf(state.max_score, from[w].max_score);
    }
#pragma unroll
    for (int w = 0; w < TUNED_WARPS; ++w) {
      factor[w] = weight_of(from[w].max_score, state.max_score);
      state.sum += from[w].sum * factor[w];
    }
  }
};

/// Four dimensions of a row that the team's warp `w` left, times `factor`.
template <class Memory>
PA_DEVICE void add_left(float (&value)[4], float factor, const unsigned char* memory, int w,
                        int tile_row, int dim) {
  const unsigned char* const left = memory + w * Memory::LEFT_PITCH;
  add_scaled(value, factor,
             *reinterpret_cast<const float4*>(left + (tile_row * LEFT_STRIDE + dim) * 4));
}

/// The team's warps write the result, a row each at a time.
template <class Memory>
PA_DEVICE void write_result(const pagedattn_params& p, const sequence_span& span,
                            const team_work& work, const unsigned char* memory,
                            const attention_partial (*states)[Memory::ROWS], int rank, int lane) {
#pragma unroll 2
  for (int tile_row = rank; tile_row < Memory::ROWS; tile_row += p.team) {
    const query_row row = work.row(p, span, tile_row);
    if (row.token < 0) break;  // nor are there any behind it
    const team_row merged(states, tile_row, p.team);
    float value[TURNS][4] = {};
#pragma unroll
    for (int w = 0; w < TUNED_WARPS; ++w)
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int dim = turn * 128 + lane * 4;
        if (w < p.team && dim < HEAD_DIM)
          add_left<Memory>(value[turn], merged.factor[w], memory, w, tile_row, dim);
      }
    const attention_partial state = span.refused ? poison() : merged.state;
    const float factor = finish_row(p, row, work.kv_head, state, lane == 0);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int dim = turn * 128 + lane * 4;
      if (dim < HEAD_DIM) store_four(p, row, dim, value[turn], factor);
    }
  }
}

/// The team's warps write the partition's states, a turn of a row each at a time.
///
/// Turns stand side by side, with nothing between them that lanes part ways at, as each is a chain
/// of some hundred instructions that nothing else hides: 0.2 µs less for one sequence.
template <class Memory>
PA_DEVICE void write_partition(const pagedattn_params& p, const sequence_span& span,
                               const team_work& work, const unsigned char* memory,
                               const attention_partial (*states)[Memory::ROWS], int rank, int lane) {
  // of a whole team's share of one query token's rows
  constexpr int EACH = ceil_div(smaller(TILE_ROWS, GROUP) * TURNS, TUNED_WARPS);
  if (work.split >= span.active) return;  // no merge asks for it
  const partial_store store(p);
  const int shift = workspace_shift(p, span, work.sequence);
  for (int from = rank; from < Memory::ROWS * TURNS; from += p.team * EACH) {
    const query_row next = work.row(p, span, from / TURNS);
    if (next.token < 0) break;  // nor are there any behind it
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int index = from + i * p.team, turn = index % TURNS;
      const int tile_row = smaller(index / TURNS, Memory::ROWS - 1);
      const query_row row = work.row(p, span, tile_row);
      const bool exists = index < Memory::ROWS * TURNS && row.token >= 0;
      const int dim = turn * 128 + lane * 4;
      const team_row merged(states, tile_row, p.team);
      float value[4] = {};
#pragma unroll
      for (int w = 0; w < TUNED_WARPS; ++w)
        if (w < p.team)
          add_left<Memory>(value, merged.factor[w], memory, w, tile_row, smaller(dim, HEAD_DIM - 4));
      const int64_t place = store.place(work.split, row.token + shift, row.head);
      if (exists && dim < HEAD_DIM)
        *reinterpret_cast<float4*>(store.values + place * HEAD_DIM + dim) =
            make_float4(value[0], value[1], value[2], value[3]);
      if (exists && turn == 0 && lane == 0)
        store.states[place] = span.refused ? poison() : merged.state;
    }
  }
}

}  // namespace pagedattn
