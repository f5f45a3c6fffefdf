// CUDA on a CPU, as much as the sources use: blocks one after the other, the threads of a block as
// fibres that switch at barriers and shuffles. The warp size is set at run time.
//
// Beside running a kernel it tells what is undefined on a device: a barrier or a shuffle that not
// every thread reaches, and a shuffle whose mask leaves out a lane that calls it. The threads run
// in rising or falling order, so that a missing barrier changes the result of one of the two.
#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static  // one block runs at a time

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

typedef int cudaError_t;
typedef void* cudaStream_t;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1,
                      cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719;

namespace emulation {

enum class waits { nothing, block, warp, cluster, event, ended };

struct fibre {
  ucontext_t context;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  waits state = waits::nothing;
  std::function<bool()> happened;  // what an event's wait is for
  bool started = false;
};

constexpr int STACK_BYTES = 128 * 1024;

inline int warp_size = 32;
inline bool falling = false;
inline const char* fault = nullptr;  // the first thing found that a device leaves undefined
inline std::vector<fibre> fibres;
inline std::vector<unsigned> exchange;  // a value of each thread, for shuffles
inline int current = 0;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::vector<void (*)()> at_block_start, at_block_end;  // of further parts of the emulation

}  // namespace emulation

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

inline void tell(const char* what) {
  if (!fault) fault = what;
}

/// Give way to the scheduler until it runs this fibre again.
inline void give_way(waits what) {
  fibre& self = fibres[current];
  self.state = what;
  if (_setjmp(self.resume) == 0) _longjmp(scheduler, 1);
}

/// Wait for what another thread brings about; `happened` must change nothing.
inline void wait_until(std::function<bool()> happened) {
  if (happened()) return;
  fibres[current].happened = std::move(happened);
  give_way(waits::event);
}

inline void entry() {
  body();
  fibres[current].state = waits::ended;
  _longjmp(scheduler, 1);
}

inline void start(fibre& f) {
  f.started = true;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = STACK_BYTES;
  f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
  setcontext(&f.context);
}

inline void set_thread(int index) {
  current = index;
  threadIdx.x = index % blockDim.x;
  threadIdx.y = index / blockDim.x % blockDim.y;
  threadIdx.z = index / blockDim.x / blockDim.y;
}

/// Release [first, last) if all of them that have not ended wait for `what`.
inline bool release(int first, int last, waits what) {
  int waiting = 0, ended = 0;
  for (int i = first; i < last; ++i) {
    waiting += fibres[i].state == what;
    ended += fibres[i].state == waits::ended;
  }
  if (waiting == 0 || waiting + ended < last - first) return false;
  if (ended > 0) tell("some threads had ended when the others met");
  for (int i = first; i < last; ++i)
    if (fibres[i].state == what) fibres[i].state = waits::nothing;
  return true;
}

/// Run every fibre that can run once, up to where it waits; whether any did.
inline bool sweep(int first, int last) {
  volatile bool ran = false;
  for (volatile int n = 0; n < last - first; n = n + 1) {
    const int i = falling ? last - 1 - n : first + n;
    if (fibres[i].state == waits::event && fibres[i].happened())
      fibres[i].state = waits::nothing;
    if (fibres[i].state != waits::nothing) continue;
    ran = true;
    set_thread(i);
    if (_setjmp(scheduler) == 0) {
      if (fibres[i].started) _longjmp(fibres[i].resume, 1);
      else start(fibres[i]);
    }
  }
  return ran;
}

inline void tell_of_deadlock() {
  for (const fibre& f : fibres)
    if (f.state == waits::event) return tell("a wait for copies that never complete");
  tell("threads wait for others that never come (a barrier or shuffle under a condition)");
}

inline void begin_block() {
  for (fibre& f : fibres) f.started = false, f.state = waits::nothing;
  for (const auto step : at_block_start) step();
}

/// Where a block stops: at its end, where it meets its cluster, or as its threads wait for one
/// another for ever.
enum class stop_at { end, cluster, deadlock };

inline stop_at run_block() {
  const int threads = static_cast<int>(fibres.size());
  for (;;) {
    volatile bool moved = false;
    const int warps = (threads + warp_size - 1) / warp_size;
    for (int n = 0; n < warps; ++n) {
      const int w = falling ? warps - 1 - n : n;
      const int first = w * warp_size, last = std::min(first + warp_size, threads);
      while (sweep(first, last)) {  // a warp runs until the block's barrier holds it
        moved = true;
        release(first, last, waits::warp);
      }
    }
    if (release(0, threads, waits::block)) moved = true;
    int ended = 0, met = 0;
    for (const fibre& f : fibres) ended += f.state == waits::ended, met += f.state == waits::cluster;
    if (ended == threads || met == threads) {
      if (met == 0) for (const auto step : at_block_end) step();
      return met == 0 ? stop_at::end : stop_at::cluster;
    }
    if (!moved) {
      tell_of_deadlock();
      return stop_at::deadlock;
    }
  }
}

inline void make_fibres(unsigned threads) {
  if (fibres.size() == threads) return;
  fibres = std::vector<fibre>(threads);
  for (fibre& f : fibres) f.stack.reset(new char[STACK_BYTES]);
  exchange.assign(threads, 0);
}

/// A value of another lane of the hardware warp, all of whose lanes exchange at once.
template <class T>
T shuffle(unsigned long long mask, T value, int lane_of_warp) {
  static_assert(sizeof(T) == 4, "32-bit values only");
  const int lane = current % warp_size, first = current - lane;
  if (!(mask >> lane & 1)) tell("a lane shuffles that the mask does not name");
  memcpy(&exchange[current], &value, 4);
  give_way(waits::warp);
  T got;
  memcpy(&got, &exchange[first + lane_of_warp], 4);
  give_way(waits::warp);  // before the next shuffle overwrites it
  return got;
}

/// Launch with `cluster` consecutive blocks in a cluster: see emulated_cluster.h.
inline bool run_cluster(dim3 first, int blocks, unsigned threads);

inline cudaError_t launch(dim3 grid, dim3 block, int cluster = 1) {
  if (grid.x == 0 || block.x == 0 || block.x * block.y * block.z > 1024 ||
      grid.x % cluster != 0)
    return cudaErrorInvalidConfiguration;
  gridDim = grid, blockDim = block;
  const unsigned threads = block.x * block.y * block.z;
  make_fibres(threads);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += cluster) {
        blockIdx = dim3(x, y, z);
        if (cluster > 1) {
          if (!run_cluster(blockIdx, cluster, threads)) return cudaErrorLaunchFailure;
          continue;
        }
        begin_block();
        if (run_block() != stop_at::end) return cudaErrorLaunchFailure;
      }
  return fault ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emulation

inline void __syncthreads() { emulation::give_way(emulation::waits::block); }

inline void __syncwarp(unsigned long long mask = ~0ull) {
  if (!(mask >> emulation::current % emulation::warp_size & 1))
    emulation::tell("a lane meets others by a mask that does not name it");
  emulation::give_way(emulation::waits::warp);
}

template <class T>
T __shfl_xor_sync(unsigned long long mask, T value, int other, int width = emulation::warp_size) {
  const int lane = emulation::current % emulation::warp_size;
  const int source = lane ^ other, segment_end = (lane / width + 1) * width;
  return emulation::shuffle(mask, value, source < segment_end ? source : lane);
}

template <class T>
T __shfl_sync(unsigned long long mask, T value, int lane, int width = emulation::warp_size) {
  const int self = emulation::current % emulation::warp_size;
  return emulation::shuffle(mask, value, self / width * width + lane % width);
}

template <class T>
T __shfl_down_sync(unsigned long long mask, T value, int by, int width = emulation::warp_size) {
  const int lane = emulation::current % emulation::warp_size;
  return emulation::shuffle(mask, value, lane % width + by < width ? lane + by : lane);
}

/// Whether any lane's `value` is true, all lanes of the warp asking.
inline int __any_sync(unsigned long long mask, int value) {
  for (int offset = 1; offset < emulation::warp_size; offset *= 2)
    value |= __shfl_xor_sync(mask, value, offset);
  return value != 0;
}

template <class T>
T atomicAdd(T* address, T value) {  // fibres do not switch here
  const T old = *address;
  *address += value;
  return old;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t code) {
  if (emulation::fault) return emulation::fault;
  return code == cudaSuccess ? "no error" : "the launch failed";
}

inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

/// Four of the eight bytes of a (0 to 3) and b (4 to 7), as the selector's nibbles say.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 0xfu;
    unsigned byte = bytes >> 8 * (nibble & 7u) & 0xffu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0u;  // its sign
    chosen |= byte << 8 * i;
  }
  return chosen;
}

struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }

inline float __half2float(__half value) {
  const unsigned sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // the fields moved into a float's, whose exponent is biased by 112 more; subnormals too
  const float magnitude = __uint_as_float(rest << 13) * 0x1p112f;
  return __uint_as_float(sign | __float_as_uint(magnitude));
}

inline __half __float2half_rn(float value) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
  const unsigned rest = bits & 0x7fffffffu;
  unsigned half;
  if (rest > 0x7f800000u) half = 0x7fffu;
  else if (rest >= 0x477ff000u) half = 0x7c00u;  // 65520 and more round to infinity
  else if (rest < 0x38800000u)  // subnormal: the sum's last place is a half's
    half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
  else half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  return {static_cast<unsigned short>(sign | half)};
}

// What a test sets and asks of a library that was compiled with this header.
extern "C" inline __attribute__((used)) void emulation_configure(int warp_size, int falling) {
  emulation::warp_size = warp_size;
  emulation::falling = falling != 0;
  emulation::fault = nullptr;
}
extern "C" inline __attribute__((used)) const char* emulation_fault() { return emulation::fault; }

#include "emulated_cluster.h"
