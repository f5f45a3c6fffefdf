// A warp's own place in shared memory for an item's keys and values, filled by copies that run
// beside the threads.
//
// Keys and values are copied and waited for apart: as soon as an item's keys have been used the
// next ones take their place, while its values are still multiplied. No other warp takes part.
#pragma once

#include "tensor_maps.cuh"
#include "tuned_item.cuh"

namespace pagedattn {

// PAGEDATTN_TUNED is 80 or 90. Bulk copies need sm_90; before it a lane copies 16 bytes at a time.
constexpr bool BULK_COPIES = PAGEDATTN_TUNED >= 90;

/// Of a warp: one for the keys, one for the values.
struct item_barriers {
  copy_barrier of[2];
};

/// Tensor maps of the keys and of the values, where swizzled rows are copied.
struct cache_maps {
  tensor_map of[2];
};

/// The keys or the values of a KV head.
struct head_cache {
  const unsigned char* base;
  int64_t block_bytes, token_bytes;  // from one to the next

  PA_DEVICE head_cache(const pagedattn_params& p, int side, int head)
      : base(static_cast<const unsigned char*>(side == 0 ? p.key_cache : p.value_cache) +
             head * (side == 0 ? p.key_head_stride : p.value_head_stride) * KV_BYTES),
        block_bytes((side == 0 ? p.key_block_stride : p.value_block_stride) * KV_BYTES),
        token_bytes((side == 0 ? p.key_token_stride : p.value_token_stride) * KV_BYTES) {}

  PA_DEVICE const unsigned char* row(int32_t block, int token) const {
    return base + block * block_bytes + token % BLOCK_SIZE * token_bytes;
  }
};

template <kv_order ORDER>
struct item_place {
  using shape = item<ORDER>;
  static constexpr int BYTES = 2 * shape::BYTES;
  // A block of the packed layout is one run of bytes, where an item holds all of it. Bulk copies of
  // single rows (512 bytes) are no faster than 16 bytes a lane: a tensor copy takes them at once.
  static constexpr bool BULK =
      BULK_COPIES && (ORDER == SWIZZLED || (ORDER == PACKED && BLOCK_SIZE == PART));
  // whether this is the order to use: packed values come in 16 bytes, 8 tokens of 16 bits or 16 of
  // 8 bits; swizzled rows are whole lines
  static constexpr bool LINED = BULK_COPIES && HEAD_DIM * KV_BYTES % 128 == 0;
  static constexpr bool SERVED =
      ORDER == PACKED ? WIDE || PART == ITEM : LINED == (ORDER == SWIZZLED);

  unsigned char* memory;
  item_barriers* barriers;
  const cache_maps* maps;
  cache_policy policy;
  int kv_head, lane;

  static PA_DEVICE item_place of(const cache_maps& maps, bool read_once, unsigned char* memory,
                                 item_barriers* barriers, int kv_head, int lane) {
    item_place made = {memory, barriers, &maps, {}, kv_head, lane};
    if constexpr (BULK) made.policy = cache_policy_for(read_once);
    made.init();
    return made;
  }

  PA_DEVICE void init() {
    if constexpr (!BULK) return;
    if (lane == 0) {
      if constexpr (ORDER == SWIZZLED) prefetch_map(maps->of[0]), prefetch_map(maps->of[1]);
      for (int side = 0; side < 2; ++side) init_barrier(&barriers->of[side], 1);
      fence_barrier_init();
    }
    __syncwarp();
  }

  /// Where the keys (side 0) or the values (side 1) are.
  PA_DEVICE unsigned char* side_of(int side) const { return memory + side * shape::BYTES; }

  /// Start the copy of a side of the item whose first token and blocks these are. Every lane calls.
  PA_DEVICE void start(const pagedattn_params& p, int side, int token,
                       const int32_t (&block)[PARTS]) const {
    unsigned char* const target = side_of(side);
    const head_cache from(p, side, kv_head);  // not kept: the registers are few
    if constexpr (BULK) {
      constexpr int PART_BYTES = PART * HEAD_DIM * KV_BYTES;
      if (lane != 0) return;
      copy_barrier* const barrier = &barriers->of[side];
      expect_bytes(barrier, PARTS * PART_BYTES);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int first = token + part * PART;
        if constexpr (ORDER == SWIZZLED)
          tensor_copy(target + part * PART_BYTES, maps->of[side], first % BLOCK_SIZE, kv_head,
                      block[part], barrier, policy);
        else
          bulk_copy(target + part * PART_BYTES, from.row(block[part], first), PART_BYTES, barrier,
                    policy);
      }
    } else {
      const unsigned char* source[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        source[part] = from.row(block[part], token + part * PART);
      if constexpr (ORDER == ROWS) copy_rows(target, source, from.token_bytes);
      else if (side == 0) copy_packed_keys(target, source);
      else copy_packed_values(target, source);
      commit_copies();
    }
  }

  /// In place of `start` where there is no further item, so that the count of copies stays right.
  PA_DEVICE void start_nothing() const {
    if constexpr (!BULK) commit_copies();
  }

  /// Wait for a side of the n-th item: keys and values in turn, as they were started.
  PA_DEVICE void wait(int n, int side) const {
    if constexpr (BULK) {
      wait_barrier(&barriers->of[side], n % 2);
    } else {
      wait_copies<1>();
      __syncwarp();
    }
  }

 private:
  /// Chosen without an index, which would have the array in memory.
  static PA_DEVICE const unsigned char* of_part(const unsigned char* const (&source)[PARTS],
                                                int part) {
    return part == 0 ? source[0] : source[PARTS - 1];
  }

  PA_DEVICE void copy_rows(unsigned char* target, const unsigned char* const (&source)[PARTS],
                           int64_t apart) const {
#pragma unroll 4
    for (int i = lane; i < ITEM * CHUNKS; i += 32) {
      const int token = i / CHUNKS, chunk = i % CHUNKS;
      copy_16(target + token * shape::ROW_BYTES + chunk * 16,
              of_part(source, token / PART) + token % PART * apart + chunk * 16);
    }
  }

  PA_DEVICE void copy_packed_keys(unsigned char* target,
                                  const unsigned char* const (&source)[PARTS]) const {
#pragma unroll 4
    for (int i = lane; i < ITEM * CHUNKS; i += 32) {
      const int token = i % PART, chunk = i / PART % CHUNKS, part = i / PART / CHUNKS;
      copy_16(target + i * 16, of_part(source, part) + (chunk * BLOCK_SIZE + token) * 16);
    }
  }

  PA_DEVICE void copy_packed_values(unsigned char* target,
                                    const unsigned char* const (&source)[PARTS]) const {
    constexpr int PIECES = ceil_div(PART * KV_BYTES, 16);  // of a dimension
#pragma unroll 4
    for (int i = lane; i < ITEM * CHUNKS; i += 32) {
      const int piece = i % PIECES, dim = i / PIECES % HEAD_DIM, part = i / PIECES / HEAD_DIM;
      copy_16(target + i * 16, of_part(source, part) + dim * BLOCK_SIZE * KV_BYTES + piece * 16);
    }
  }
};

/// A warp's part of a sequence's items, and the blocks that hold them: items first, first + step,
/// … Dealt out in turn over the warps, they do not depend on the length, so that the table and
/// the length are read side by side; 32 entries at a time, a lane each.
struct item_blocks {
  const int32_t* table;
  int max_blocks, first, step;
  int32_t now[PARTS], later[PARTS];

  PA_DEVICE void read(int32_t (&entry)[PARTS], int n) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int64_t token = (first + static_cast<int64_t>(n) * step) * ITEM + part * PART;
      const int64_t logical = token / BLOCK_SIZE;
      entry[part] = logical < max_blocks ? table[logical] : 0;
    }
  }

  /// The block of the n-th item's part; call with n in rising order, by every lane.
  PA_DEVICE void get(int32_t (&block)[PARTS], int n, int lane) {
    if (n > 0 && n % 32 == 0) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) now[part] = later[part];
      read(later, n + 32 + lane);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      block[part] = __shfl_sync(PA_ALL_LANES, now[part], n % 32);
  }
};

}  // namespace pagedattn
