// The tuned kernels' entry: whether they serve a call as it lies in memory, and their launch.
#pragma once

#include <atomic>

#include "alignment.cuh"
#include "kernel_launch.cuh"
#include "tuned_merge.cuh"

namespace pagedattn {

constexpr bool TUNED_TYPES =
    QUERY_TYPE != PA_F32 && KV_TYPE != PA_F32 && (!WIDE || KV_TYPE == QUERY_TYPE);
constexpr bool TUNED_CLASS = TUNED_TYPES && HEAD_DIM % 16 == 0;

/// The packed layout, a block's keys and values of a head each one dense run.
inline bool lies_packed(const pagedattn_params& p) {
  return (1 << p.key_pack_shift) == CHUNK && p.key_token_stride == CHUNK &&
         p.key_chunk_stride == BLOCK_SIZE * CHUNK && p.value_token_stride == 1 &&
         p.value_dim_stride == BLOCK_SIZE;
}

inline bool lies_in_rows(const pagedattn_params& p) {
  return p.key_pack_shift == 30 && p.value_dim_stride == 1 &&
         aligned(16, KV_BYTES, nullptr, p.key_token_stride, p.value_token_stride);
}

inline bool lies_aligned(const pagedattn_params& p) {
  return aligned(16, KV_BYTES, p.key_cache, p.key_block_stride, p.key_head_stride) &&
         aligned(16, KV_BYTES, p.value_cache, p.value_block_stride, p.value_head_stride) &&
         aligned(4, 2, p.query, p.query_token_stride, p.query_head_stride) &&
         aligned(8, 2, p.out, p.out_token_stride, p.out_head_stride);
}

/// Launch; `after` lets the kernel start while the one before it in the stream still runs.
template <class... Parameters, class... Arguments>
cudaError_t launch_tuned(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared,
                         bool after, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = after && PAGEDATTN_TUNED >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// How the copy engine finds the rows; false where it cannot.
inline bool describe(cache_maps& maps, const pagedattn_params& p) {
  cache_rows rows = {};
  rows.num_heads = p.num_kv_heads, rows.num_blocks = p.num_blocks;
  rows.block_size = BLOCK_SIZE, rows.chunks = LINES, rows.element = KV_BYTES, rows.tokens = PART;
  cache_rows keys = rows, values = rows;
  keys.base = p.key_cache, values.base = p.value_cache;
  keys.token_stride = p.key_token_stride * KV_BYTES;
  keys.head_stride = p.key_head_stride * KV_BYTES;
  keys.block_stride = p.key_block_stride * KV_BYTES;
  values.token_stride = p.value_token_stride * KV_BYTES;
  values.head_stride = p.value_head_stride * KV_BYTES;
  values.block_stride = p.value_block_stride * KV_BYTES;
  return encode_map(maps.of[0], keys) && encode_map(maps.of[1], values);
}

/// Whether keys and values should give way in the second-level cache to what they find there. (Of
/// a prefix that sequences share the first one to read it then brings it for that one alone.)
///
/// That is written back to memory if need be, which takes from what is read in the meantime, and
/// leaves less to the kernels that follow. Measured on an H200 whose cache of 50 MB was full of
/// what had just been written: up to 134 MB of keys and values take 2 µs less, while 268 MB and more
/// take 2 to 20 µs longer (the dirty lines then leave it slowly, all the while).
inline bool reads_once(const pagedattn_params& p, int64_t tiles) {
  constexpr int64_t MOST_BYTES = 160 << 20;
  constexpr int64_t TOKEN_BYTES = 2 * HEAD_DIM * KV_BYTES;
  int64_t longest = p.max_seq_len;
  const int64_t seen = int64_t{p.window} + p.max_query_len;
  if (p.window > 0 && seen < longest) longest = seen;
  // every tile of rows reads all of them again
  return tiles == 1 && longest * p.num_seqs * p.num_kv_heads <= MOST_BYTES / TOKEN_BYTES;
}

namespace {
/// Have the current device allow what the kernel needs of shared memory; asked of each once.
/// Unnamed, as the loader would give all libraries of a process one `allowed` otherwise, though
/// each has a kernel of its own.
template <kv_order ORDER, int TILES>
cudaError_t allow_shared() {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (code != cudaSuccess || (allowed.load() & bit)) return code;
  code = cudaFuncSetAttribute(tuned_decode_kernel<ORDER, TILES>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              tuned_memory<ORDER, TILES>::BYTES);
  if (code == cudaSuccess) allowed |= bit;
  return code;
}
}  // namespace

/// Phase 2 for the call's rows; `after`: behind phase 1, which may still run.
template <class Shape>
cudaError_t launch_merge(const pagedattn_params& p, bool after, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * p.num_heads;
  return launch_tuned(tuned_merge_kernel<Shape>, rows * Shape::BLOCKS, Shape::THREADS, 0, after,
                      stream, p);
}

template <kv_order ORDER, int TILES>
int run_tuned(const pagedattn_params& p, cudaStream_t stream) {
  constexpr int shared = tuned_memory<ORDER, TILES>::BYTES;
  constexpr int ROWS_OF_TILES = TILES * TILE_ROWS;
  const int64_t most_rows = static_cast<int64_t>(p.max_query_len) * GROUP;
  const int64_t tiles = (most_rows + ROWS_OF_TILES - 1) / ROWS_OF_TILES;
  const int64_t pairs = static_cast<int64_t>(p.num_seqs) * p.num_kv_heads;
  const int64_t parts = tiles * p.num_splits;
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * p.num_heads;
  if (rows > MOST_BLOCKS / wide_merge::BLOCKS || (parts > 0 && pairs > MOST_BLOCKS / parts))
    return PAGEDATTN_REFUSED;
  cache_maps maps = {};
  if (ORDER == SWIZZLED && !describe(maps, p)) return PAGEDATTN_REFUSED;
  cudaError_t code = allow_shared<ORDER, TILES>();
  if (code != cudaSuccess) return code;
  const int teams = TUNED_WARPS / p.team;
  const int64_t blocks = (pairs * parts + teams - 1) / teams;
  if (blocks > 0) {
    code = launch_tuned(tuned_decode_kernel<ORDER, TILES>, blocks, TUNED_THREADS, shared, false,
                        stream, p, maps, reads_once(p, tiles));
    if (code != cudaSuccess) return code;
  }
  if (p.num_splits == 1) {  // written already, but for rows that only the tokens' starts tell of
    if (!p.query_start_loc) return cudaSuccess;
    return launch_tuned(tuned_rest_kernel, p.num_tokens, REST_THREADS, 0, blocks > 0, stream, p);
  }
  // a fixed partition is for results that do not depend on how many rows and partitions there are
  if (p.tokens_per_split > 0) return launch_merge<wide_merge>(p, blocks > 0, stream);
  if (p.num_splits <= light_merge::SLOTS * light_merge::AHEAD)
    return launch_merge<light_merge>(p, blocks > 0, stream);
  return rows > FEW_ROWS ? launch_merge<wide_merge>(p, blocks > 0, stream)
                         : launch_merge<narrow_merge>(p, blocks > 0, stream);
}

template <kv_order ORDER>
int run_tuned(const pagedattn_params& p, cudaStream_t stream) {
  // with a fixed partition the batch must not choose the kernel, so only the argument's presence
  // does
  const bool sharing = p.tokens_per_split > 0
                           ? p.query_start_loc != nullptr
                           : static_cast<int64_t>(p.max_query_len) * GROUP > TILE_ROWS;
  if (!sharing) return run_tuned<ORDER, 1>(p, stream);
  if (p.team != TUNED_WARPS) return PAGEDATTN_REFUSED;
  return run_tuned<ORDER, SHARING_TILES>(p, stream);
}

/// 0, an error, or PAGEDATTN_REFUSED where the call's memory does not lie as these kernels need it.
inline int run_tuned(const pagedattn_params& p, cudaStream_t stream) {
  if constexpr (TUNED_CLASS) {
    if (p.team < 1 || TUNED_WARPS % p.team != 0 || p.num_splits < 1 ||
        p.tokens_per_split % ITEM != 0 || !lies_aligned(p))
      return PAGEDATTN_REFUSED;
    constexpr kv_order IN_ROWS = item_place<ROWS>::SERVED ? ROWS : SWIZZLED;
    if (lies_in_rows(p)) return run_tuned<IN_ROWS>(p, stream);
    if constexpr (item_place<PACKED>::SERVED)
      if (lies_packed(p)) return run_tuned<PACKED>(p, stream);
  }
  return PAGEDATTN_REFUSED;
}

}  // namespace pagedattn
