// The instructions that CUDA C++ has no name for, each as one function: the products of the tensor
// cores, copies that run beside the threads, and the hand-over to a dependent launch.
//
// Everything else in the tuned kernels is plain C++, so a host emulation needs only twins of these.
#pragma once

#include "problem_class.cuh"

#ifdef PAGEDATTN_EMULATED_PTX
#include PAGEDATTN_EMULATED_PTX
#else

/// The block's dynamic shared memory, whose size the launch gives.
#define PA_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// What only sm_90 has: elsewhere a kernel with it compiles, and must not be launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PA_SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define PA_SM90_ASM(...) __trap()
#endif

namespace pagedattn {

PA_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

/// Four 8 × 8 matrices of 16-bit elements from shared memory. Lane i names row i % 8 of matrix
/// i / 8 (16 bytes, aligned); of each matrix a lane receives elements 2 (lane % 4) and the next of
/// row lane / 4.
PA_DEVICE void load_matrices(unsigned (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

/// The same, each matrix transposed on its way.
PA_DEVICE void load_matrices_transposed(unsigned (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

/// An 8 × 8 matrix of 16-bit elements, held by the warp as above, transposed.
PA_DEVICE unsigned transpose_matrix(unsigned m) {
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(m));
  return turned;
}

/// c += a · b with a 16 × 16, b 16 × 8, c 16 × 8 in fp32; a and b of TYPE (fp16 or bf16).
///
/// a: matrices (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15). b: k 2 (lane % 4) and the
/// next, then those + 8, of column lane / 4. c: columns 2 (lane % 4) and the next of row lane / 4,
/// then of row lane / 4 + 8.
template <int TYPE>
PA_DEVICE void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (TYPE == PA_BF16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats rounded to TYPE, `low` in the lower half.
template <int TYPE>
PA_DEVICE unsigned pack_pair(float low, float high) {
  unsigned pair;
  if constexpr (TYPE == PA_BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Both fp16 of a pair, times or minus those of another.
PA_DEVICE unsigned multiply_half_pair(unsigned a, unsigned b) {
  unsigned pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
PA_DEVICE unsigned subtract_half_pair(unsigned a, unsigned b) {
  unsigned pair;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

/// 2^x, quickly: denormal results are 0.
PA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// What counts the bytes of bulk copies on their way to shared memory; in shared memory.
struct alignas(8) copy_barrier {
  uint64_t word;
};

/// By one thread, once, before any other uses it: `arrivals` calls of `expect_bytes` a phase.
PA_DEVICE void init_barrier(copy_barrier* barrier, int arrivals) {
  PA_SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
              "r"(arrivals)
              : "memory");
}

/// After the barriers are initialised, before the first copy (then the block's or warp's barrier).
PA_DEVICE void fence_barrier_init() {
  PA_SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrive, and have the phase wait for so many bytes more.
PA_DEVICE void expect_bytes(copy_barrier* barrier, int bytes) {
  PA_SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                  shared_address(barrier)),
              "r"(bytes)
              : "memory");
}

/// Wait until the phase of this parity (0, 1, 0, …) is complete, its bytes readable.
PA_DEVICE void wait_barrier(copy_barrier* barrier, int parity) {
  PA_SM90_ASM(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n"
      "}" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

/// How long the second-level cache is to keep what bulk copies bring.
struct cache_policy {
  uint64_t bits;
};

/// `read_once`: evict it before anything else; otherwise as without a policy. To that evict_unchanged
/// was equal on an H200 in each of 14 measurements, and evict_normal took up to 15 % longer.
PA_DEVICE cache_policy cache_policy_for(bool read_once) {
  cache_policy first = {}, usual = {};
  PA_SM90_ASM("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first.bits));
  PA_SM90_ASM("createpolicy.fractional.L2::evict_unchanged.b64 %0;" : "=l"(usual.bits));
  return read_once ? first : usual;
}

/// Start a copy to shared memory; both addresses and `bytes` are multiples of 16.
PA_DEVICE void bulk_copy(void* shared, const void* global, int bytes, copy_barrier* barrier,
                         cache_policy policy) {
  PA_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy.bits)
      : "memory");
}

/// What the copy engine is told of a cache, by the host: see tensor_maps.cuh.
struct alignas(64) tensor_map {
  unsigned long long opaque[16];
};

/// Fetch a map that will be needed soon.
PA_DEVICE void prefetch_map(const tensor_map& map) {
  PA_SM90_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Start a copy of the map's box to shared memory (aligned to 1,024 bytes, rows swizzled), from
/// this token of a block on.
PA_DEVICE void tensor_copy(void* shared, const tensor_map& map, int token, int head, int block,
                           copy_barrier* barrier, cache_policy policy) {
  PA_SM90_ASM(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %2, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(0), "r"(token), "r"(head), "r"(block), "r"(shared_address(barrier)),
      "l"(policy.bits)
      : "memory");
}

/// Start a copy of 16 bytes to shared memory, past the first-level cache.
PA_DEVICE void copy_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

/// Close a group of this thread's copies so far.
PA_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Wait until at most PENDING of this thread's youngest groups are on their way.
template <int PENDING>
PA_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/// Let a dependent launch start its prologue (sm_90).
PA_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// In the dependent launch: wait until the one before has ended, its writes visible (sm_90).
PA_DEVICE void wait_for_primary() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Tell the blocks of this one's cluster that it has begun (sm_90). Every thread calls.
PA_DEVICE void begin_in_cluster() {
  PA_SM90_ASM("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/// After `begin_in_cluster`, before the first store to another block: until all have begun.
PA_DEVICE void wait_for_cluster_to_begin() {
  PA_SM90_ASM("barrier.cluster.wait;" ::: "memory");
}

/// Every thread of the cluster; what they stored in each other's shared memory is readable then.
PA_DEVICE void cluster_barrier() {
  PA_SM90_ASM("barrier.cluster.arrive.release;" ::: "memory");
  PA_SM90_ASM("barrier.cluster.wait.acquire;" ::: "memory");
}

/// Where the cluster's block number `block` has what this one has at `place`, in shared memory.
PA_DEVICE unsigned address_in_block(int block, const void* place) {
  unsigned there = 0;
  PA_SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;"
              : "=r"(there)
              : "r"(shared_address(place)), "r"(block));
  return there;
}
PA_DEVICE void store_in_block(int block, void* place, float4 value) {
  PA_SM90_ASM("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                  address_in_block(block, place)),
              "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
              : "memory");
}
PA_DEVICE void store_in_block(int block, void* place, float2 value) {
  PA_SM90_ASM("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in_block(block, place)),
              "f"(value.x), "f"(value.y)
              : "memory");
}

}  // namespace pagedattn
#endif

namespace pagedattn {

/// Two e5m2 as fp16, exactly: each is the upper byte of one.
PA_DEVICE unsigned half_pair_from_e5m2(unsigned short two) { return __byte_perm(two, 0, 0x1404); }

/// Two e4m3 as fp16, exactly.
PA_DEVICE unsigned half_pair_from_e4m3(unsigned short two) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
#else
  // laid into an fp16's fields e4m3 reads 2^-8 of its value, its subnormals included
  const unsigned upper = half_pair_from_e5m2(two);
  unsigned pair = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1;
  pair = multiply_half_pair(pair, 0x5c005c00u);  // by 256
  if ((upper & 0x7f00u) == 0x7f00u) pair |= 0x7fffu;  // NaN
  if ((upper & 0x7f000000u) == 0x7f000000u) pair |= 0x7fff0000u;
#endif
  return pair;
}

/// Two int8 as fp16, exactly: the fp16 1024 + n has n as its lower byte; n is 128 + x.
PA_DEVICE unsigned half_pair_from_int8(unsigned short two) {
  const unsigned raised = __byte_perm(two ^ 0x8080u, 0x64646464u, 0x4140);
  return subtract_half_pair(raised, 0x64806480u);
}

}  // namespace pagedattn
