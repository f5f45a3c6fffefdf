// The class of problems that a library is compiled for, as constants.
#pragma once

#include <cuda_runtime.h>

#include "pagedattn.h"

#if !defined(PAGEDATTN_QUERY_TYPE) || !defined(PAGEDATTN_KV_TYPE) || \
    !defined(PAGEDATTN_HEAD_DIM) || !defined(PAGEDATTN_GROUP) || !defined(PAGEDATTN_BLOCK_SIZE)
#error "define PAGEDATTN_QUERY_TYPE, _KV_TYPE, _HEAD_DIM, _GROUP and _BLOCK_SIZE: see pagedattn.h"
#endif

#define PA_DEVICE __device__ __forceinline__

namespace pagedattn {

constexpr int QUERY_TYPE = PAGEDATTN_QUERY_TYPE;
constexpr int KV_TYPE = PAGEDATTN_KV_TYPE;
constexpr int HEAD_DIM = PAGEDATTN_HEAD_DIM;
constexpr int GROUP = PAGEDATTN_GROUP;
constexpr int BLOCK_SIZE = PAGEDATTN_BLOCK_SIZE;

static_assert(QUERY_TYPE >= PA_F16 && QUERY_TYPE <= PA_F32, "no such query type");
static_assert(KV_TYPE >= PA_F16 && KV_TYPE <= PA_E5M2, "no such KV type");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 8 && HEAD_DIM <= 256, "head_dim is not served");
static_assert(BLOCK_SIZE % 8 == 0 && BLOCK_SIZE >= 8, "block_size is not a multiple of 8");
static_assert(GROUP >= 1, "a KV head has at least one query head");

constexpr int THREADS = 128;  // of a block; proven on BI-V100, where 1024 is only promised
constexpr int SHARED_LIMIT = 32768;  // bytes; what every device is known to have

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

}  // namespace pagedattn
