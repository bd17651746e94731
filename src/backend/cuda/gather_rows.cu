// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstdint>

#include "backend/cuda/attend.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/rows.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;

// Threads take 16 bytes each, a warp of 512 consecutive bytes at a time; pieces of all blocks go
// forward together, so that host memory is read in the order of its addresses.
__global__ void __launch_bounds__(kThreads) GatherKernel(const __grid_constant__ GatherRows a) {
  FollowAndLetRunBeside();
  const auto head = static_cast<int>(blockIdx.y);
  const HeadSource source = SourceOf(a.source, head, head / a.n_kv_heads, a.head_dim);
  const int n = min(a.attended.count[head], a.attended.capacity);
  const int pieces = a.head_dim / 4;  // of a row
  const std::int64_t first = static_cast<std::int64_t>(head) * a.attended.capacity;
  const std::int32_t* tokens = a.attended.tokens + first;
  auto* out = reinterpret_cast<uint4*>(a.out + first * 2 * a.head_dim);
  const std::int64_t all = static_cast<std::int64_t>(n) * pieces;  // negative for dense heads
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < all;
       i += kLoads * step) {
    // Below 2^31: a list has at most 2^25 rows of up to 64 pieces.
    std::uint32_t row[kLoads], piece[kLoads];
    int token[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const auto at = static_cast<std::uint32_t>(min(i + u * step, all - 1));
      row[u] = at / static_cast<std::uint32_t>(pieces);
      piece[u] = at - row[u] * static_cast<std::uint32_t>(pieces);
      token[u] = __ldcg(tokens + row[u]);
    }
    uint4 data[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const Half* from = RowOf(source, a.head_dim, token[u]) + piece[u] * 8;
      if (i + u * step < all) data[u] = __ldcs(reinterpret_cast<const uint4*>(from));
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const std::int64_t at = i + u * step;
      if (at < all) out[at] = data[u];
    }
  }
}

}  // namespace

void Gather(const GatherRows& a, cudaStream_t stream) {
  if (a.n_heads <= 0 || a.attended.capacity <= 0) return;
  constexpr std::int64_t kBlocks = 264;  // 4 MB under way
  const std::int64_t pieces = static_cast<std::int64_t>(a.attended.capacity) * (a.head_dim / 4);
  const std::int64_t useful = (pieces + kThreads * kLoads - 1) / (kThreads * kLoads);
  const std::int64_t x = std::clamp<std::int64_t>(kBlocks / a.n_heads, 1, useful);
  const dim3 grid(static_cast<unsigned>(x), static_cast<unsigned>(a.n_heads));
  LaunchFollower("GatherKernel", GatherKernel, grid, kThreads, 0, stream, a);
}

}  // namespace fathom::cuda
