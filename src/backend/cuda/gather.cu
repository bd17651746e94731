// SPDX-License-Identifier: MIT
#include <cassert>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/gather.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kChunkBytes = 2048;  // of a warp at a time: four loads of 16 bytes in every lane
constexpr int kLoads = kChunkBytes / 32 / 16;
constexpr int kBlocks = 132;  // of threads: 4 MB on their way, many times what the link holds

__device__ std::int64_t BytesOf(const GatherRuns& g, std::int64_t blocks) {
  return g.block_bytes > 0 ? blocks * g.block_bytes : (blocks + 1) / 2;
}

// Reads that pass over the caches: every byte is used once.
__device__ uint4 LoadOnce(const std::byte* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// A run is cut into chunks that do not cross segments.
struct Chunking {
  std::int64_t segment_bytes;  // of a row
  int per_segment;
  int total;  // of a row of the sequence
};

__device__ Chunking ChunksOf(const GatherRuns& g, int head) {
  Chunking c;
  c.segment_bytes = BytesOf(g, g.segment_blocks);
  c.per_segment = static_cast<int>((c.segment_bytes + kChunkBytes - 1) / kChunkBytes);
  const std::int64_t bytes = BytesOf(g, g.lengths[head / g.n_kv_heads].n_blocks);
  const auto whole = static_cast<int>(bytes / c.segment_bytes);
  const std::int64_t rest = bytes % c.segment_bytes;
  c.total = whole * c.per_segment + static_cast<int>((rest + kChunkBytes - 1) / kChunkBytes);
  return c;
}

__device__ void CopyChunk(const GatherRuns& g, int head, int i, int chunk) {
  const Chunking c = ChunksOf(g, head);
  const int segment = chunk / c.per_segment;
  const std::int64_t at = std::int64_t{chunk % c.per_segment} * kChunkBytes;
  const std::int64_t all = BytesOf(g, g.lengths[head / g.n_kv_heads].n_blocks);
  const std::int64_t left = min(c.segment_bytes, all - segment * c.segment_bytes) - at;
  const std::int64_t row = g.rows == nullptr ? i : g.rows[head * g.rows_stride + i];
  const std::byte* from =
      g.segments[std::int64_t{head} * g.max_segments + segment] + row * c.segment_bytes + at;
  std::byte* to = g.out + head * g.head_stride + i * g.row_stride + segment * c.segment_bytes + at;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint4 v[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int offset = (k * 32 + lane) * 16;
    // The end of a run is rounded up to 16 bytes: segments hold whole groups of 16 blocks.
    if (offset < left) v[k] = LoadOnce(from + offset);
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    const int offset = (k * 32 + lane) * 16;
    if (offset < left) *reinterpret_cast<uint4*>(to + offset) = v[k];
  }
}

__global__ void __launch_bounds__(kThreads) GatherKernel(GatherRuns g) {
  FollowAndLetRunBeside();
  __shared__ int first[kMostHeads + 1];  // chunk at which a head begins
  for (int h = static_cast<int>(threadIdx.x); h < g.n_heads; h += kThreads) {
    const bool sparse = g.lengths[h / g.n_kv_heads].keep > 0;
    first[h + 1] = sparse ? g.n_rows[h * g.n_rows_stride] * ChunksOf(g, h).total : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    first[0] = 0;
    for (int h = 0; h < g.n_heads; ++h) first[h + 1] += first[h];
  }
  __syncthreads();
  const int n = first[g.n_heads];
  int head = 0;
  for (int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
       item < n; item += static_cast<int>(gridDim.x) * kWarps) {
    while (item >= first[head + 1]) ++head;
    const int per_row = ChunksOf(g, head).total;
    const int in_head = item - first[head];
    CopyChunk(g, head, in_head / per_row, in_head % per_row);
  }
}

}  // namespace

void Gather(const GatherRuns& gather, cudaStream_t stream) {
  if (gather.n_heads == 0) return;
  assert(gather.n_heads <= kMostHeads);
  LaunchFollower("Gather", GatherKernel, kBlocks, kThreads, 0, stream, gather);
}

}  // namespace fathom::cuda
