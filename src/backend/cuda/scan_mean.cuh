// SPDX-License-Identifier: MIT
// What the scans of the mean codec share.
#pragma once

#include "backend/cuda/follow.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/scan_mean.h"

namespace fathom::cuda {

// Row of the piece that holds a plane or a channel's means.
__device__ inline std::int64_t PlaneRow(const ScanPiece& piece, const MeanTables& t, int i) {
  return piece.gathered_planes ? i : t.plane[std::int64_t{piece.table} * t.head_dim * kPlanes + i];
}
__device__ inline std::int64_t MeanRow(const ScanPiece& piece, const MeanTables& t, int c) {
  return piece.gathered_means ? c : t.channel[std::int64_t{piece.table} * t.head_dim + c];
}

__device__ inline const Lengths& LengthsOf(const MeanScan& s, int head) {
  return s.lengths[head / s.n_kv_heads];
}

// The least T at which a score can reach `least`, rounded down so far that rounding cannot hide a
// candidate; what is at or above it is compared as a score.
__device__ inline int LeastTotal(float least, float scale) {
  constexpr double kMost = 1 << 26;
  const double t = floor(static_cast<double>(least) / scale) - 2;
  if (!(t < kMost)) return 1 << 26;  // NaN: nothing is a candidate
  return t < -kMost ? -(1 << 26) : static_cast<int>(t);
}

// Launchers of the kernels. heavy_only: only tables that the filter cannot take.
void ScanMeanExact(const MeanScan& scan, bool heavy_only, cudaStream_t stream);
void FilterMean(const MeanScan& scan, cudaStream_t stream);
void SampleMean(const MeanScan& scan, cudaStream_t stream);

}  // namespace fathom::cuda
