// Blocks that are a cluster: each runs until it meets the others, then the next, in rising order or,
// where the threads run so, in falling order. A barrier that is missing shows in one of the two.
//
// A block's dynamic shared memory is kept while others run; what is __shared__ by name is not, so
// that a kernel must be done with it when its blocks meet.
#pragma once

#include "emulated_launch.h"

namespace emulation {

/// A block of the cluster that is running.
struct clustered_block {
  std::vector<fibre> fibres;
  std::vector<unsigned> exchange;
  std::vector<unsigned char> shared;  // while it does not run: as it left it, and as others wrote
  stop_at stopped;
};

inline std::vector<clustered_block> cluster;
inline int rank_in_cluster = 0;

/// Run a block on, up to where it stops.
inline void run_on(int rank, unsigned threads, bool begins) {
  clustered_block& block = cluster[rank];
  rank_in_cluster = rank;
  fibres.swap(block.fibres), exchange.swap(block.exchange);
  make_fibres(threads);
  if (begins) begin_block();
  if (dynamic_bytes > 0) memcpy(shared_start(), block.shared.data(), dynamic_bytes);
  block.stopped = run_block();
  if (dynamic_bytes > 0) memcpy(block.shared.data(), shared_start(), dynamic_bytes);
  fibres.swap(block.fibres), exchange.swap(block.exchange);
}

inline bool run_cluster(dim3 first, int blocks, unsigned threads) {
  cluster.resize(blocks);
  for (clustered_block& block : cluster) block.shared.assign(dynamic_bytes, 0xff);
  for (bool begins = true;; begins = false) {
    int ended = 0;
    for (int n = 0; n < blocks; ++n) {
      const int rank = falling ? blocks - 1 - n : n;
      blockIdx = dim3(first.x + rank, first.y, first.z);
      run_on(rank, threads, begins);
      if (cluster[rank].stopped == stop_at::deadlock) return false;
      ended += cluster[rank].stopped == stop_at::end;
    }
    if (ended == blocks) return true;
    if (ended > 0) {
      tell("some blocks of a cluster had ended when the others met");
      return false;
    }
    for (clustered_block& block : cluster)
      for (fibre& f : block.fibres) f.state = waits::nothing;
  }
}

/// What `place`, in this block's dynamic shared memory, is in another's.
inline unsigned char* in_block(int rank, void* place, size_t bytes) {
  unsigned char* const here = static_cast<unsigned char*>(place);
  const size_t offset = here - shared_start();
  if (offset >= dynamic_bytes || offset + bytes > dynamic_bytes ||
      rank < 0 || rank >= static_cast<int>(cluster.size())) {
    tell("a store outside the dynamic shared memory of the cluster's blocks");
    return nullptr;
  }
  return rank == rank_in_cluster ? here : cluster[rank].shared.data() + offset;
}

/// How far a thread of the running block is: on a device a store may come before another block has
/// begun, which here all have.
enum class cluster_step { none, began, waited };
inline std::vector<cluster_step> cluster_steps;

inline const bool steps_start_anew = [] {
  at_block_start.push_back([] { cluster_steps.assign(fibres.size(), cluster_step::none); });
  return true;
}();

inline void step_in_cluster(cluster_step from, cluster_step to) {
  if (cluster_steps[current] != from)
    tell("a thread has not begun in its cluster, or not waited for the others to begin");
  cluster_steps[current] = to;
}

inline void check_cluster_has_begun() {
  step_in_cluster(cluster_step::waited, cluster_step::waited);
}

template <class T>
void store(int rank, void* place, T value) {
  if (reinterpret_cast<uintptr_t>(place) % sizeof(T) != 0) tell("a store that is not aligned");
  check_cluster_has_begun();
  if (unsigned char* const there = in_block(rank, place, sizeof(T)))
    memcpy(there, &value, sizeof(T));
}

}  // namespace emulation

namespace pagedattn {

inline void begin_in_cluster() {
  emulation::step_in_cluster(emulation::cluster_step::none, emulation::cluster_step::began);
}
inline void wait_for_cluster_to_begin() {
  emulation::step_in_cluster(emulation::cluster_step::began, emulation::cluster_step::waited);
}
inline void cluster_barrier() {
  emulation::step_in_cluster(emulation::cluster_step::waited, emulation::cluster_step::waited);
  emulation::give_way(emulation::waits::cluster);
}
inline void store_in_block(int block, void* place, float4 value) {
  emulation::store(block, place, value);
}
inline void store_in_block(int block, void* place, float2 value) {
  emulation::store(block, place, value);
}

}  // namespace pagedattn
