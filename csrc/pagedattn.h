/* The C interface of a compiled kernel library: what the Python side calls through ctypes.
 *
 * One library serves one class of problems, chosen when it is compiled by the macros
 *   PAGEDATTN_QUERY_TYPE   0 fp16, 1 bf16, 2 fp32
 *   PAGEDATTN_KV_TYPE      the same, or 3 int8, 4 fp8 e4m3, 5 fp8 e5m2
 *   PAGEDATTN_HEAD_DIM     elements of a head: a multiple of 8, at most 256
 *   PAGEDATTN_GROUP        query heads of a KV head
 *   PAGEDATTN_BLOCK_SIZE   tokens of a cache block: a multiple of 8
 * The cache layout is no part of the class: it is a set of strides.
 */
#ifndef PAGEDATTN_H
#define PAGEDATTN_H

#include <stdint.h>

#define PA_F16 0
#define PA_BF16 1
#define PA_F32 2
#define PA_INT8 3
#define PA_E4M3 4
#define PA_E5M2 5

#define PAGEDATTN_REFUSED (-16)

/* Members of struct pagedattn_params that are pointers; they stand first. */
#define PAGEDATTN_POINTERS 13

/* Changes with any change of the structs below or of what its members mean. */
#define PAGEDATTN_ABI_VERSION 4

/* What calls of the same shapes share; `pagedattn_call` adds what is a call's own. Strides are in
 * elements; pointers are to device memory, NULL where a feature is not used. Python mirrors this
 * in backends/cuda/abi.py, member by member. */
struct pagedattn_params {
  const void *query;               /* [num_tokens, num_heads, head_dim], innermost dense */
  const void *key_cache;           /* see the key and value strides */
  const void *value_cache;
  const int32_t *block_tables;     /* [num_seqs, max_blocks], innermost dense */
  const int32_t *seq_lens;         /* [num_seqs] */
  const int32_t *query_start_loc;  /* [num_seqs + 1]; NULL: one query token per sequence */
  void *out;                       /* like the query */
  float *lse;                      /* [num_tokens, num_heads], natural; may be NULL */
  const float *alibi_slopes;       /* [num_heads] or NULL */
  const float *sinks;              /* [num_heads] or NULL */
  const float *k_scale;            /* [k_scale_count] or NULL */
  const float *v_scale;            /* [v_scale_count] or NULL */
  float *workspace;                /* num_splits * num_tokens * num_heads * (head_dim + 2); with
                                    * skip_longer num_seqs * max_query_len instead of num_tokens */

  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t table_stride;
  /* element d of a key: token * key_token + (d >> key_pack_shift) * key_chunk
   *                     + (d & ((1 << key_pack_shift) - 1)) */
  int64_t key_block_stride;
  int64_t key_head_stride;
  int64_t key_token_stride;
  int64_t key_chunk_stride;
  int64_t value_block_stride;
  int64_t value_head_stride;
  int64_t value_token_stride;
  int64_t value_dim_stride;
  int64_t num_blocks;              /* of the caches: ids at or beyond it name no block */

  int32_t num_seqs;
  int32_t num_tokens;              /* query tokens, padding included */
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t max_blocks;              /* entries of a table row */
  int32_t max_seq_len;             /* a longer sequence gives NaN; 2^31 - 2^20 at most */
  int32_t max_query_len;           /* no sequence has more query tokens */
  int32_t window;                  /* keys that a token sees; 0: all */
  int32_t num_splits;              /* partitions that the grid and the workspace hold */
  int32_t tokens_per_split;        /* > 0: the fixed size of a partition (batch-invariant) */
  int32_t team;                    /* warps that share a partition in the tuned kernel; 0: take
                                    * the portable one */
  int32_t key_pack_shift;          /* 30 where a key's elements are dense */
  int32_t k_scale_count;           /* 0, 1 or num_kv_heads */
  int32_t v_scale_count;
  int32_t skip_longer;             /* 1: a sequence of more than max_query_len query tokens is
                                    * another launch's, and its rows stay as they are */
  int32_t clustered;               /* 1, only where pagedattn_clustered says so: the partitions'
                                    * blocks merge them, and no workspace is used */

  float scale;
  float softcap;                   /* 0: none */
  float k_scale_value;             /* multiplies what k_scale says */
  float v_scale_value;
};

/* One launch, as it is cheapest to hand over: what calls of the same shapes share stays where it
 * is, and the rest is packed beside its address. */
struct pagedattn_call {
  const struct pagedattn_params *shared;  /* its pointers and its max_seq_len are not read */
  void *stream;                           /* a cudaStream_t */
  int64_t max_seq_len;
  const void *pointers[PAGEDATTN_POINTERS];  /* in the order of the struct's members */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Launch on the call's stream, of the current device. 0, or a code for pagedattn_error;
 * PAGEDATTN_REFUSED: the tuned kernel does not serve the call as it lies in memory, and nothing
 * was launched. */
int pagedattn_run(const struct pagedattn_call *call);

/* 1 where the blocks of the call's partitions should merge them as a cluster, else 0, or 1 + a code
 * for pagedattn_error where the device does not say. Nothing is launched, and no pointer matters: it
 * holds for all calls with the same `shared` and max_seq_len. */
int pagedattn_clustered(const struct pagedattn_call *call);

/* Warps of the tuned kernel's blocks; 0 where the library has only the portable one. */
int pagedattn_tuned_warps(void);

/* What a code of pagedattn_run means. */
const char *pagedattn_error(int code);

/* PAGEDATTN_ABI_VERSION * 65536 + sizeof(struct pagedattn_params). */
int pagedattn_abi(void);

#ifdef __cplusplus
}
#endif

#endif
