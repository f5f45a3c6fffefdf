// Phase 2 within phase 1: the blocks that have a (sequence, KV head, tile of rows)'s partitions are
// one cluster (sm_90), and hand each other what they found through their shared memory.
//
// That takes neither a second launch nor a workspace; where it serves: see `has_room` in tuned.cuh.
#pragma once

#include "tuned_results.cuh"

namespace pagedattn {

constexpr int MOST_CLUSTERED = 16;  // blocks of a cluster; more than 8 must be asked for

/// What a block gets from all of its cluster: of its share of the tile's rows the weighted values,
/// four dimensions a piece, and every row's state. It lies behind the rest of its shared memory.
template <class Memory>
struct cluster_memory {
  static constexpr int PIECES = HEAD_DIM / 4;  // of a row
  static constexpr int BEGIN = ceil_div(Memory::BYTES, 16) * 16;
  static constexpr int STATES_BYTES = MOST_CLUSTERED * Memory::ROWS * sizeof(attention_partial);
  static constexpr int MOST_PIECES = Memory::ROWS * PIECES + MOST_CLUSTERED;  // shares rounded up
  static constexpr int BYTES = BEGIN + STATES_BYTES + MOST_PIECES * sizeof(float4);

  attention_partial (*states)[Memory::ROWS];  // by the block they come from
  float4* values;

  explicit PA_DEVICE cluster_memory(unsigned char* memory)
      : states(reinterpret_cast<attention_partial(*)[Memory::ROWS]>(memory + BEGIN)),
        values(reinterpret_cast<float4*>(memory + BEGIN + STATES_BYTES)) {}
};

/// Merge the partitions of the block's cluster, and write the results. Every thread calls, its
/// block's warps (one team) having left what they found.
template <class Memory>
PA_DEVICE void write_clustered(const pagedattn_params& p, const sequence_span& span,
                               const team_work& work, unsigned char* memory,
                               const attention_partial (*left)[Memory::ROWS]) {
  using shared = cluster_memory<Memory>;
  const shared from(memory);
  const int blocks = p.num_splits;
  const int rows =  // the same in all of the cluster
      span.elsewhere ? 0 : smaller(span.query_len * GROUP - work.row_tile * TILE_ROWS, Memory::ROWS);
  const int pieces = rows > 0 ? rows * shared::PIECES : 0;
  const int share = (pieces + blocks - 1) / blocks;  // of a block

  wait_for_cluster_to_begin();
#pragma unroll 3
  for (int i = threadIdx.x; i < pieces; i += TUNED_THREADS) {
    const int tile_row = i / shared::PIECES, dim = i % shared::PIECES * 4;
    const team_row merged(left, tile_row, TUNED_WARPS);
    float value[4] = {};
#pragma unroll
    for (int w = 0; w < TUNED_WARPS; ++w)
      add_left<Memory>(value, merged.factor[w], memory, w, tile_row, dim);
    const int owner = i / share;
    store_in_block(owner, from.values + work.split * share + i - owner * share,
                   make_float4(value[0], value[1], value[2], value[3]));
  }
  for (int i = threadIdx.x; i < rows * blocks; i += TUNED_THREADS) {
    const int owner = i / rows, tile_row = i % rows;
    const attention_partial state =
        span.refused ? poison() : team_row(left, tile_row, TUNED_WARPS).state;
    store_in_block(owner, &from.states[work.split][tile_row],
                   make_float2(state.max_score, state.sum));
  }
  cluster_barrier();

  for (int i = threadIdx.x; i < share && work.split * share + i < pieces; i += TUNED_THREADS) {
    const int piece = work.split * share + i;
    const int tile_row = piece / shared::PIECES, dim = piece % shared::PIECES * 4;
    const query_row row = work.row(p, span, tile_row);
    if (row.token < 0) continue;  // outside the call's tokens, as no host has checked their starts
    attention_partial state = identity();
#pragma unroll 4
    for (int b = 0; b < blocks; ++b)
      state.max_score = fmaxf(state.max_score, from.states[b][tile_row].max_score);
    float sum[4] = {};
#pragma unroll 4
    for (int b = 0; b < blocks; ++b) {
      const attention_partial one = from.states[b][tile_row];
      const float factor = weight_of(one.max_score, state.max_score);
      state.sum += one.sum * factor;
      add_scaled(sum, factor, from.values[b * share + i]);
    }
    store_four(p, row, dim, sum, finish_row(p, row, work.kv_head, state, dim == 0));
  }
}

}  // namespace pagedattn
