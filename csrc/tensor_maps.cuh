// Tensor maps: how the copy engine of sm_90 finds a token's rows in a cache of the NHD and HND
// layouts. Made on the host for each call, as it is a few words from the call's own strides.
#pragma once

#include "ptx.cuh"

namespace pagedattn {

/// A cache whose tokens are rows, in bytes; a row is cut into chunks of 128.
struct cache_rows {
  const void* base;
  int64_t token_stride, head_stride, block_stride;
  int64_t num_heads, num_blocks;
  int block_size, chunks, element;
  int tokens;  // of a copy
};

}  // namespace pagedattn

#ifndef PAGEDATTN_EMULATED_PTX
#include <cuda.h>

namespace pagedattn {

using encode_function = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, found through the runtime so that the library needs no libcuda to load;
/// nullptr where the driver has none.
inline encode_function find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                            cudaEnableDefault, &result);
#else
  const cudaError_t code =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  const bool is_there = code == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return is_there ? reinterpret_cast<encode_function>(found) : nullptr;
}

namespace {  // the function's own copy of `encode`: the loader would share it between libraries

/// Whether the engine can copy from these rows; then `map` says how: a box is `tokens` rows, of
/// all chunks, in shared memory chunk by chunk, the 16 bytes of a row permuted by its number.
inline bool encode_map(tensor_map& map, const cache_rows& rows) {
  static_assert(sizeof(tensor_map) == sizeof(CUtensorMap), "the driver's type");
  static const encode_function encode = find_encode();
  if (!encode) return false;
  const cuuint32_t inner = 128 / rows.element, tokens = rows.tokens, chunks = rows.chunks;
  const cuuint64_t size[5] = {inner, static_cast<cuuint64_t>(rows.block_size), chunks,
                              static_cast<cuuint64_t>(rows.num_heads),
                              static_cast<cuuint64_t>(rows.num_blocks)};
  const cuuint64_t stride[4] = {static_cast<cuuint64_t>(rows.token_stride), 128,
                                static_cast<cuuint64_t>(rows.head_stride),
                                static_cast<cuuint64_t>(rows.block_stride)};
  const cuuint32_t box[5] = {inner, tokens, chunks, 1, 1}, every[5] = {1, 1, 1, 1, 1};
  return encode(reinterpret_cast<CUtensorMap*>(&map),
                rows.element == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                5, const_cast<void*>(rows.base), size, stride, box, every,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

}  // namespace pagedattn
#endif
