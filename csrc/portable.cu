// The portable kernels' entry: right on warps of 32 and of 64, no PTX, static shared memory.
//
// Compiled once for each class of problems (see pagedattn.h). The device is the caller's.
#include "alignment.cuh"
#include "cache_write.cuh"
#include "kernel_launch.cuh"
#include "portable_merge.cuh"

#ifdef PAGEDATTN_TUNED
#include "tuned.cuh"
#endif

namespace pagedattn {
namespace {

template <int ROWS, int KEY_WIDTH, class Values>
int decode(const pagedattn_params& p, cudaStream_t stream) {
  const int64_t tiles = (static_cast<int64_t>(p.max_query_len) * GROUP + ROWS - 1) / ROWS;
  const int64_t pairs = static_cast<int64_t>(p.num_seqs) * p.num_kv_heads;
  const int64_t parts = tiles * p.num_splits;
  if (parts > MOST_BLOCKS || (parts > 0 && pairs > MOST_BLOCKS / parts)) return TOO_MANY_BLOCKS;
  if (pairs * parts == 0) return cudaSuccess;
  return launch(decode_kernel<ROWS, KEY_WIDTH, Values>, pairs * parts, p, stream);
}

/// The widest loads that the strides allow; any strides at all are served one element at a time.
template <int ROWS>
int decode_by_layout(const pagedattn_params& p, cudaStream_t stream) {
  constexpr int size = size_of_type(KV_TYPE);
  // 8 at most: a thread holds all of four keys' elements, and a sum for each of a value's
  constexpr int key_width = widest(KV_TYPE, HEAD_DIM, 8);
  constexpr int dim_width = widest(KV_TYPE, HEAD_DIM, 8);
  constexpr int token_width = widest(KV_TYPE, BLOCK_SIZE, 16);
  const bool wide_keys =
      (1 << p.key_pack_shift) % key_width == 0 &&
      aligned(key_width * size, size, p.key_cache, p.key_block_stride, p.key_head_stride,
              p.key_token_stride, p.key_chunk_stride);
  if (wide_keys && p.value_dim_stride == 1 &&
      aligned(dim_width * size, size, p.value_cache, p.value_block_stride, p.value_head_stride,
              p.value_token_stride))
    return decode<ROWS, key_width, values_by_dim<dim_width>>(p, stream);
  if (wide_keys && p.value_token_stride == 1 &&
      aligned(token_width * size, size, p.value_cache, p.value_block_stride, p.value_head_stride,
              p.value_dim_stride))
    return decode<ROWS, key_width, values_by_token<token_width>>(p, stream);
  return decode<ROWS, 1, values_by_dim<1>>(p, stream);
}

int run(const pagedattn_params& p, cudaStream_t stream) {
#ifdef PAGEDATTN_TUNED
  if (p.team > 0) return p.num_tokens == 0 ? cudaSuccess : run_tuned(p, stream);
#else
  if (p.team > 0) return PAGEDATTN_REFUSED;
#endif
  if (p.num_splits < 1) return NO_SPLITS;
  if (p.tokens_per_split < 0 || p.tokens_per_split % TILE != 0) return BAD_SPLIT_SIZE;
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * p.num_heads;
  if (rows == 0) return cudaSuccess;
  if (rows > MOST_BLOCKS / ROW_PARTS) return TOO_MANY_BLOCKS;
  // with a fixed partition the batch must not choose the kernel, so only the argument's presence
  // does
  const bool single = p.tokens_per_split > 0 ? !p.query_start_loc : p.max_query_len == 1;
  const int code = single ? decode_by_layout<smaller(GROUP, MAX_ROWS)>(p, stream)
                          : decode_by_layout<MAX_ROWS>(p, stream);
  return code ? code : launch(merge_kernel, rows * ROW_PARTS, p, stream);
}

}  // namespace
}  // namespace pagedattn

extern "C" int pagedattn_run(const pagedattn_call* call) {
  const int code =
      pagedattn::run(pagedattn::params_of(*call), static_cast<cudaStream_t>(call->stream));
  if (code > 0) cudaGetLastError();  // a refused launch must not be told again by the next caller
  return code;
}

extern "C" const char* pagedattn_error(int code) {
  switch (code) {
    case pagedattn::NO_SPLITS: return "num_splits is less than 1";
    case pagedattn::TOO_MANY_BLOCKS: return "the grid would be too large";
    case pagedattn::BAD_SPLIT_SIZE: return "tokens_per_split is not a whole number of tiles of 128";
    default: return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

extern "C" int pagedattn_clustered(const pagedattn_call* call) {
#ifdef PAGEDATTN_TUNED
  return pagedattn::clusters_serve(pagedattn::params_of(*call));
#else
  (void)call;
  return 0;
#endif
}

extern "C" int pagedattn_tuned_warps(void) {
#ifdef PAGEDATTN_TUNED
  return pagedattn::TUNED_CLASS ? pagedattn::TUNED_WARPS : 0;
#else
  return 0;
#endif
}

extern "C" int pagedattn_abi(void) {
  return PAGEDATTN_ABI_VERSION * 65536 + static_cast<int>(sizeof(pagedattn_params));
}
