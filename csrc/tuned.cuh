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
         (CHUNKS == 1 || p.key_chunk_stride == BLOCK_SIZE * CHUNK) && p.value_token_stride == 1 &&
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

/// What a launch says of itself besides its size.
struct launch_kind {
  bool after;   // it may start while the one before it in the stream still runs
  int cluster;  // blocks of each cluster; 1: there are none
};

/// The configuration of a launch, and where its one attribute is kept.
struct launch_setup {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};

  launch_setup(int64_t blocks, int threads, int shared, launch_kind kind, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    if (PAGEDATTN_TUNED < 90) return;  // there is neither attribute
    if (kind.cluster > 1) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = kind.cluster;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      config.numAttrs = 1;
    } else if (kind.after) {
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      config.numAttrs = 1;
    }
  }
  launch_setup(const launch_setup&) = delete;  // `config` points into it
};

template <class... Parameters, class... Arguments>
cudaError_t launch_tuned(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared,
                         launch_kind kind, cudaStream_t stream, const Arguments&... arguments) {
  const launch_setup setup(blocks, threads, shared, kind, stream);
  return cudaLaunchKernelEx(&setup.config, kernel, arguments...);
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

/// Tokens that a sequence's rows see, at most.
inline int64_t longest_seen(const pagedattn_params& p) {
  const int64_t in_window = int64_t{p.window} + p.max_query_len;
  return p.window > 0 && in_window < p.max_seq_len ? in_window : p.max_seq_len;
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
  // every tile of rows reads all of them again
  return tiles == 1 && longest_seen(p) * p.num_seqs * p.num_kv_heads <= MOST_BYTES / TOKEN_BYTES;
}

/// One form of phase 1: how keys and values lie, how many tiles of rows share what is read, and
/// whether the blocks of a row's partitions are a cluster.
template <kv_order ORDER_, int TILES, bool CLUSTERED_>
struct tuned_form {
  static constexpr kv_order ORDER = ORDER_;
  static constexpr bool CLUSTERED = CLUSTERED_;
  static constexpr auto KERNEL = tuned_decode_kernel<ORDER, TILES, CLUSTERED>;
  using memory = tuned_memory<ORDER, TILES>;
  static constexpr int BYTES = CLUSTERED ? cluster_memory<memory>::BYTES : memory::BYTES;
  static_assert(BYTES <= 227 * 1024, "more shared memory than a block can have");

  static int64_t tiles(const pagedattn_params& p) {  // of a sequence
    constexpr int ROWS = TILES * TILE_ROWS;
    return (static_cast<int64_t>(p.max_query_len) * GROUP + ROWS - 1) / ROWS;
  }

  /// Blocks of the grid; -1: more than one holds.
  static int64_t blocks(const pagedattn_params& p) {
    const int64_t pairs = static_cast<int64_t>(p.num_seqs) * p.num_kv_heads;
    const int64_t parts = tiles(p) * p.num_splits, teams = TUNED_WARPS / p.team;
    if (parts > 0 && pairs > MOST_BLOCKS / parts) return -1;
    return (pairs * parts + teams - 1) / teams;
  }

  static launch_kind kind(const pagedattn_params& p) {
    return {false, CLUSTERED ? p.num_splits : 1};
  }
};

namespace {
/// Have the current device allow what the kernel needs; asked of each once. Unnamed, as the loader
/// would give all libraries of a process one `allowed` otherwise, though each has a kernel of its
/// own.
template <class Form>
cudaError_t allow() {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (code != cudaSuccess || (allowed.load() & bit)) return code;
  code = cudaFuncSetAttribute(Form::KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Form::BYTES);
  if (Form::CLUSTERED && code == cudaSuccess)
    code = cudaFuncSetAttribute(Form::KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (code == cudaSuccess) allowed |= bit;
  return code;
}
}  // namespace

/// Whether the call's clusters run side by side on the device, so that they cost no more than the
/// merge's launch that they save.
///
/// A cluster's blocks lie close together, so that fewer find a place: on an H200, which has 132
/// multiprocessors, 120 in clusters of four. Where a grid has more, some multiprocessors get two
/// blocks and others none, and a call takes 5 % longer; where a warp has few items, that is less
/// than the launch. 1 or 0; more: 1 + what the device said in place of an answer.
template <class Form>
int has_room(const pagedattn_params& p) {
  constexpr int64_t FEW_ITEMS = 8;
  const int64_t blocks = Form::blocks(p);
  if (blocks <= 0) return 0;
  int device = 0, processors = 0, together = 0, clusters = 0;
  const launch_setup one(p.num_splits, TUNED_THREADS, Form::BYTES, Form::kind(p), nullptr);
  cudaError_t code = allow<Form>();
  if (code == cudaSuccess) code = cudaGetDevice(&device);
  if (code == cudaSuccess)
    code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (code == cudaSuccess)
    code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&together, Form::KERNEL, TUNED_THREADS,
                                                         Form::BYTES);
  if (code == cudaSuccess)
    code = cudaOccupancyMaxActiveClusters(&clusters, Form::KERNEL, &one.config);
  if (code != cudaSuccess) {
    cudaGetLastError();  // it is no error of the next caller's
    return 1 + static_cast<int>(code);
  }
  if (together == 0) return 0;
  const int64_t items = longest_seen(p) / (int64_t{ITEM} * TUNED_WARPS * p.num_splits);
  // blocks that a multiprocessor may get: as many as fit, or no more than without clusters
  const int64_t most = (blocks + processors - 1) / processors;
  const int64_t there = items <= FEW_ITEMS || most > together ? together : most;
  return blocks / p.num_splits <= clusters * there / together ? 1 : 0;
}

/// Phase 2 for the call's rows; `after`: behind phase 1, which may still run.
template <class Shape>
cudaError_t launch_merge(const pagedattn_params& p, bool after, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * p.num_heads;
  return launch_tuned(tuned_merge_kernel<Shape>, rows * Shape::BLOCKS, Shape::THREADS, 0,
                      {after, 1}, stream, p);
}

template <class Form>
int run_tuned(const pagedattn_params& p, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * p.num_heads;
  const int64_t blocks = Form::blocks(p);
  if (blocks < 0 || rows > MOST_BLOCKS / wide_merge::BLOCKS) return PAGEDATTN_REFUSED;
  cache_maps maps = {};
  if (Form::ORDER == SWIZZLED && !describe(maps, p)) return PAGEDATTN_REFUSED;
  cudaError_t code = allow<Form>();
  if (code != cudaSuccess) return code;
  const bool after = blocks > 0;
  if (blocks > 0) {
    code = launch_tuned(Form::KERNEL, blocks, TUNED_THREADS, Form::BYTES, Form::kind(p), stream, p,
                        maps, reads_once(p, Form::tiles(p)));
    if (code != cudaSuccess) return code;
  }
  // written already, but for rows that only the tokens' starts tell of
  if (p.num_splits == 1 || Form::CLUSTERED) {
    if (!p.query_start_loc) return cudaSuccess;
    return launch_tuned(tuned_rest_kernel, p.num_tokens, REST_THREADS, 0, {after, 1}, stream, p);
  }
  // a fixed partition is for results that do not depend on how many rows and partitions there are
  if (p.tokens_per_split > 0) return launch_merge<wide_merge>(p, after, stream);
  if (p.num_splits <= light_merge::SLOTS * light_merge::AHEAD)
    return launch_merge<light_merge>(p, after, stream);
  return rows > FEW_ROWS ? launch_merge<wide_merge>(p, after, stream)
                         : launch_merge<narrow_merge>(p, after, stream);
}

/// Give the form that serves the call to `use`, and return what that does, or PAGEDATTN_REFUSED
/// where none does.
template <kv_order ORDER, class Use>
int with_rows(const pagedattn_params& p, const Use& use) {
  // with a fixed partition the batch must not choose the kernel, so only the argument's presence
  // does
  const bool sharing = p.tokens_per_split > 0
                           ? p.query_start_loc != nullptr
                           : static_cast<int64_t>(p.max_query_len) * GROUP > TILE_ROWS;
  if (p.clustered) {
    // with a fixed partition the result must not depend on how many there are; and a form of several
    // tiles has no registers left for it
    if constexpr (PAGEDATTN_TUNED >= 90)
      if (!sharing && p.num_splits > 1 && p.num_splits <= MOST_CLUSTERED &&
          p.team == TUNED_WARPS && p.tokens_per_split == 0)
        return use(tuned_form<ORDER, 1, true>{});
    return PAGEDATTN_REFUSED;
  }
  if (!sharing) return use(tuned_form<ORDER, 1, false>{});
  if (p.team != TUNED_WARPS) return PAGEDATTN_REFUSED;
  return use(tuned_form<ORDER, SHARING_TILES, false>{});
}

template <class Use>
int with_form(const pagedattn_params& p, const Use& use) {
  if constexpr (TUNED_CLASS) {
    if (p.team < 1 || TUNED_WARPS % p.team != 0 || p.num_splits < 1 ||
        p.tokens_per_split % ITEM != 0 || !lies_aligned(p))
      return PAGEDATTN_REFUSED;
    constexpr kv_order IN_ROWS = item_place<ROWS>::SERVED ? ROWS : SWIZZLED;
    if (lies_in_rows(p)) return with_rows<IN_ROWS>(p, use);
    if constexpr (item_place<PACKED>::SERVED)
      if (lies_packed(p)) return with_rows<PACKED>(p, use);
  }
  return PAGEDATTN_REFUSED;
}

/// 0, an error, or PAGEDATTN_REFUSED where the call's memory does not lie as these kernels need it.
inline int run_tuned(const pagedattn_params& p, cudaStream_t stream) {
  return with_form(p, [&](auto form) { return run_tuned<decltype(form)>(p, stream); });
}

/// Whether the blocks of the call's partitions should merge them, as a cluster. No address decides:
/// it is asked once for all calls of the same shapes. As `has_room` answers.
inline int clusters_serve(pagedattn_params p) {
  p.clustered = 1;
  p.query = p.key_cache = p.value_cache = p.out = nullptr;
  const int answer = with_form(p, [&](auto form) -> int {
    if constexpr (decltype(form)::CLUSTERED) return has_room<decltype(form)>(p);
    else return 0;
  });
  return answer == PAGEDATTN_REFUSED ? 0 : answer;
}

}  // namespace pagedattn
