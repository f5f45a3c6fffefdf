// A kernel's launch, as every compiler and the tests' emulation take it.
#pragma once

#include <cstddef>
#include <cstring>

#include "problem_class.cuh"

namespace pagedattn {

constexpr int64_t MOST_BLOCKS = 2147483647;  // of a grid

/// Codes of an entry that refused; cudaError_t's are positive.
enum refusal { NO_SPLITS = -1, TOO_MANY_BLOCKS = -2, BAD_SPLIT_SIZE = -3 };

inline pagedattn_params params_of(const pagedattn_call& call) {
  static_assert(sizeof(pagedattn_call) == (3 + PAGEDATTN_POINTERS) * 8, "as Python packs it");
  static_assert(offsetof(pagedattn_params, query_token_stride) == sizeof call.pointers,
                "the pointers stand first, and nothing else before the strides");
  pagedattn_params p = *call.shared;
  std::memcpy(&p, call.pointers, sizeof call.pointers);
  p.max_seq_len = static_cast<int32_t>(call.max_seq_len);
  return p;
}

template <class Parameters>
cudaError_t launch(void (*kernel)(Parameters), int64_t blocks, Parameters p, cudaStream_t stream) {
  void* arguments[] = {&p};
  const dim3 grid(static_cast<unsigned>(blocks));
#ifdef __CUDACC__
  // the headers before CUDA 12 have an overload for kernels that clang cannot match
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(THREADS), arguments, 0,
                          stream);
#else
  return cudaLaunchKernel(kernel, grid, dim3(THREADS), arguments, 0, stream);
#endif
}

}  // namespace pagedattn
