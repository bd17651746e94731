// SPDX-License-Identifier: MIT
// What the plain and the tensor-core scan of the paper codec share: the same products in the same
// order, so that both find the same scores.
#pragma once

#include "backend/cuda/scan_paper.h"

namespace fathom::cuda {

// 2^-(p + 1).
__device__ inline float PlaneValue(int p) { return 0.5F / static_cast<float>(1 << p); }

// What plane p of a channel adds: q_value is q times PlaneValue(p).
__device__ inline float PlaneWeight(float q_value, float scale) { return q_value * scale; }

// The rank of every channel that a head reads among them; all threads of a block.
__device__ inline void RankChannels(const PaperScan& s, int head, std::int16_t* rank) {
  for (int c = static_cast<int>(threadIdx.x); c < s.n_channels[head];
       c += static_cast<int>(blockDim.x)) {
    rank[s.channels[std::int64_t{head} * s.head_dim + c]] = static_cast<std::int16_t>(c);
  }
}
__device__ inline const std::int16_t* PlanesOf(const PaperScan& s, int head) {
  return s.planes + std::int64_t{head} * s.head_dim * kPlanes;
}

// Planes of a head that the tensor-core scan takes; heads with more are left to the plain scan.
constexpr int kFilterPlanes = 128;

// Candidates by tensor cores, for groups of up to four query heads; else false, and nothing done.
bool FilterPaper(const PaperScan& scan, cudaStream_t stream);

}  // namespace fathom::cuda
