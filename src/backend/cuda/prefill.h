// SPDX-License-Identifier: MIT
// Dense causal attention of a chunk of queries, on tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fathom/types.h"

namespace fathom::cuda {

// As PrefillArgs: query t of the chunk sees tokens 0 .. first + t. Rows are device memory or host
// memory mapped for the device, the rest is device memory; all are aligned to 16 bytes and borrowed
// until the kernel has run. head_dim is a multiple of 16 up to kMaxHeadDim, the group at most
// kMaxGroup; first + n_queries and n_queries times the group are at most 2^30.
struct PrefillAttention {
  HeadGeometry geometry;
  float scale;  // > 0
  std::int64_t first;
  std::int64_t n_queries;
  const float* q;           // [n_queries][n_heads][D]
  const Half* const* rows;  // [n_kv_heads] device array, each [first + n_queries][2][D]
  float* out;               // [n_queries][n_heads][D]
};

// Records one kernel; no allocation, no host synchronization, no launch for empty work. Throws
// (check.h) where the device lacks the shared memory: 97 KB, or 129 KB for head_dim above 128.
void Prefill(const PrefillAttention& args, cudaStream_t stream);

}  // namespace fathom::cuda
