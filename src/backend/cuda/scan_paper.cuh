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

// Planes that a head reads, channel * 4 + p ascending, and the rank of every channel among those
// that are read. Returns their number. One thread.
__device__ inline int ListPlanes(const PaperScan& s, int head, std::int16_t* plane,
                                 std::int16_t* rank) {
  int n = 0, channels = 0;
  for (int j = 0; j < s.head_dim; ++j) {
    const int depth = s.depth[head * s.head_dim + j];
    rank[j] = static_cast<std::int16_t>(channels);
    if (depth > 0) ++channels;
    for (int p = 0; p < depth; ++p) plane[n++] = static_cast<std::int16_t>(j * kPlanes + p);
  }
  return n;
}

// Candidates by tensor cores, for groups of up to four query heads; else false, and nothing done.
bool FilterPaper(const PaperScan& scan, cudaStream_t stream);

}  // namespace fathom::cuda
