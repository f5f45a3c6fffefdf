// What ptx.cuh does on a device, for the emulation: matrices and numbers here, copies in
// emulated_copies.h. Compile with -DPAGEDATTN_EMULATED_PTX='"emulated_ptx.h"'.
//
// A lane reads a matrix when it runs on, not when the last lane has come: a write by another lane
// that no barrier of the warp holds back is seen by one of the two orders of the threads.
#pragma once

#include "convert.cuh"
#include "emulated_copies.h"

namespace emulation {

enum class meeting { none, load, load_transposed, transpose, multiply };

/// What a thread brings to meetings of its warp. Two of each: a lane may be at the next one while
/// others still read.
struct meeting_place {
  unsigned words[2][12];
  meeting kind[2];
  int turn;  // meetings so far
};

inline std::vector<meeting_place> places;
inline long bank_conflicts = 0;

inline const bool meetings_start_anew = [] {
  at_block_start.push_back([] { places.assign(fibres.size(), meeting_place{}); });
  return true;
}();

/// What all lanes of the warp brought.
struct gathered {
  const meeting_place* first;
  int turn;
  unsigned operator()(int lane, int word) const { return first[lane].words[turn & 1][word]; }
  float number(int lane, int word) const { return __uint_as_float((*this)(lane, word)); }
  const unsigned char* address(int lane) const {
    return reinterpret_cast<const unsigned char*>(
        static_cast<uintptr_t>((*this)(lane, 0)) |
        static_cast<uintptr_t>((*this)(lane, 1)) << 32);
  }
};

/// Tell a fault after which there is nothing to read: the thread goes no further.
inline void stop(const char* what) {
  tell(what);
  wait_until([] { return false; });
}

/// The lane's words to the others of its warp, all 32 of which must come to the same meeting.
template <size_t N>
gathered meet(meeting kind, const unsigned (&words)[N]) {
  const int first = current - current % 32;
  if (warp_size != 32 || first + 32 > static_cast<int>(places.size()))
    stop("an instruction of whole warps of 32 lanes in another warp");
  meeting_place& mine = places[current];
  const int turn = ++mine.turn;
  memcpy(mine.words[turn & 1], words, sizeof(words));
  mine.kind[turn & 1] = kind;
  give_way(waits::warp);
  for (int i = first; i < first + 32; ++i)
    if (places[i].turn < turn || places[i].kind[turn & 1] != kind)
      stop("lanes of a warp meet in different instructions");
  return {&places[first], turn};
}

/// How many times more than once the banks are read for the eight rows of a matrix.
inline int conflicts_of(const gathered& rows, int matrix) {
  uintptr_t seen[8][8];  // by four banks, the different rows that need them
  int count[8] = {}, most = 0;
  for (int lane = 8 * matrix; lane < 8 * matrix + 8; ++lane) {
    const uintptr_t row = reinterpret_cast<uintptr_t>(rows.address(lane)) / 16;
    const int banks = row % 8;
    uintptr_t* const end = seen[banks] + count[banks];
    if (std::find(seen[banks], end, row) != end) continue;  // one access serves both
    *end = row;
    most = max(most, ++count[banks]);
  }
  return most - 1;
}

inline gathered meet_with_row(meeting kind, const void* row) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  if (address % 16 != 0) tell("a matrix row that is not aligned to 16 bytes");
  check_shared(row, 16);
  const gathered rows =
      meet(kind, {static_cast<unsigned>(address), static_cast<unsigned>(address >> 32)});
  if (current % 32 == 0)
    for (int matrix = 0; matrix < 4; ++matrix) bank_conflicts += conflicts_of(rows, matrix);
  return rows;
}

}  // namespace emulation

/// Accesses by which matrix loads so far took longer than they need; counted anew from here.
extern "C" inline __attribute__((used)) long emulation_bank_conflicts() {
  return std::exchange(emulation::bank_conflicts, 0);
}

namespace pagedattn {

inline unsigned pair_of(unsigned low, unsigned high) { return (low & 0xffffu) | high << 16; }

inline void load_matrices(unsigned (&m)[4], const void* row) {
  const auto rows = emulation::meet_with_row(emulation::meeting::load, row);
  const int lane = emulation::current % 32;
  for (int i = 0; i < 4; ++i) memcpy(&m[i], rows.address(8 * i + lane / 4) + 4 * (lane % 4), 4);
}

inline void load_matrices_transposed(unsigned (&m)[4], const void* row) {
  const auto rows = emulation::meet_with_row(emulation::meeting::load_transposed, row);
  const int lane = emulation::current % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t element[2];
    for (int j = 0; j < 2; ++j)
      memcpy(&element[j], rows.address(8 * i + 2 * (lane % 4) + j) + 2 * (lane / 4), 2);
    m[i] = pair_of(element[0], element[1]);
  }
}

inline unsigned transpose_matrix(unsigned m) {
  const auto all = emulation::meet(emulation::meeting::transpose, {m});
  const int lane = emulation::current % 32, row = lane / 4, column = 2 * (lane % 4);
  const int shift = row % 2 * 16;
  return pair_of(all(4 * column + row / 2, 0) >> shift,
                 all(4 * (column + 1) + row / 2, 0) >> shift);
}

template <int TYPE>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  unsigned mine[12];  // as floats: a's matrices, then b's
  const unsigned pairs[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 12; ++i)
    mine[i] = __float_as_uint(to_float<TYPE>(pairs[i / 2] >> i % 2 * 16 & 0xffffu));
  const auto all = emulation::meet(emulation::meeting::multiply, mine);
  const int lane = emulation::current % 32;
  for (int i = 0; i < 4; ++i) {
    const int lower = i / 2, row = lane / 4, column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {  // a product of two 16-bit numbers is exact in fp32
      const int half = k / 8, lane_of_k = k % 8 / 2, which = k % 2;
      c[i] += all.number(4 * row + lane_of_k, 2 * (2 * half + lower) + which) *
              all.number(4 * column + lane_of_k, 2 * (4 + half) + which);
    }
  }
}

inline unsigned bf16_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

template <int TYPE>
unsigned pack_pair(float low, float high) {
  if (TYPE == PA_BF16) return pair_of(bf16_bits(low), bf16_bits(high));
  return pair_of(__half_as_ushort(__float2half_rn(low)), __half_as_ushort(__float2half_rn(high)));
}

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline unsigned half_pair(float low, float high) { return pack_pair<PA_F16>(low, high); }

inline unsigned multiply_half_pair(unsigned a, unsigned b) {
  return half_pair(to_float<PA_F16>(a & 0xffffu) * to_float<PA_F16>(b & 0xffffu),
                   to_float<PA_F16>(a >> 16) * to_float<PA_F16>(b >> 16));
}

inline unsigned subtract_half_pair(unsigned a, unsigned b) {
  return half_pair(to_float<PA_F16>(a & 0xffffu) - to_float<PA_F16>(b & 0xffffu),
                   to_float<PA_F16>(a >> 16) - to_float<PA_F16>(b >> 16));
}

inline void launch_dependents() {}
inline void wait_for_primary() {}

}  // namespace pagedattn
