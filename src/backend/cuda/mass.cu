// SPDX-License-Identifier: MIT
// Masses of blocks. 16 lanes take a block, four tokens each, and add in a fixed order, so that a
// block's mass depends on nothing but the block.
#include <cstdint>

#include "backend/cuda/block_sum.cuh"
#include "backend/cuda/check.h"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;

// One CTA per head.
__global__ __launch_bounds__(kThreads) void HideListedKernel(const BlockMasses a) {
  const auto head = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t end = a.lengths[head / a.n_kv_heads].n_blocks * kBlockTokens;
  const std::int32_t n = a.listed.count[head];
  const std::int64_t row = static_cast<std::int64_t>(head) * a.listed.capacity;
  float* scores = a.scores + static_cast<std::int64_t>(head) * a.group * a.stride;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < n; i += kThreads) {
    const std::int32_t token = a.listed.tokens[row + i];
    if (token >= end) continue;
    for (std::uint32_t mask = a.listed.mask[row + i]; mask != 0; mask &= mask - 1) {
      const int h = __ffs(static_cast<int>(mask)) - 1;
      scores[h * a.stride + token] = __int_as_float(0xFF800000);
    }
  }
}

__device__ inline float Term(float score, float scale, float shift) {
  const float x = fmaf(scale, score, -shift);
  return expf(x > 88.0f ? 88.0f : x);  // a NaN stays
}

__global__ __launch_bounds__(kThreads) void MassKernel(const BlockMasses a) {
  const auto list = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t n_blocks = a.lengths[list / a.group / a.n_kv_heads].n_blocks;
  const float shift = a.shift[list];
  const float* scores = a.scores + list * a.stride;
  float* mass = a.mass + list * a.mass_stride;
  ForEachBlock<kThreads>(scores, n_blocks, [&](std::int32_t block, const float4& v, int) {
    const float sum = SumOfBlock(Term(v.x, a.scale, shift), Term(v.y, a.scale, shift),
                                 Term(v.z, a.scale, shift), Term(v.w, a.scale, shift));
    if (threadIdx.x % kLanesPerBlock == 0 && block < n_blocks) mass[block] = sum;
  });
}

}  // namespace

void Mass(const BlockMasses& args, cudaStream_t stream) {
  if (args.n_lists == 0 || args.max_blocks <= 0) return;
  if (args.listed.tokens != nullptr) {
    const auto n_heads = static_cast<unsigned>(args.n_lists / args.group);
    HideListedKernel<<<n_heads, kThreads, 0, stream>>>(args);
    CheckLaunch("HideListed");
  }
  MassKernel<<<BlockGrid<kThreads>(args.n_lists, args.max_blocks), kThreads, 0, stream>>>(args);
  CheckLaunch("Mass");
}

}  // namespace fathom::cuda
