// Stored types to float and back, and vector loads whose width is known when compiling.
//
// Elements travel as their bits: no bf16 or fp8 header is needed, which some compilers lack.
#pragma once

#include <cuda_fp16.h>

#include "problem_class.cuh"

namespace pagedattn {

__host__ __device__ constexpr int size_of_type(int type) { return type <= PA_BF16 ? 2 : type == PA_F32 ? 4 : 1; }

/// The float that an element's bits stand for.
template <int TYPE>
PA_DEVICE float to_float(unsigned bits) {
  if (TYPE == PA_F16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  if (TYPE == PA_BF16) return __uint_as_float(bits << 16);
  if (TYPE == PA_F32) return __uint_as_float(bits);
  if (TYPE == PA_INT8) return static_cast<float>(static_cast<signed char>(bits));
  if (TYPE == PA_E5M2)  // the upper byte of an fp16
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits << 8)));
  // e4m3 laid into an fp16's fields reads 2^-8 of its value, its subnormals included
  if ((bits & 0x7fu) == 0x7fu) return __uint_as_float(0x7fffffffu);
  const unsigned half_bits = (bits & 0x80u) << 8 | (bits & 0x7fu) << 7;
  return 256.0f * __half2float(__ushort_as_half(static_cast<unsigned short>(half_bits)));
}

/// Write one element of the query's type, rounded to nearest even.
PA_DEVICE void store_output(void* out, int64_t index, float value) {
  if (QUERY_TYPE == PA_F32) {
    static_cast<float*>(out)[index] = value;
  } else if (QUERY_TYPE == PA_F16) {
    static_cast<unsigned short*>(out)[index] = __half_as_ushort(__float2half_rn(value));
  } else {
    unsigned bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? 0x7fff0000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    static_cast<unsigned short*>(out)[index] = static_cast<unsigned short>(bits >> 16);
  }
}

/// BYTES consecutive bytes of memory as 32-bit words; the address must be a multiple of BYTES.
template <int BYTES>
struct packed_bytes {
  static_assert(BYTES == 1 || BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "no such load");
  unsigned word[(BYTES + 3) / 4];

  PA_DEVICE void load(const void* address) {
    if constexpr (BYTES == 16) {
      const uint4 v = *static_cast<const uint4*>(address);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else if constexpr (BYTES == 8) {
      const uint2 v = *static_cast<const uint2*>(address);
      word[0] = v.x, word[1] = v.y;
    } else if constexpr (BYTES == 4) {
      word[0] = *static_cast<const unsigned*>(address);
    } else if constexpr (BYTES == 2) {
      word[0] = *static_cast<const unsigned short*>(address);
    } else {
      word[0] = *static_cast<const unsigned char*>(address);
    }
  }

  PA_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) word[i] = 0u;
  }
};

/// WIDTH consecutive elements of one type, still as stored.
template <int TYPE, int WIDTH>
struct stored_vector {
  static constexpr int SIZE = size_of_type(TYPE);
  packed_bytes<SIZE * WIDTH> bytes;

  /// Load from `base`, an array of the type, at element `index`.
  PA_DEVICE void load(const void* base, int64_t index) {
    bytes.load(static_cast<const unsigned char*>(base) + index * SIZE);
  }

  PA_DEVICE void clear() { bytes.clear(); }

  PA_DEVICE float get(int i) const {
    const unsigned word = bytes.word[i * SIZE / 4] >> (i * SIZE % 4 * 8);
    return to_float<TYPE>(SIZE == 4 ? word : SIZE == 2 ? word & 0xffffu : word & 0xffu);
  }
};

}  // namespace pagedattn
