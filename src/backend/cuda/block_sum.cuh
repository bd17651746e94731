// SPDX-License-Identifier: MIT
// Sums over the 64 scores of each block of a list: 16 lanes take a block, four tokens each.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cuda/lists.h"
#include "backend/cuda/radix.cuh"

namespace fathom::cuda {

constexpr int kLanesPerBlock = kBlockTokens / 4;

// Lists along x, parts of their blocks along y.
template <int kThreads>
dim3 BlockGrid(std::int32_t n_lists, std::int32_t max_blocks) {
  constexpr int kPerCta = kThreads / kLanesPerBlock * 4;
  const std::int32_t parts = std::min((max_blocks + kPerCta - 1) / kPerCta, 65535);
  return {static_cast<unsigned>(n_lists), static_cast<unsigned>(parts), 1};
}

// fn(block, scores, first token) for every block of a list; scores 16-byte aligned. All lanes of a
// warp call fn together, those of a block at or beyond n_blocks with zeros.
template <int kThreads, typename Fn>
__device__ inline void ForEachBlock(const float* scores, std::int32_t n_blocks, const Fn& fn) {
  constexpr int kBlocks = kThreads / kLanesPerBlock;
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kLanesPerBlock;
  const auto group = static_cast<std::int32_t>(threadIdx.x) / kLanesPerBlock;
  const auto step = static_cast<std::int32_t>(gridDim.y) * kBlocks;
  for (std::int32_t base = static_cast<std::int32_t>(blockIdx.y) * kBlocks; base < n_blocks;
       base += step) {
    const std::int32_t block = base + group;
    const std::int32_t token = block * kBlockTokens + lane * 4;
    const float4 v = block < n_blocks ? __ldcg(reinterpret_cast<const float4*>(scores + token))
                                      : make_float4(0, 0, 0, 0);
    fn(block, v, token);
  }
}

// The sum over a block, in all its lanes; the order is always the same.
__device__ inline float SumOfBlock(float x, float y, float z, float w) {
  float sum = (x + y) + (z + w);
#pragma unroll
  for (int d = kLanesPerBlock / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
  return sum;
}

}  // namespace fathom::cuda
