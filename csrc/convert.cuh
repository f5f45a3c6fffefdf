// Stored types to float and back, and vector loads whose width is known when compiling.
//
// Elements travel as their bits: no bf16 or fp8 header is needed, which some compilers lack.
#pragma once

#include <cuda_fp16.h>

#include "problem_class.cuh"

namespace pagedattn {

__host__ __device__ constexpr int size_of_type(int type) {
  return type <= PA_BF16 ? 2 : type == PA_F32 ? 4 : 1;
}

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

/// A magnitude (the bits of a float without its sign, at most the type's largest) rounded to nearest
/// even in a type with so many bits of mantissa, whose exponents are biased by BIAS.
template <int MANTISSA, int BIAS>
PA_DEVICE unsigned narrowed(unsigned bits) {
  constexpr int DROPPED = 23 - MANTISSA;
  if (bits < (128u - BIAS) << 23) {  // subnormal there: the last place of this sum is the type's
    constexpr unsigned anchor = (128u - BIAS + DROPPED) << 23;
    return __float_as_uint(__uint_as_float(bits) + __uint_as_float(anchor)) - anchor;
  }
  bits -= (127u - BIAS) << 23;
  return (bits + (1u << (DROPPED - 1)) - 1u + (bits >> DROPPED & 1u)) >> DROPPED;
}

/// The bits of `value` in a type: rounded to nearest even, and saturated where it has 8 bits.
template <int TYPE>
PA_DEVICE unsigned from_float(float value) {
  unsigned bits = __float_as_uint(value);
  if (TYPE == PA_F32) return bits;
  if (TYPE == PA_F16) return __half_as_ushort(__float2half_rn(value));
  const unsigned rest = bits & 0x7fffffffu;
  const bool is_nan = rest > 0x7f800000u;
  if (TYPE == PA_BF16) {
    bits = is_nan ? 0x7fff0000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    return bits >> 16;
  }
  if (TYPE == PA_INT8) {
    const int whole = is_nan ? 0 : static_cast<int>(rintf(fminf(fmaxf(value, -127.0f), 127.0f)));
    return static_cast<unsigned>(whole) & 0xffu;
  }
  const unsigned sign = bits >> 24 & 0x80u;
  if (is_nan) return sign | 0x7fu;
  return sign | (TYPE == PA_E4M3 ? narrowed<3, 7>(min(rest, 0x43e00000u))     // 448
                                 : narrowed<2, 15>(min(rest, 0x47600000u)));  // 57344
}

/// Write one element of a type at `index` of an array.
template <int TYPE>
PA_DEVICE void store_bits(void* to, int64_t index, unsigned bits) {
  if (size_of_type(TYPE) == 4) static_cast<unsigned*>(to)[index] = bits;
  else if (size_of_type(TYPE) == 2)
    static_cast<unsigned short*>(to)[index] = static_cast<unsigned short>(bits);
  else static_cast<unsigned char*>(to)[index] = static_cast<unsigned char>(bits);
}

/// Write one element of the query's type.
PA_DEVICE void store_output(void* out, int64_t index, float value) {
  store_bits<QUERY_TYPE>(out, index, from_float<QUERY_TYPE>(value));
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

  PA_DEVICE void store(void* address) const {
    if constexpr (BYTES == 16) {
      *static_cast<uint4*>(address) = {word[0], word[1], word[2], word[3]};
    } else if constexpr (BYTES == 8) {
      *static_cast<uint2*>(address) = {word[0], word[1]};
    } else if constexpr (BYTES == 4) {
      *static_cast<unsigned*>(address) = word[0];
    } else if constexpr (BYTES == 2) {
      *static_cast<unsigned short*>(address) = static_cast<unsigned short>(word[0]);
    } else {
      *static_cast<unsigned char*>(address) = static_cast<unsigned char>(word[0]);
    }
  }

  PA_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) word[i] = 0u;
  }
};

/// N floats, as one load where they are four; the address must be a multiple of their size.
template <int N>
PA_DEVICE void load_floats(float (&values)[N], const float* address) {
  if constexpr (N == 4) {
    const float4 v = *reinterpret_cast<const float4*>(address);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = address[i];
  }
}

/// WIDTH consecutive elements of one type, still as stored.
template <int TYPE, int WIDTH>
struct stored_vector {
  static constexpr int SIZE = size_of_type(TYPE);
  packed_bytes<SIZE * WIDTH> bytes;

  /// Load from `base`, an array of the type, at element `index`.
  PA_DEVICE void load(const void* base, int64_t index) {
    bytes.load(static_cast<const unsigned char*>(base) + index * SIZE);
  }

  PA_DEVICE void store(void* base, int64_t index) const {
    bytes.store(static_cast<unsigned char*>(base) + index * SIZE);
  }

  PA_DEVICE void clear() { bytes.clear(); }

  /// Element `i` becomes 0 unless it is to be kept.
  PA_DEVICE void keep(int i, bool kept) {
    const unsigned ones = SIZE == 4 ? ~0u : SIZE == 2 ? 0xffffu : 0xffu;
    if (!kept) bytes.word[i * SIZE / 4] &= ~(ones << (i * SIZE % 4 * 8));
  }

  PA_DEVICE unsigned bits(int i) const {
    const unsigned word = bytes.word[i * SIZE / 4] >> (i * SIZE % 4 * 8);
    return SIZE == 4 ? word : SIZE == 2 ? word & 0xffffu : word & 0xffu;
  }

  /// Element `i`, which must be clear before.
  PA_DEVICE void set(int i, unsigned bits) {
    bytes.word[i * SIZE / 4] |= bits << (i * SIZE % 4 * 8);
  }

  PA_DEVICE float get(int i) const { return to_float<TYPE>(bits(i)); }
};

}  // namespace pagedattn
