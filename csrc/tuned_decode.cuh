// Phase 1 on the tensor cores: a warp walks its own items, with no barrier between warps until the
// end, where the warps of a team (1 to all of a block's) merge what they have found.
//
// A team has one (sequence, KV head, tile of 8 query rows, partition), or, of more rows than these,
// three tiles, which share what is read. Where a sequence has one partition, or its partitions'
// blocks are a cluster, the result is written here, and no merge follows.
#pragma once

#include "tuned_cluster.cuh"

namespace pagedattn {

/// A warp's walk over its items: the next one's copies are under way while one is folded in.
template <kv_order ORDER>
struct item_walk {
  using shape = item<ORDER>;

  item_place<ORDER> place;
  item_blocks blocks;
  int first, end;  // the keys that some query sees
  int count;       // items
  bool bad;        // one of them lies in a block that is not in the cache
  int lane;
  int32_t block[PARTS];  // of the item whose copies were started last

  /// Which of the sequence's items are a warp's. The table is asked for at once: that does not
  /// depend on the length, unless a window does.
  PA_DEVICE void ask(const pagedattn_params& p, const team_work& work, int rank) {
    const bool fixed = p.tokens_per_split > 0;  // partitions of one size, one behind the other
    blocks.table = p.block_tables + work.sequence * p.table_stride;
    blocks.max_blocks = p.max_blocks;
    blocks.first = work.split * (fixed ? p.tokens_per_split / ITEM : p.team) + rank;
    blocks.step = fixed ? p.team : p.num_splits * p.team;
    if (p.window > 0) blocks.first += span_of(p, work.sequence).first / ITEM;
    blocks.read(blocks.now, lane);
  }

  PA_DEVICE void begin(const pagedattn_params& p, const team_work& work,
                       const sequence_span& span) {
    first = span.first, end = span.end;
    int items = ceil_div(end, ITEM);
    if (p.tokens_per_split > 0)
      items = smaller(items, first / ITEM + (work.split + 1) * (p.tokens_per_split / ITEM));
    if (work.row_tile * TILE_ROWS >= span.query_len * GROUP) items = 0;
    const unsigned left = max(items - blocks.first, 0), step = blocks.step;
    count = (left + step - 1) / step;
    bad = count > 0 && p.num_blocks == 0;
    if (bad) count = 0;
    if (count > 32) blocks.read(blocks.later, lane + 32);
    if (count == 0) return;
    find(p, 0);
    start(p, 0, 0);
    start(p, 0, 1);
  }

  PA_DEVICE int first_key(int n) const { return (blocks.first + n * blocks.step) * ITEM; }

  /// The n-th item's blocks; one that no query sees is not followed.
  PA_DEVICE void find(const pagedattn_params& p, int n) {
    blocks.get(block, n, lane);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int from = first_key(n) + part * PART;
      const bool needed = from < end && from + PART > first;
      const bool known = block[part] >= 0 && block[part] < p.num_blocks;
      bad = bad || (needed && !known);
      if (!needed || !known) block[part] = 0;
    }
  }

  PA_DEVICE void start(const pagedattn_params& p, int n, int side) {
    place.start(p, side, first_key(n), block);
  }

  /// Fold the n-th item into `mine`. `clear`: every row sees all of its keys; `plain`: scores are
  /// the products times `scale`.
  template <int TILES, class Rows>
  PA_DEVICE void fold(warp_state<TILES>& mine, const pagedattn_params& p, const Rows& rows,
                      float scale, int n, bool clear, bool plain) {
    const bool more = n + 1 < count;
    float score[TILES][4];
    place.wait(n, 0);
    shape::key_scores(score, place.side_of(0), rows, lane);
    __syncwarp();  // every lane has read the keys
    if (more) find(p, n + 1), start(p, n + 1, 0);
    else place.start_nothing();

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& one = score[tile][i];
        if (clear && plain)
          one *= scale * LOG2E;
        else
          one = rows.scoring_at(tile, i % 2)(
              one, first_key(n) + shape::token_of_row(lane / 4 + i / 2 * 8));
      }
    mine.weigh(score);
    unsigned weights[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weights[tile][half] = transpose_matrix(
            pack_pair<QUERY_TYPE>(score[tile][2 * half], score[tile][2 * half + 1]));

    unsigned keep[2] = {~0u, ~0u};
    place.wait(n, 1);
    if (clear) {
      shape::template add_values<false>(mine.acc, place.side_of(1), weights, keep, lane);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key(n) + shape::token_of_row(lane % 4 * 2 + i % 2 + i / 2 * 8);
        if (key < first || key >= end) keep[i / 2] &= i % 2 ? 0xffffu : 0xffff0000u;
      }
      shape::template add_values<true>(mine.acc, place.side_of(1), weights, keep, lane);
    }
    __syncwarp();
    if (more) start(p, n + 1, 1);
    else place.start_nothing();
  }
};

template <kv_order ORDER, int TILES, bool CLUSTERED>
__global__ void __launch_bounds__(TUNED_THREADS, 1)
    tuned_decode_kernel(pagedattn_params p, const __grid_constant__ cache_maps maps,
                        bool read_once) {
  using shared = tuned_memory<ORDER, TILES>;
  PA_DYNAMIC_SHARED(memory);
  __shared__ item_barriers barriers[TUNED_WARPS];
  __shared__ attention_partial states[TUNED_WARPS][TILES * TILE_ROWS];
  launch_dependents();
  if constexpr (CLUSTERED) begin_in_cluster();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = warp % p.team;
  team_work work = team_work::of<TILES, CLUSTERED>(p, warp);
  const bool exists = work.sequence < p.num_seqs;
  if (!exists) work.sequence = 0;  // it takes part in the block's barrier alone

  item_walk<ORDER> walk;
  walk.lane = lane;
  walk.ask(p, work, rank);
  sequence_span span = span_of(p, work.sequence);
  if (!exists) span.query_len = 0, span.end = 0;
  walk.place = item_place<ORDER>::of(maps, read_once,
                                     memory + warp * shared::WARP_BYTES,
                                     &barriers[warp], work.kv_head, lane);
  walk.begin(p, work, span);

  const float scale = p.scale * scale_of(p.k_scale_value, p.k_scale, p.k_scale_count, work.kv_head);
  const bool plain = p.softcap == 0.0f && !p.alibi_slopes;
  // keys that every row sees
  const int clear_end = smaller(span.end, span.length - span.query_len + 1);
  const int clear_first = p.window > 0 ? max(span.length - p.window, 0) : 0;
  warp_state<TILES> mine;
  const auto fold_all = [&](const auto& rows) {
    for (int n = 0; n < walk.count; ++n) {
      const int key = walk.first_key(n);
      walk.fold(mine, p, rows, scale, n, key >= clear_first && key + ITEM <= clear_end, plain);
    }
  };
  // the rows behind the first copies, as they would delay them
  if constexpr (TILES == 1) {
    own_rows rows;
    rows.load<item<ORDER>>(p, span, work, scale, lane);
    fold_all(rows);
  } else {
    unsigned char* const behind = memory + shared::ITEMS_BYTES;
    const shared_rows rows = {reinterpret_cast<block_rows*>(behind), lane};
    rows.load<item<ORDER>>(p, span, work, scale);
    fold_all(rows);
  }

  if constexpr (TILES > 1) __syncthreads();  // all that they leave takes the items' place
  unsigned char* const left = memory + warp * shared::LEFT_PITCH;
  leave<ORDER>(reinterpret_cast<float*>(left), states[warp], mine, walk.bad, lane);
  if (p.team > 1) __syncthreads();
  else __syncwarp();
  if constexpr (CLUSTERED) {
    write_clustered<shared>(p, span, work, memory, states);
    return;
  }
  if (span.elsewhere) return;
  const int leader = warp - rank;
  unsigned char* const first = memory + leader * shared::LEFT_PITCH;
  if (p.num_splits == 1) write_result<shared>(p, span, work, first, &states[leader], rank, lane);
  else write_partition<shared>(p, span, work, first, &states[leader], rank, lane);
}

}  // namespace pagedattn
