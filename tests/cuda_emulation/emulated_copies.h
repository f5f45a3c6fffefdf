// The copies that run beside the threads, as late as a device may make them: the destination is
// NaN (0xFF) from the start of a copy until a wait that covers it.
//
// Told besides: what is not aligned, copies that no phase expects, an arrival at a phase that
// nobody has seen complete, two copies to the same bytes at once, a block that ends before its
// copies have been waited for.
#pragma once

#include "cuda_emulation.h"

namespace emulation {

struct copy {
  unsigned char* to;
  const void* from;
  int bytes;
};

/// The phase that a barrier is in.
struct phase {
  int arrivals = 0;  // of each phase
  int pending = 0;   // of them, still to come
  int number = 0;    // phases completed
  int64_t expected = 0, started = 0;  // bytes
  bool fenced = false;
  std::vector<copy> copies;

  bool can_complete() const { return pending == 0 && expected == started; }
  bool is_over(int parity) const { return number % 2 != parity; }
};

/// The groups of a thread's own copies, the last of them open.
struct copy_groups {
  std::vector<std::vector<copy>> closed;
  std::vector<copy> open;
};

inline long bulk_copies[2] = {};  // those whose bytes are to stay in the cache, and the others
inline std::map<const void*, phase> phases;
inline std::vector<copy_groups> groups;

inline void start_copy(std::vector<copy>& into, const copy& one) {
  const bool aligned = reinterpret_cast<uintptr_t>(one.to) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(one.from) % 16 == 0;
  if (!aligned || one.bytes <= 0 || one.bytes % 16 != 0)
    tell("a copy whose addresses or size are not multiples of 16 bytes");
  check_shared(one.to, max(one.bytes, 0));
  memset(one.to, 0xff, max(one.bytes, 0));
  into.push_back(one);
}

inline void finish_copies(std::vector<copy>& copies) {
  for (const copy& one : copies) memcpy(one.to, one.from, max(one.bytes, 0));
  copies.clear();
}

inline void complete(phase& p) {
  finish_copies(p.copies);
  ++p.number;
  p.pending = p.arrivals;
  p.expected = p.started = 0;
}

inline phase& phase_of(const void* barrier) {
  if (capability < 9) tell("a barrier of copies or a bulk copy on a device below sm_90");
  const auto found = phases.find(barrier);
  if (found == phases.end()) tell("a barrier of copies that nobody has initialised");
  return found == phases.end() ? phases[barrier] : found->second;
}

inline bool overlaps_one_on_its_way(const copy& one) {
  for (const auto& entry : phases)
    for (const copy& other : entry.second.copies)
      if (one.to < other.to + other.bytes && other.to < one.to + one.bytes) return true;
  return false;
}

inline void check_copies_are_over() {
  for (const auto& entry : phases)
    if (entry.second.started > 0) tell("the block ended with bulk copies that nobody waited for");
}

inline const bool copies_are_watched = [] {
  at_block_start.push_back([] {
    phases.clear();
    groups.assign(fibres.size(), copy_groups{});
  });
  at_block_end.push_back(check_copies_are_over);
  return true;
}();

}  // namespace emulation

/// Bulk copies since the last call: `read_once` or not.
extern "C" inline __attribute__((used)) long emulation_bulk_copies(int read_once) {
  return std::exchange(emulation::bulk_copies[read_once], 0);
}

namespace pagedattn {

struct alignas(8) copy_barrier {
  uint64_t word;
};

inline void init_barrier(copy_barrier* barrier, int arrivals) {
  if (emulation::phases.count(barrier)) emulation::tell("a barrier is initialised twice");
  if (arrivals < 1) emulation::tell("a barrier that counts no arrivals");
  emulation::check_shared(barrier, sizeof(*barrier));
  emulation::phase& p = emulation::phases[barrier];
  p = emulation::phase{};
  p.arrivals = p.pending = arrivals;
}

inline void fence_barrier_init() {
  for (auto& entry : emulation::phases) entry.second.fenced = true;
}

inline void expect_bytes(copy_barrier* barrier, int bytes) {
  emulation::phase& p = emulation::phase_of(barrier);
  if (p.pending == 0) emulation::tell("an arrival at a phase that nobody has seen complete");
  if (bytes < 0 || p.expected + bytes >= 1 << 20) emulation::tell("more bytes than a phase counts");
  --p.pending;
  p.expected += bytes;
  if (p.can_complete() && p.expected == 0) emulation::complete(p);
}

inline void wait_barrier(copy_barrier* barrier, int parity) {
  emulation::phase& p = emulation::phase_of(barrier);
  if (parity != 0 && parity != 1) emulation::tell("a parity that is neither 0 nor 1");
  emulation::wait_until([&p, parity] { return p.is_over(parity) || p.can_complete(); });
  if (!p.is_over(parity)) emulation::complete(p);
}

/// There is no cache here: the copies are counted.
struct cache_policy {
  bool read_once;
};

inline cache_policy cache_policy_for(bool read_once) { return {read_once}; }

inline void bulk_copy(void* shared, const void* global, int bytes, copy_barrier* barrier,
                      cache_policy policy) {
  emulation::phase& p = emulation::phase_of(barrier);
  const emulation::copy one = {static_cast<unsigned char*>(shared), global, bytes};
  if (!p.fenced) emulation::tell("a copy before the fence after its barrier's initialisation");
  if (emulation::overlaps_one_on_its_way(one)) emulation::tell("two bulk copies to the same bytes");
  emulation::start_copy(p.copies, one);
  ++emulation::bulk_copies[policy.read_once];
  p.started += bytes;
  if (p.pending == 0 && p.started > p.expected)
    emulation::tell("a copy of more bytes than its phase expects");
}

/// What the map's words hold here.
struct alignas(64) tensor_map {
  const unsigned char* base;
  int64_t token_stride, head_stride, block_stride, num_heads, num_blocks;
  int block_size, chunks, tokens;
};

/// `Rows` is what tensor_maps.cuh describes a cache by.
template <class Rows>
bool encode_map(tensor_map& map, const Rows& rows) {
  for (const int64_t stride : {rows.token_stride, rows.head_stride, rows.block_stride})
    if (stride <= 0 || stride % 16 != 0) return false;
  map = {static_cast<const unsigned char*>(rows.base), rows.token_stride, rows.head_stride,
         rows.block_stride, rows.num_heads, rows.num_blocks, rows.block_size, rows.chunks,
         rows.tokens};
  return true;
}

inline void prefetch_map(const tensor_map&) {}

inline void tensor_copy(void* shared, const tensor_map& map, int token, int head, int block,
                        copy_barrier* barrier, cache_policy policy) {
  emulation::phase& p = emulation::phase_of(barrier);
  unsigned char* const target = static_cast<unsigned char*>(shared);
  if (!p.fenced) emulation::tell("a copy before the fence after its barrier's initialisation");
  if (reinterpret_cast<uintptr_t>(target) % 1024 != 0)
    emulation::tell("a swizzled copy to an address that is no multiple of 1024");
  if (token < 0 || token + map.tokens > map.block_size || head < 0 || head >= map.num_heads ||
      block < 0 || block >= map.num_blocks)
    return emulation::tell("a copy from outside the tensor map");
  const unsigned char* const source =
      map.base + block * map.block_stride + head * map.head_stride + token * map.token_stride;
  for (int chunk = 0; chunk < map.chunks; ++chunk)
    for (int t = 0; t < map.tokens; ++t)
      for (int piece = 0; piece < 8; ++piece) {
        const int row = chunk * map.tokens + t;
        emulation::start_copy(p.copies, {target + row * 128 + (piece ^ (row & 7)) * 16,
                                         source + t * map.token_stride + chunk * 128 + piece * 16,
                                         16});
      }
  ++emulation::bulk_copies[policy.read_once];
  p.started += map.chunks * map.tokens * 128;
  if (p.pending == 0 && p.started > p.expected)
    emulation::tell("a copy of more bytes than its phase expects");
}

inline void copy_16(void* shared, const void* global) {
  emulation::start_copy(emulation::groups[emulation::current].open,
                        {static_cast<unsigned char*>(shared), global, 16});
}

inline void commit_copies() {
  emulation::copy_groups& mine = emulation::groups[emulation::current];
  mine.closed.push_back(std::exchange(mine.open, {}));
}

template <int PENDING>
void wait_copies() {
  auto& closed = emulation::groups[emulation::current].closed;
  while (closed.size() > PENDING) {
    emulation::finish_copies(closed.front());
    closed.erase(closed.begin());
  }
}

}  // namespace pagedattn
