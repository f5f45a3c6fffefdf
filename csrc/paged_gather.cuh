// From a token's position to addresses in the cache, by the block table. Nothing that a table
// holds can lead outside the cache, and entries that no token needs are not followed.
#pragma once

#include "convert.cuh"
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
  const int32_t* table;
  int64_t key_base, value_base;  // of the KV head
  int64_t num_blocks;
  int first, end;  // the keys that are needed

  PA_DEVICE paged_gather(const pagedattn_params& p, int sequence, int kv_head, int first, int end)
      : table(p.block_tables + sequence * p.table_stride),
        key_base(kv_head * p.key_head_stride),
        value_base(kv_head * p.value_head_stride),
        num_blocks(p.num_blocks),
        first(first),
        end(end) {}

  PA_DEVICE bool needs(int token) const { return token >= first && token < end; }

  /// The block that holds `token`, if any needed token lies in it.
  PA_DEVICE int32_t block_of(int token) const {
    const int logical = token / BLOCK_SIZE;
    if (end <= first || logical < first / BLOCK_SIZE || logical > (end - 1) / BLOCK_SIZE)
      return NO_BLOCK;
    const int32_t id = table[logical];
    return id >= 0 && id < num_blocks ? id : BAD_BLOCK;
  }

  /// Where the token's key begins; `key_element` leads on from there.
  PA_DEVICE int64_t key_token(const pagedattn_params& p, int32_t block, int token) const {
    return key_base + block * p.key_block_stride + token % BLOCK_SIZE * p.key_token_stride;
  }

  PA_DEVICE int64_t value_token(const pagedattn_params& p, int32_t block, int token) const {
    return value_base + block * p.value_block_stride + token % BLOCK_SIZE * p.value_token_stride;
  }
};

PA_DEVICE int64_t key_element(const pagedattn_params& p, int d) {
  const int within = d & ((1 << p.key_pack_shift) - 1);
  return (d >> p.key_pack_shift) * p.key_chunk_stride + within;
}

}  // namespace pagedattn
