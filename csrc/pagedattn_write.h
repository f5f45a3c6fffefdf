/* The C interface of the write into the cache, in the same libraries as pagedattn.h's.
 *
 * Of a library's class only PAGEDATTN_QUERY_TYPE (the new keys' and values') and PAGEDATTN_KV_TYPE
 * matter here: sizes and layout are members.
 */
#ifndef PAGEDATTN_WRITE_H
#define PAGEDATTN_WRITE_H

#include <stdint.h>

/* Changes with any change of the struct below or of what its members mean. */
#define PAGEDATTN_WRITE_ABI_VERSION 1

/* One write. Strides are in elements; pointers are to device memory. Python mirrors this in
 * backends/cuda/write.py, member by member. */
struct pagedattn_write_params {
  const void *key;       /* [num_tokens, num_kv_heads, head_dim] */
  const void *value;
  void *key_cache;       /* see the strides; no element has two addresses */
  void *value_cache;
  const void *slots;     /* [num_tokens]: block * block_size + offset; others are skipped */
  const float *k_scale;  /* [k_scale_count] or NULL */
  const float *v_scale;

  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t key_dim_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t value_dim_stride;
  int64_t slot_stride;
  /* of the caches, as in struct pagedattn_params */
  int64_t key_cache_block_stride;
  int64_t key_cache_head_stride;
  int64_t key_cache_token_stride;
  int64_t key_cache_chunk_stride;
  int64_t value_cache_block_stride;
  int64_t value_cache_head_stride;
  int64_t value_cache_token_stride;
  int64_t value_cache_dim_stride;
  int64_t num_blocks;
  int64_t num_tokens;

  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t key_pack_shift;  /* 30 where a key's elements are dense */
  int32_t slot_bytes;      /* of a slot: 4 or 8 */
  int32_t k_scale_count;   /* 0, 1 or num_kv_heads */
  int32_t v_scale_count;

  float k_scale_value;     /* what a key is divided by where k_scale_count is 0 */
  float v_scale_value;
};

#ifdef __cplusplus
extern "C" {
#endif

/* As pagedattn_run. */
int pagedattn_write(const struct pagedattn_write_params *params, void *stream);

/* PAGEDATTN_WRITE_ABI_VERSION * 65536 + sizeof(struct pagedattn_write_params). */
int pagedattn_write_abi(void);

#ifdef __cplusplus
}
#endif

#endif
