// Reductions over a block of THREADS: within logical warps, then across them in shared memory.
#pragma once

#include "logical_warp.cuh"

namespace pagedattn {

constexpr int LOGICAL_WARPS = THREADS / LOGICAL_WARP;

struct block_reduce_storage {
  float part[LOGICAL_WARPS];
};

/// The sum over the block, in every thread and always in the same order. Two barriers.
PA_DEVICE float block_sum(float value, block_reduce_storage& shared) {
  value = group_sum<LOGICAL_WARP>(value);
  if (threadIdx.x % LOGICAL_WARP == 0) shared.part[threadIdx.x / LOGICAL_WARP] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < LOGICAL_WARPS; ++i) total += shared.part[i];
  __syncthreads();  // before the next use of the storage
  return total;
}

/// The greatest over the block, in every thread. Two barriers.
PA_DEVICE float block_max(float value, block_reduce_storage& shared) {
  value = group_max<LOGICAL_WARP>(value);
  if (threadIdx.x % LOGICAL_WARP == 0) shared.part[threadIdx.x / LOGICAL_WARP] = value;
  __syncthreads();
  float top = shared.part[0];
#pragma unroll
  for (int i = 1; i < LOGICAL_WARPS; ++i) top = fmaxf(top, shared.part[i]);
  __syncthreads();
  return top;
}

}  // namespace pagedattn
