// An item: 16 tokens of one KV head, as they lie in shared memory, and the two products with it.
//
// Both products are computed transposed, keys × rows and dimensions × rows, so that a tile of 8
// query rows is the n = 8 of the tensor cores' m16n8k16, and several tiles share what is read. The
// packed layout's blocks serve as they lie in the cache. The rows of the other layouts must fall
// into different banks where one instruction reads them: they are an odd number of 16 bytes apart,
// or their 16 bytes permuted by sm_90's copies.
#pragma once

#include "attention_partial.cuh"
#include "convert.cuh"
#include "ptx.cuh"
#include "sequence_span.cuh"

namespace pagedattn {

constexpr int KV_BYTES = size_of_type(KV_TYPE);     // of an element
constexpr bool WIDE = KV_BYTES == 2;                // elements that need no conversion
constexpr int CHUNK = 16 / KV_BYTES;                // elements of 16 bytes
constexpr int CHUNKS = HEAD_DIM / CHUNK;
constexpr int STEPS = HEAD_DIM / 16;                // products of 16 dimensions
constexpr int PART = BLOCK_SIZE % ITEM ? 8 : ITEM;  // tokens of an item that share a block
constexpr int PARTS = ITEM / PART;
constexpr int TILE_ROWS = 8;                        // query rows

/// Where a token's elements are: apart, as the packed layout has them; together in a padded row; or
/// in rows of 128 bytes, 16-byte piece i of row r in place i ^ (r % 8).
enum kv_order { PACKED, ROWS, SWIZZLED };
constexpr int LINES = HEAD_DIM * KV_BYTES / 128;  // swizzled rows of a token

template <kv_order ORDER>
struct item {
  // in the packed layout, an 8-bit value's row holds 16 tokens, 4 of them to a lane
  static constexpr bool SWAPPED = ORDER == PACKED && !WIDE;
  static constexpr int ROW_BYTES = (CHUNKS | 1) * 16;  // odd: eight rows in different banks
  static constexpr int BYTES = ITEM * (ORDER == ROWS ? ROW_BYTES : HEAD_DIM * KV_BYTES);

  /// The token that is row `row` of the scores. Which one is free to choose, as long as the
  /// weights meet the values of the same token: here so that eight rows are in different banks.
  static PA_DEVICE int token_of_row(int row) {
    if constexpr (!SWAPPED) return row;
    else return row % 8 / 2 * 4 + (row / 8 ^ row % 8 / 4) * 2 + row % 2;
  }

  /// The dimension of the output that is row `row` of product `step` with the values.
  static PA_DEVICE int dim_of_row(int step, int row) {
    if constexpr (ORDER != PACKED && !WIDE) return step * 16 + row % 8 * 2 + row / 8;
    else return step * 16 + row;
  }

  /// The first of the two dimensions of a query that a lane holds as half `half` of its part in
  /// product `step`.
  static PA_DEVICE int query_dim(int step, int half, int lane) {
    if constexpr (WIDE) return step * 16 + half * 8 + lane % 4 * 2;
    else return step * 16 + lane % 4 * 4 + half * 2;
  }

  /// 16 bytes of a token's row.
  static PA_DEVICE const unsigned char* chunk_of_row(const unsigned char* rows, int token,
                                                     int chunk) {
    if constexpr (ORDER == ROWS) return rows + token * ROW_BYTES + chunk * 16;
    const int line = (token / PART * LINES + chunk / 8) * PART + token % PART;
    return rows + line * 128 + (chunk % 8 ^ token % 8) * 16;
  }

  static PA_DEVICE const unsigned char* key_chunk(const unsigned char* keys, int token, int chunk) {
    if constexpr (ORDER != PACKED) return chunk_of_row(keys, token, chunk);
    else return keys + ((token / PART * CHUNKS + chunk) * PART + token % PART) * 16;
  }

  /// scores = keys · queries, unscaled: column of a row of the tile, row of a token.
  template <int TILES, class Queries>
  static PA_DEVICE void key_scores(float (&scores)[TILES][4], const unsigned char* keys,
                                   const Queries& queries, int lane) {
    const int token = token_of_row(lane % 16);
    constexpr int CHAINS = TILES > 1 ? 1 : 2;  // of products, for their latency
    float sums[CHAINS][TILES][4] = {};
    const auto multiply = [&](const unsigned (&a)[4], int step) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint2 query = queries.of(tile, step);
        multiply_add<QUERY_TYPE>(sums[step % CHAINS][tile], a, query.x, query.y);
      }
    };
    if constexpr (WIDE) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned a[4];
        load_matrices(a, key_chunk(keys, token, step * 2 + lane / 16));
        multiply(a, step);
      }
    } else {
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {  // a chunk is a product's 16 dimensions
        unsigned m[4];
        load_matrices(m, key_chunk(keys, token, min(step + lane / 16, CHUNKS - 1)));
#pragma unroll
        for (int i = 0; i < 2 && step + i < STEPS; ++i) {
          const unsigned a[4] = {low_pair(m[2 * i]), low_pair(m[2 * i + 1]), high_pair(m[2 * i]),
                                 high_pair(m[2 * i + 1])};
          multiply(a, step + i);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[tile][i] = CHAINS > 1 ? sums[0][tile][i] + sums[CHAINS - 1][tile][i]
                                     : sums[0][tile][i];
  }

  /// acc += values · weights: `keep` has ones where the lane's tokens count; 0 · NaN would be NaN.
  template <bool MASKED, int TILES>
  static PA_DEVICE void add_values(float (&acc)[TILES][STEPS][4], const unsigned char* values,
                                   const unsigned (&weights)[TILES][2], const unsigned (&keep)[2],
                                   int lane) {
    if constexpr (WIDE) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned a[4];
        wide_values(a, values, step, lane);
        masked<MASKED>(a, keep);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
          multiply_add<QUERY_TYPE>(acc[tile][step], a, weights[tile][0], weights[tile][1]);
      }
    } else {
      const bool turned = SWAPPED && lane % 4 >= 2;  // as token_of_row turns them
      unsigned met[TILES][2];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        met[tile][0] = turned ? weights[tile][1] : weights[tile][0];
        met[tile][1] = turned ? weights[tile][0] : weights[tile][1];
      }
      const unsigned kept[2] = {turned ? keep[1] : keep[0], turned ? keep[0] : keep[1]};
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {
        unsigned m[4];
        narrow_values(m, values, step, lane);
        multiply_narrow<MASKED>(acc, m, step, met, kept);
      }
    }
  }

 private:
  static PA_DEVICE void wide_values(unsigned (&a)[4], const unsigned char* values, int step,
                                    int lane) {
    if constexpr (ORDER != PACKED) {
      const int token = lane % 8 + lane / 16 * 8, chunk = step * 2 + lane / 8 % 2;
      load_matrices_transposed(a, chunk_of_row(values, token, chunk));
    } else {
      const int dim = step * 16 + lane % 16, half = lane / 16;
      load_matrices(a, values + (PART == 8 ? (half * HEAD_DIM + dim) * 16 : dim * 32 + half * 16));
    }
  }

  /// The stored bytes of products `step` and `step` + 1.
  static PA_DEVICE void narrow_values(unsigned (&m)[4], const unsigned char* values, int step,
                                      int lane) {
    if constexpr (ORDER != PACKED) {
      const int chunk = min(step + lane / 16, STEPS - 1);
      load_matrices_transposed(m, chunk_of_row(values, lane % 16, chunk));
    } else {
      load_matrices(m, values + min(step * 16 + lane, HEAD_DIM - 1) * 16);
    }
  }

  template <bool MASKED, int TILES>
  static PA_DEVICE void multiply_narrow(float (&acc)[TILES][STEPS][4], const unsigned (&m)[4],
                                        int step, const unsigned (&weights)[TILES][2],
                                        const unsigned (&keep)[2]) {
#pragma unroll
    for (int i = 0; i < 2 && step + i < STEPS; ++i) {
      unsigned a[4];
      if constexpr (ORDER != PACKED) {
        // a matrix's elements are pairs of dimensions; a pair of tokens is wanted
        a[0] = even_pair(m[2 * i]), a[1] = odd_pair(m[2 * i]);
        a[2] = even_pair(m[2 * i + 1]), a[3] = odd_pair(m[2 * i + 1]);
      } else {
        a[0] = low_pair(m[2 * i]), a[1] = low_pair(m[2 * i + 1]);
        a[2] = high_pair(m[2 * i]), a[3] = high_pair(m[2 * i + 1]);
      }
      masked<MASKED>(a, keep);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        multiply_add<QUERY_TYPE>(acc[tile][step + i], a, weights[tile][0], weights[tile][1]);
    }
  }

  template <bool MASKED>
  static PA_DEVICE void masked(unsigned (&a)[4], const unsigned (&keep)[2]) {
    if constexpr (MASKED) a[0] &= keep[0], a[1] &= keep[0], a[2] &= keep[1], a[3] &= keep[1];
  }

  static PA_DEVICE unsigned low_pair(unsigned bytes) { return pair_of(bytes); }
  static PA_DEVICE unsigned high_pair(unsigned bytes) { return pair_of(bytes >> 16); }
  static PA_DEVICE unsigned even_pair(unsigned bytes) {
    return pair_of(__byte_perm(bytes, 0, 0x4420));
  }
  static PA_DEVICE unsigned odd_pair(unsigned bytes) {
    return pair_of(__byte_perm(bytes, 0, 0x4431));
  }

  /// Two stored elements as two of the query's type; each value is exact in it.
  static PA_DEVICE unsigned pair_of(unsigned two) {
    const unsigned short bytes = static_cast<unsigned short>(two);
    unsigned halves;
    if constexpr (KV_TYPE == PA_E4M3) halves = half_pair_from_e4m3(bytes);
    else if constexpr (KV_TYPE == PA_E5M2) halves = half_pair_from_e5m2(bytes);
    else halves = half_pair_from_int8(bytes);
    if constexpr (QUERY_TYPE == PA_F16) return halves;
    return pack_pair<PA_BF16>(__half2float(__ushort_as_half(halves & 0xffffu)),
                              __half2float(__ushort_as_half(halves >> 16)));
  }
};

}  // namespace pagedattn
