// The part of CUDA's runtime that launches kernels and tells of the device; included by
// cuda_emulation.h.
//
// A launch's dynamic shared memory is filled with 0xFF (NaN in each type) before each block, and a
// block that writes beyond it is told. One that reads beyond it dies, where that was asked for.
#pragma once

#include <sys/mman.h>

#include <map>
#include <tuple>
#include <utility>

#define PA_DYNAMIC_SHARED(name) unsigned char* const name = emulation::dynamic_shared()

namespace emulation {

constexpr size_t SHARED_BYTES = 228 * 1024;
constexpr size_t MOST_DYNAMIC_BYTES = 227 * 1024;     // of a block, on sm_90
constexpr size_t UNASKED_DYNAMIC_BYTES = 48 * 1024;  // more must be asked for

constexpr size_t PAGE_BYTES = 4096;
alignas(PAGE_BYTES) inline unsigned char shared_memory[SHARED_BYTES + PAGE_BYTES];
inline bool shared_is_guarded = false;  // by the last page, before which it then ends
inline size_t dynamic_bytes = 0;        // of the launch that is running
inline std::map<void (*)(), size_t> most_dynamic_bytes;
inline int capability = 9, multiprocessors = 4;
inline int threads_of_last_launch = 0;  // of a block
inline int most_clustered = 0;          // blocks of a cluster, of the launches since the last ask
inline int clusters_together = 0;       // that the device runs at a time
inline std::vector<void (*)()> with_large_clusters;  // kernels that asked for them
constexpr int PORTABLE_CLUSTER = 8, LARGE_CLUSTER = 16;

inline unsigned char* shared_start() {
  const size_t bytes = (dynamic_bytes + 1023) / 1024 * 1024;  // for its alignment
  return shared_memory + (shared_is_guarded ? SHARED_BYTES - bytes : 0);
}

inline unsigned char* dynamic_shared() {
  if (dynamic_bytes == 0) tell("a kernel uses dynamic shared memory that its launch does not give");
  return shared_start();
}

/// Tell of an access beyond what the launch gave; where it is static memory nothing is known.
inline void check_shared(const void* address, size_t bytes) {
  const size_t offset = static_cast<const unsigned char*>(address) - shared_start();
  if (offset < SHARED_BYTES && offset + bytes > dynamic_bytes)
    tell("an access beyond the dynamic shared memory of the launch");
}

inline void fill_shared() {
  if (dynamic_bytes > 0) memset(shared_memory, 0xff, SHARED_BYTES);
}

inline void check_rest_of_shared() {
  if (dynamic_bytes == 0) return;
  const unsigned char* const rest = shared_start() + dynamic_bytes;
  const size_t bytes = shared_memory + SHARED_BYTES - rest;
  if (bytes == 0) return;
  if (rest[0] != 0xff || memcmp(rest, rest + 1, bytes - 1) != 0)  // each as the one before
    tell("a write beyond the dynamic shared memory");
}

inline const bool shared_is_watched = [] {
  at_block_start.push_back(fill_shared);
  at_block_end.push_back(check_rest_of_shared);
  return true;
}();

template <class... P>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                          int cluster = 1) {
  const auto asked = most_dynamic_bytes.find(reinterpret_cast<void (*)()>(kernel));
  const size_t most = asked == most_dynamic_bytes.end() ? UNASKED_DYNAMIC_BYTES : asked->second;
  if (shared > most) {
    tell("a launch with more dynamic shared memory than cudaFuncSetAttribute asked for");
    return cudaErrorInvalidValue;
  }
  dynamic_bytes = shared;
  threads_of_last_launch = static_cast<int>(block.x);
  most_clustered = max(most_clustered, cluster);
  const auto& asked_large = with_large_clusters;
  const bool large = std::find(asked_large.begin(), asked_large.end(),
                               reinterpret_cast<void (*)()>(kernel)) != asked_large.end();
  if (cluster > (large ? LARGE_CLUSTER : PORTABLE_CLUSTER) || (cluster > 1 && capability < 9)) {
    tell("a cluster larger than the device or cudaFuncSetAttribute allows");
    return cudaErrorInvalidValue;
  }
  return launch(grid, block, cluster);
}

}  // namespace emulation

template <class... P, size_t... I>
void emulation_bind(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  emulation::body = [=] { kernel(*static_cast<P*>(arguments[I])...); };
}

template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t) {
  emulation_bind(kernel, arguments, std::index_sequence_for<P...>());
  return emulation::launch_kernel(kernel, grid, block, shared);
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
union cudaLaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

/// Blocks of a cluster: x of what the launch says, else 1.
inline int cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      return static_cast<int>(config.attrs[i].val.clusterDim.x);
  return 1;
}

/// Launches run one after the other, so that only clusters have an effect.
template <class... P, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                               Given&&... arguments) {
  const std::tuple<P...> kept(std::forward<Given>(arguments)...);
  emulation::body = [=] { std::apply(kernel, kept); };
  return emulation::launch_kernel(kernel, config->gridDim, config->blockDim,
                                  config->dynamicSmemBytes, cluster_of(*config));
}

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 10,
};

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    if (value) emulation::with_large_clusters.push_back(reinterpret_cast<void (*)()>(kernel));
    return cudaSuccess;
  }
  if (value < 0 || static_cast<size_t>(value) > emulation::MOST_DYNAMIC_BYTES) {
    emulation::tell("more dynamic shared memory asked for than a block can have");
    return cudaErrorInvalidValue;
  }
  emulation::most_dynamic_bytes[reinterpret_cast<void (*)()>(kernel)] = value;
  return cudaSuccess;
}

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emulation::multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emulation::capability; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(emulation::MOST_DYNAMIC_BYTES);
      break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(P...), int,
                                                          size_t) {
  *blocks = 2;
  return cudaSuccess;
}

/// As many as the test has said; less than none is a device that does not say.
template <class... P>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(P...),
                                           const cudaLaunchConfig_t* config) {
  const bool whole = config->gridDim.x % cluster_of(*config) == 0;
  if (!whole || emulation::clusters_together < 0) return cudaErrorInvalidValue;
  *clusters = emulation::clusters_together;
  return cudaSuccess;
}

// How many clusters, of any size, the device runs at a time.
extern "C" inline __attribute__((used)) void emulation_clusters(int together) {
  emulation::clusters_together = together;
}
// Blocks of the largest cluster since the last call; 1 where no launch had any.
extern "C" inline __attribute__((used)) int emulation_most_clustered() {
  return std::exchange(emulation::most_clustered, 0);
}
// The device that the runtime tells of: its compute capability's major number, its size.
extern "C" inline __attribute__((used)) void emulation_capability(int major) {
  emulation::capability = major;
}
extern "C" inline __attribute__((used)) int emulation_threads_of_last_launch() {
  return emulation::threads_of_last_launch;
}
// From now on an access behind a block's dynamic shared memory ends the process.
extern "C" inline __attribute__((used)) int emulation_guard_shared() {
  emulation::shared_is_guarded = true;
  return mprotect(emulation::shared_memory + emulation::SHARED_BYTES, emulation::PAGE_BYTES,
                  PROT_NONE);
}
extern "C" inline __attribute__((used)) void emulation_multiprocessors(int count) {
  emulation::multiprocessors = count;
}
