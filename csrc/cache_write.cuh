// The write into the cache: a thread takes some neighbouring elements of one head of a token, of
// its key and of its value, and puts them where the token's slot is.
#pragma once

#include "alignment.cuh"
#include "convert.cuh"
#include "kernel_launch.cuh"
#include "pagedattn_write.h"

namespace pagedattn {

struct cache_write {
  pagedattn_write_params p;
  int token_run;  // neighbouring threads take so many tokens before they take the next elements
};

/// What a head's elements are divided by: its part of a tensor, or a number.
struct divisor {
  float value;
  bool none;

  PA_DEVICE divisor(float number, const float* tensor, int count, int head)
      : value(number), none(count == 0 && number == 1.0f) {
    if (count > 0) value = tensor[count == 1 ? 0 : head];
  }
};

/// WIDTH elements from `source` to `cache`, where they lie `step` apart; unscaled ones of the
/// same type keep their bits.
template <int WIDTH>
PA_DEVICE void write_elements(const void* source, int64_t from, void* cache, int64_t to,
                              int64_t step, const divisor& scale) {
  stored_vector<QUERY_TYPE, WIDTH> given;
  given.load(source, from);
  stored_vector<KV_TYPE, WIDTH> made;
  made.clear();
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const bool keep = QUERY_TYPE == KV_TYPE && scale.none;
    const unsigned bits = keep ? given.bits(i) : from_float<KV_TYPE>(given.get(i) / scale.value);
    if (step != 1) store_bits<KV_TYPE>(cache, to + i * step, bits);
    else made.set(i, bits);
  }
  if (step == 1) made.store(cache, to);
}

template <int WIDTH>
__global__ void __launch_bounds__(THREADS) cache_write_kernel(cache_write w) {
  const pagedattn_write_params& p = w.p;
  const int vectors_of_head = p.head_dim / WIDTH;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t group = index / w.token_run, vectors = p.num_kv_heads * vectors_of_head;
  const int64_t token = group / vectors * w.token_run + index % w.token_run;
  if (token >= p.num_tokens) return;
  const int64_t at = token * p.slot_stride;
  const int64_t slot = p.slot_bytes == 8 ? static_cast<const int64_t*>(p.slots)[at]
                                         : static_cast<const int32_t*>(p.slots)[at];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return;
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  const int vector = static_cast<int>(group % vectors);
  const int head = vector / vectors_of_head, d = vector % vectors_of_head * WIDTH;

  const divisor k(p.k_scale_value, p.k_scale, p.k_scale_count, head);
  const divisor v(p.v_scale_value, p.v_scale, p.v_scale_count, head);
  const int within = d & ((1 << p.key_pack_shift) - 1);
  write_elements<WIDTH>(
      p.key, token * p.key_token_stride + head * p.key_head_stride + d * p.key_dim_stride,
      p.key_cache,
      block * p.key_cache_block_stride + head * p.key_cache_head_stride +
          offset * p.key_cache_token_stride +
          (d >> p.key_pack_shift) * p.key_cache_chunk_stride + within,
      1, k);
  write_elements<WIDTH>(
      p.value, token * p.value_token_stride + head * p.value_head_stride + d * p.value_dim_stride,
      p.value_cache,
      block * p.value_cache_block_stride + head * p.value_cache_head_stride +
          offset * p.value_cache_token_stride + d * p.value_cache_dim_stride,
      p.value_cache_dim_stride, v);
}

template <int WIDTH>
int launch_write(const pagedattn_write_params& p, cudaStream_t stream) {
  cache_write w = {p, 1};
  // where the tokens of an element lie side by side, so do the threads that write them
  if (p.value_cache_token_stride < p.value_cache_dim_stride)
    while (w.token_run < 16 && w.token_run < p.num_tokens) w.token_run *= 2;
  const int64_t runs = (p.num_tokens + w.token_run - 1) / w.token_run;
  const int64_t of_run = static_cast<int64_t>(p.num_kv_heads) * (p.head_dim / WIDTH) * w.token_run;
  if (runs == 0 || of_run == 0) return cudaSuccess;
  if (of_run > MOST_BLOCKS || runs > MOST_BLOCKS / of_run * THREADS) return TOO_MANY_BLOCKS;
  return launch(cache_write_kernel<WIDTH>, (runs * of_run + THREADS - 1) / THREADS, w, stream);
}

/// The widest loads and stores that the strides allow.
inline int write_to_cache(const pagedattn_write_params& p, cudaStream_t stream) {
  constexpr int size = size_of_type(QUERY_TYPE), kv_size = size_of_type(KV_TYPE);
  constexpr int width = 16 / size;
  const bool sources = p.key_dim_stride == 1 && p.value_dim_stride == 1 &&
                       aligned(16, size, p.key, p.key_token_stride, p.key_head_stride) &&
                       aligned(16, size, p.value, p.value_token_stride, p.value_head_stride);
  const bool keys = (1 << p.key_pack_shift) % width == 0 &&
                    aligned(width * kv_size, kv_size, p.key_cache, p.key_cache_block_stride,
                            p.key_cache_head_stride, p.key_cache_token_stride,
                            p.key_cache_chunk_stride);
  const bool values = p.value_cache_dim_stride != 1 ||
                      aligned(width * kv_size, kv_size, p.value_cache, p.value_cache_block_stride,
                              p.value_cache_head_stride, p.value_cache_token_stride);
  return p.head_dim % width == 0 && sources && keys && values ? launch_write<width>(p, stream)
                                                              : launch_write<1>(p, stream);
}

}  // namespace pagedattn

extern "C" int pagedattn_write(const pagedattn_write_params* params, void* stream) {
  const int code = pagedattn::write_to_cache(*params, static_cast<cudaStream_t>(stream));
  if (code > 0) cudaGetLastError();  // a refused launch must not be told again by the next caller
  return code;
}

extern "C" int pagedattn_write_abi(void) {
  return PAGEDATTN_WRITE_ABI_VERSION * 65536 + static_cast<int>(sizeof(pagedattn_write_params));
}
