// Reductions in logical groups of at most 32 lanes, whatever the hardware's warp is.
//
// A hardware warp of 64 holds two groups of 32; the explicit width keeps them apart. Every thread
// of the block must call, since a hardware warp may span groups.
#pragma once

#include "problem_class.cuh"

namespace pagedattn {

constexpr int LOGICAL_WARP = 32;

/// The mask of every lane, as wide as the shuffle that it is given to takes it (32 or 64 bits).
struct all_lanes {
  template <class Mask>
  PA_DEVICE operator Mask() const { return ~Mask(0); }
};
#define PA_ALL_LANES (pagedattn::all_lanes())

/// The sum over WIDTH neighbouring lanes, in each of them.
template <int WIDTH>
PA_DEVICE float group_sum(float value) {
  static_assert(WIDTH <= LOGICAL_WARP && (WIDTH & (WIDTH - 1)) == 0, "a power of two up to 32");
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(PA_ALL_LANES, value, offset, WIDTH);
  return value;
}

/// The greatest over WIDTH neighbouring lanes, in each of them; a NaN is passed over.
template <int WIDTH>
PA_DEVICE float group_max(float value) {
  static_assert(WIDTH <= LOGICAL_WARP && (WIDTH & (WIDTH - 1)) == 0, "a power of two up to 32");
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(PA_ALL_LANES, value, offset, WIDTH));
  return value;
}

/// The value of the lane `distance` (a power of two) away, in groups of WIDTH.
template <int WIDTH>
PA_DEVICE float group_exchange(float value, int distance) {
  return __shfl_xor_sync(PA_ALL_LANES, value, distance, WIDTH);
}

/// The value of one lane of each group of WIDTH.
template <int WIDTH, class T>
PA_DEVICE T group_broadcast(T value, int lane) {
  return __shfl_sync(PA_ALL_LANES, value, lane, WIDTH);
}

}  // namespace pagedattn
