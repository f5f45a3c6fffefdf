// Kernels that probe each instruction of ptx.cuh: the emulation is held to what they should give,
// and nvcc compiles them for the devices that they are meant for.
#include "ptx.cuh"

namespace {

using namespace pagedattn;

struct arguments {
  const void* in;
  void* out;
  int choice;  // of a kernel that can go wrong: how
};

constexpr int ROW = 72;  // elements of a padded row: rows fall into different banks

// ---- matrices: one warp

// out [16][8] = a [16][16] · b [16][8], both dense and one after the other.
template <int TYPE>
__device__ void multiply(const arguments& x) {
  __shared__ __align__(128) unsigned short a[16 * 24], b[16 * 24];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32)
    a[i / 16 * 24 + i % 16] = static_cast<const unsigned short*>(x.in)[i];
  for (int i = lane; i < 128; i += 32)
    b[i / 8 * 24 + i % 8] = static_cast<const unsigned short*>(x.in)[256 + i];
  __syncwarp();
  unsigned left[4], right[4];
  load_matrices(left, a + lane % 16 * 24 + lane / 16 * 8);
  load_matrices_transposed(right, b + lane % 16 * 24);  // the last two are the first two
  float c[4] = {};
  multiply_add<TYPE>(c, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i)
    static_cast<float*>(x.out)[(lane / 4 + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2] = c[i];
}
__global__ void multiplies_half(arguments x) { multiply<PA_F16>(x); }
__global__ void multiplies_bf16(arguments x) { multiply<PA_BF16>(x); }

// Four 8 × 8 matrices as a lane has them: loaded; loaded transposed; loaded, each then transposed.
__global__ void loads_matrices(arguments x) {
  __shared__ __align__(128) unsigned short m[256 + 8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) m[i] = static_cast<const unsigned short*>(x.in)[i];
  __syncwarp();
  unsigned got[4];
  if (x.choice == 1) load_matrices_transposed(got, m + 8 * lane);
  else if (x.choice == 3) load_matrices(got, m + 8 * lane + 1);  // not aligned
  else if (x.choice != 4 || lane != 5) load_matrices(got, m + 8 * lane);  // or without one lane
  for (int i = 0; i < 4; ++i) {
    if (x.choice == 2) got[i] = transpose_matrix(got[i]);
    static_cast<unsigned*>(x.out)[i * 32 + lane] = got[i];
  }
}

// A column of 64-element rows, padded or not: whether its load meets conflicts.
__global__ void loads_a_column(arguments x) {
  __shared__ __align__(128) unsigned short m[32 * ROW];
  const int lane = threadIdx.x, row = x.choice ? ROW : 64;
  for (int i = lane; i < 32 * ROW; i += 32) m[i] = 0;
  __syncwarp();
  unsigned got[4];
  load_matrices(got, m + lane * row);
  static_cast<unsigned*>(x.out)[lane] = got[0] + got[1] + got[2] + got[3];
}

// Different instructions in the two halves of a warp.
__global__ void meets_in_two_places(arguments x) {
  __shared__ __align__(128) unsigned short m[256];
  unsigned got[4] = {};
  m[8 * threadIdx.x] = 0;
  __syncwarp();
  if (threadIdx.x < 16) load_matrices(got, m + 8 * threadIdx.x);
  else got[0] = transpose_matrix(got[1]);
  static_cast<unsigned*>(x.out)[threadIdx.x] = got[0];
}

// ---- copies

enum how {
  RIGHT, READS_EARLY, WAITS_FOR_MORE, COPIES_MORE, MISALIGNED, NO_FENCE, TOO_FEW_ARRIVALS,
  ARRIVES_TWICE, NEVER_WAITS, WRITES_BEYOND
};

// Rounds of two copies of 64 floats through one barrier; out [rounds][128] is what was read.
__global__ void copies_in_bulk(arguments x) {
  PA_DYNAMIC_SHARED(memory);
  float* const tile = reinterpret_cast<float*>(memory);
  copy_barrier* const barrier = reinterpret_cast<copy_barrier*>(memory + 512);
  const float* const in = static_cast<const float*>(x.in);
  const int thread = threadIdx.x;
  if (thread == 0) {
    init_barrier(barrier, x.choice == TOO_FEW_ARRIVALS ? 2 : 1);
    if (x.choice != NO_FENCE) fence_barrier_init();
    if (x.choice == WRITES_BEYOND) memory[1024] = 1;
  }
  __syncthreads();
  for (int round = 0; round < 3; ++round) {
    if (thread == 0) {
      expect_bytes(barrier, x.choice == WAITS_FOR_MORE ? 528 : x.choice == COPIES_MORE ? 496 : 512);
      if (x.choice == ARRIVES_TWICE) expect_bytes(barrier, 0);
      const int shift = x.choice == MISALIGNED ? 1 : 0;
      bulk_copy(tile, in + 128 * round + shift, 256, barrier, cache_policy_for(true));
      bulk_copy(tile + 64, in + 128 * round + 64, 256, barrier, cache_policy_for(false));
    }
    if (x.choice == READS_EARLY) __syncthreads();
    else if (x.choice != NEVER_WAITS) wait_barrier(barrier, round % 2);
    static_cast<float*>(x.out)[128 * round + thread] = tile[thread];
    __syncthreads();  // before the next round overwrites what others still read
    if (x.choice == READS_EARLY) wait_barrier(barrier, round % 2);
    if (x.choice == READS_EARLY) __syncthreads();
  }
}

// Each lane copies 16 bytes twice, in two groups, and reads after a wait for the first one.
__global__ void copies_in_groups(arguments x) {
  __shared__ __align__(128) float first[128], second[128];
  const float* const in = static_cast<const float*>(x.in);
  float* const out = static_cast<float*>(x.out);
  const int at = 4 * threadIdx.x;
  copy_16(first + at, in + at + (x.choice == MISALIGNED ? 1 : 0));
  commit_copies();
  copy_16(second + at, in + 128 + at);
  if (x.choice != NEVER_WAITS) commit_copies();
  wait_copies<1>();
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[32 * i + threadIdx.x] = first[32 * i + threadIdx.x];
  for (int i = 0; i < 4; ++i) out[128 + 32 * i + threadIdx.x] = second[32 * i + threadIdx.x];
  __syncwarp();  // all have seen the second group on its way
  wait_copies<0>();
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[256 + 32 * i + threadIdx.x] = second[32 * i + threadIdx.x];
}

// ---- numbers

// out: a thread's two bytes as fp16 from e4m3, e5m2, int8; 65536 threads.
__global__ void widens_bytes(arguments x) {
  const unsigned two = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned* const out = static_cast<unsigned*>(x.out);
  const unsigned short bytes = static_cast<unsigned short>(two);
  out[two] = half_pair_from_e4m3(bytes);
  out[65536 + two] = half_pair_from_e5m2(bytes);
  out[131072 + two] = half_pair_from_int8(bytes);
}

// in: floats; out: neighbours rounded to fp16, to bf16, and 2^x of each.
__global__ void rounds_floats(arguments x) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, count = gridDim.x * blockDim.x;
  const float* const in = static_cast<const float*>(x.in);
  unsigned* const out = static_cast<unsigned*>(x.out);
  out[i] = pack_pair<PA_F16>(in[2 * i], in[2 * i + 1]);
  out[count + i] = pack_pair<PA_BF16>(in[2 * i], in[2 * i + 1]);
  for (int j = 0; j < 2; ++j)
    reinterpret_cast<float*>(out)[2 * count + 2 * i + j] = exp2_fast(in[2 * i + j]);
}

// A dependent launch: every thread goes on.
__global__ void hands_over(arguments x, int value) {
  wait_for_primary();
  static_cast<int*>(x.out)[threadIdx.x] = value;
  launch_dependents();
}

int launch(void (*kernel)(arguments), arguments x, int blocks, int threads, size_t shared) {
  void* given[] = {&x};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), given, shared, nullptr);
}

}  // namespace

#define RUNS(kernel)                                                                       \
  extern "C" int run_##kernel(const void* in, void* out, int choice, int blocks, int threads, \
                              int shared) {                                                \
    return launch(kernel, {in, out, choice}, blocks, threads, shared);                     \
  }
RUNS(multiplies_half)
RUNS(multiplies_bf16)
RUNS(loads_matrices)
RUNS(loads_a_column)
RUNS(meets_in_two_places)
RUNS(copies_in_bulk)
RUNS(copies_in_groups)
RUNS(widens_bytes)
RUNS(rounds_floats)

extern "C" int run_hands_over(void* out, int value) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1), config.blockDim = dim3(32);
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, hands_over, arguments{nullptr, out, 0}, value);
}

// What a launch of the kernel of bulk copies may ask for, and what the device is said to be.
extern "C" int ask_for_shared(int bytes) {
  return cudaFuncSetAttribute(copies_in_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
extern "C" int device_attribute(int which) {
  int device = -1, value = -1;
  if (cudaGetDevice(&device)) return -1;
  return cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(which), device) ? -1 : value;
}
