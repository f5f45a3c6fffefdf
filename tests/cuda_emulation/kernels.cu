// Kernels with a fault that the emulation must show, and the conversions by themselves.
#include "attention_partial.cuh"
#include "block_reduce.cuh"
#include "convert.cuh"

namespace {

struct arguments {
  float* data;
};

// Rows of 32 threads, each to be divided by its first lane's value: the broadcast names no width,
// so in a warp of 64 the second row gets the first one's.
__global__ void takes_warps_for_32(arguments a) {
  const float mine = a.data[threadIdx.x];
  a.data[threadIdx.x] = mine / __shfl_sync(PA_ALL_LANES, mine, 0);
}

// The same with its width.
__global__ void names_its_width(arguments a) {
  const float mine = a.data[threadIdx.x];
  a.data[threadIdx.x] = mine / __shfl_sync(PA_ALL_LANES, mine, 0, 32);
}

// Neighbours read each other's value with no barrier between.
__global__ void forgets_a_barrier(arguments a) {
  __shared__ float shared[128];
  shared[threadIdx.x] = a.data[threadIdx.x];
  const float left = threadIdx.x > 0 ? shared[threadIdx.x - 1] : 0.0f;
  const float right = threadIdx.x < 127 ? shared[threadIdx.x + 1] : 0.0f;
  __syncthreads();
  a.data[threadIdx.x] = left + right;
  shared[threadIdx.x] = 0.0f;
}

// Half of each 64 threads shuffles: with warps of 32 that is whole warps.
__global__ void shuffles_in_a_branch(arguments a) {
  if (threadIdx.x / 32 % 2 == 0)
    a.data[threadIdx.x] = __shfl_xor_sync(PA_ALL_LANES, a.data[threadIdx.x], 1, 32);
  __syncthreads();
}

// The mask of a warp of 32.
__global__ void names_32_lanes(arguments a) {
  a.data[threadIdx.x] = __shfl_xor_sync(0xffffffffu, a.data[threadIdx.x], 1, 32);
}

__global__ void barrier_in_a_branch(arguments a) {
  if (threadIdx.x < 96) __syncthreads();
  a.data[threadIdx.x] = 1.0f;
}

__global__ void reduces(arguments a) {
  __shared__ pagedattn::block_reduce_storage shared;
  const float mine = a.data[threadIdx.x];
  const float sum = pagedattn::block_sum(mine, shared), top = pagedattn::block_max(mine, shared);
  a.data[threadIdx.x] = threadIdx.x % 2 ? top : sum;
}

template <class Kernel>
int launch(Kernel kernel, float* data) {
  arguments a = {data};
  void* given[] = {&a};
  return cudaLaunchKernel(kernel, dim3(1), dim3(128), given, 0, nullptr);
}

}  // namespace

#define RUNS(kernel) \
  extern "C" int run_##kernel(float* data) { return launch(kernel, data); }
RUNS(takes_warps_for_32)
RUNS(names_its_width)
RUNS(forgets_a_barrier)
RUNS(shuffles_in_a_branch)
RUNS(names_32_lanes)
RUNS(barrier_in_a_branch)
RUNS(reduces)

extern "C" void kv_to_float(const uint32_t* bits, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = pagedattn::to_float<PAGEDATTN_KV_TYPE>(bits[i]);
}

extern "C" void float_to_query(const float* from, void* to, int count) {
  for (int i = 0; i < count; ++i) pagedattn::store_output(to, i, from[i]);
}

// combine(left, right) as (max, sum) pairs
extern "C" void combine_states(const float* left, const float* right, float* to) {
  const pagedattn::combined c =
      pagedattn::combine({left[0], left[1]}, {right[0], right[1]});
  to[0] = c.state.max_score, to[1] = c.state.sum, to[2] = c.left, to[3] = c.right;
}
