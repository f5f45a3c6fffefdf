// From a token's position to addresses in the cache, by the block table. Nothing that a table
// holds can lead outside the cache, and entries that no token needs are not followed.
#pragma once

#include "convert.cuh"
#include "logical_warp.cuh"
#include "sequence_span.cuh"

namespace pagedattn {

constexpr int32_t NO_BLOCK = -1;   // the token's block is not needed
constexpr int32_t BAD_BLOCK = -2;  // the table names a block that is not in the cache

/// Widest load of so many elements at most that divides a run of `run` elements.
__host__ __device__ constexpr int widest(int type, int run, int at_most) {
  int width = 16 / size_of_type(type);
  while (width > 1 && (run % width != 0 || width > at_most)) width /= 2;
  return width;
}

struct paged_gather {
  int sequence, kv_head;
  int first, end;  // the keys that are needed; first <= end

  PA_DEVICE bool needs(int token) const {
    return static_cast<unsigned>(token - first) < static_cast<unsigned>(end - first);
  }

  /// The block that holds `token`, if any needed token lies in it.
  PA_DEVICE int32_t block_of(const pagedattn_params& p, int token) const {
    const int logical = token / BLOCK_SIZE;
    if (end <= first || logical < first / BLOCK_SIZE || logical > (end - 1) / BLOCK_SIZE)
      return NO_BLOCK;
    const int32_t id = p.block_tables[sequence * p.table_stride + logical];
    return id >= 0 && id < p.num_blocks ? id : BAD_BLOCK;
  }

  /// Where the token's key begins; `key_element` leads on from there.
  PA_DEVICE int64_t key_token(const pagedattn_params& p, int32_t block, int token) const {
    return kv_head * p.key_head_stride + block * p.key_block_stride +
           token % BLOCK_SIZE * p.key_token_stride;
  }

  PA_DEVICE int64_t value_token(const pagedattn_params& p, int32_t block, int token) const {
    return kv_head * p.value_head_stride + block * p.value_block_stride +
           token % BLOCK_SIZE * p.value_token_stride;
  }
};

constexpr int RUN = 8;  // tokens that lie in one block, whatever its size
constexpr int RUNS = LOGICAL_WARP / RUN;

/// The blocks of a logical warp's 32 tokens: lane i holds that of run i % RUNS.
struct run_blocks {
  int32_t own;

  /// Of the tokens from `start` on, a multiple of 32; none at or beyond `stop` are followed.
  PA_DEVICE run_blocks(const pagedattn_params& p, const paged_gather& gather, int start, int stop,
                       int lane)
      : own(NO_BLOCK) {
    start += lane % RUNS * RUN;
    if (start < stop) own = gather.block_of(p, start);
  }

  /// The block of a run, which may differ between lanes. Every thread of the block must call.
  PA_DEVICE int32_t of(int run) const { return group_broadcast<RUNS>(own, run); }
};

PA_DEVICE int64_t key_element(const pagedattn_params& p, int d) {
  const int within = d & ((1 << p.key_pack_shift) - 1);
  return (d >> p.key_pack_shift) * p.key_chunk_stride + within;
}

}  // namespace pagedattn
