// SPDX-License-Identifier: MIT
// What PrepareTables does for one table, by a block of threads that may have just made it. Loops
// stay loops: the kernel runs through them once, and its code has to be fetched.
#pragma once

#include <cstdint>

#include "backend/cuda/scan_mean.h"

namespace fathom::cuda {

// A table's integers where the block has them: in its shared memory or in the table.
struct TableWeights {
  int n_planes;
  int n_channels;
  const std::int16_t* weight;       // [n_planes][group]
  const std::int32_t* mean_weight;  // [n_channels][group]
};

template <int kThreads>
struct PrepareScratch {  // in shared memory
  int warp_sum[kThreads / 32];
  std::int16_t slot[kFilterSlots];
  std::uint8_t digit[kFilterSlots];
};

// Sums over the threads before, by warps of a whole block; `total` of all threads. warp_sum must
// not be in use by a sum before; contains a barrier.
template <int kThreads>
__device__ inline int ExclusiveSum(int own, int* warp_sum, int* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int up_to = own;
#pragma unroll
  for (unsigned d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, up_to, d);
    if (lane >= static_cast<int>(d)) up_to += other;
  }
  if (lane == 31) warp_sum[warp] = up_to;
  __syncthreads();
  int before = 0;
  *total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const int sum = warp_sum[w];
    before += w < warp ? sum : 0;
    *total += sum;
  }
  return before + up_to - own;
}

// A weight has a magnitude up to 255, an operand of the MMA is a signed byte: digit d of the sum of
// up to three bytes that makes it up.
__device__ inline int WeightDigit(int weight, int d) {
  int digit = 0;
#pragma unroll 1
  for (; d >= 0; --d) {
    digit = min(max(weight, -128), 127);
    weight -= digit;
  }
  return digit;
}

__device__ inline int DigitsOf(const std::int16_t* weight, int group) {
  int n = 1;
#pragma unroll 1
  for (int h = 0; h < group; ++h) {
    const int w = weight[h];
    if (w > 254) n = 3;
    if (n < 2 && (w > 127 || w < -128)) n = 2;
  }
  return n;
}

// Digit d of a mean weight in base 256, digits signed.
__device__ inline int MeanDigit(int weight, int d) {
  int digit = 0;
#pragma unroll 1
  for (; d >= 0; --d) {
    digit = static_cast<std::int8_t>(weight & 255);
    weight = (weight - digit) >> 8;
  }
  return digit;
}

__device__ inline std::uint32_t PackFour(const int (&v)[4]) {
  return (v[0] & 255u) | (v[1] & 255u) << 8 | (v[2] & 255u) << 16 | (v[3] & 255u) << 24;
}

template <int kThreads>
__device__ inline void PackWeights(const MeanTables& t, int table, const TableWeights& w) {
  const int words = (t.group + 3) / 4;
  const std::int64_t row = static_cast<std::int64_t>(table) * t.head_dim * kPlanes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < w.n_planes * words; i += kThreads) {
    const int plane = i / words, first = i % words * 4;
    std::uint32_t packed = 0;
#pragma unroll 1
    for (int h = first; h < min(t.group, first + 4); ++h) {
      const int weight = w.weight[plane * t.group + h];
      packed += static_cast<std::uint32_t>(weight) << 8 * (h % 4);
    }
    t.packed[row * words + i] = packed;
  }
}

// Which plane and which digit of its weight every slot of the filter holds.
template <int kThreads>
__device__ inline void DealSlots(const MeanTables& t, int table, const TableWeights& w,
                                 PrepareScratch<kThreads>* s) {
  constexpr int kPerThread = kMaxHeadDim * kPlanes / kThreads;
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  int digits[kPerThread], own = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int p = first + i;
    digits[i] = p < w.n_planes ? DigitsOf(w.weight + p * t.group, t.group) : 0;
    own += digits[i];
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kFilterSlots; i += kThreads) s->slot[i] = -1;
  int at = ExclusiveSum<kThreads>(own, s->warp_sum, &total);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll 1
    for (int d = 0; d < digits[i] && at + d < kFilterSlots; ++d) {
      s->slot[at + d] = static_cast<std::int16_t>(first + i);
      s->digit[at + d] = static_cast<std::uint8_t>(d);
    }
    at += digits[i];
  }
  if (threadIdx.x == 0) t.head[table].n_slots = total;
}

template <int kThreads>
__device__ inline void FillFragments(const MeanTables& t, int table, const TableWeights& w,
                                     const PrepareScratch<kThreads>& s) {
  const int n = ColumnGroups(t.group) * 2 * 32 * 2;  // words
  auto* out = reinterpret_cast<std::uint32_t*>(t.fragment) + static_cast<std::int64_t>(table) * n;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const int r = i % 2, lane = i / 2 % 32, chunk = i / 64 % 2, head = i / 128 * 8 + lane / 4;
    int v[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = chunk * 32 + r * 16 + lane % 4 * 4 + k;
      if (s.slot[at] < 0 || head >= t.group) continue;
      v[k] = WeightDigit(w.weight[s.slot[at] * t.group + head], s.digit[at]);
    }
    out[i] = PackFour(v);
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kFilterSlots; i += kThreads) {
    t.slot[static_cast<std::int64_t>(table) * kFilterSlots + i] = s.slot[i];
  }
}

template <int kThreads>
__device__ inline void FillMeanFragments(const MeanTables& t, int table, const TableWeights& w) {
  const int chunks = MeanChunks(t.head_dim);
  const int n = ColumnGroups(t.group) * chunks * 3 * 32 * 2;  // words
  auto* out =
      reinterpret_cast<std::uint32_t*>(t.mean_fragment) + static_cast<std::int64_t>(table) * n;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const int r = i % 2, lane = i / 2 % 32, d = i / 64 % 3, chunk = i / 192 % chunks;
    const int head = i / (192 * chunks) * 8 + lane / 4;
    int v[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int c = chunk * 32 + r * 16 + lane % 4 * 4 + k;
      if (c >= w.n_channels || head >= t.group) continue;
      v[k] = MeanDigit(w.mean_weight[c * t.group + head], d);
    }
    out[i] = PackFour(v);
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int h = static_cast<int>(threadIdx.x) / 32; h < t.group; h += kThreads / 32) {
    int total = 0;
#pragma unroll 1
    for (int c = lane; c < w.n_channels; c += 32) total += w.mean_weight[c * t.group + h];
    total = __reduce_add_sync(0xFFFFFFFFu, total);
    if (lane == 0) t.head[table].mean_total[h] = total;
  }
}

// All threads of the block. A barrier must lie between what wrote `w` and the call, and between
// calls.
template <int kThreads>
__device__ inline void PrepareTable(const MeanTables& t, int table, const TableWeights& w,
                                    PrepareScratch<kThreads>* s) {
  DealSlots<kThreads>(t, table, w, s);
  PackWeights<kThreads>(t, table, w);
  FillMeanFragments<kThreads>(t, table, w);
  __syncthreads();
  FillFragments<kThreads>(t, table, w, *s);
}

}  // namespace fathom::cuda
