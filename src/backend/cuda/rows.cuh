// SPDX-License-Identifier: MIT
// Device functions of the kernels that read rows.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <limits>

#include "backend/cuda/attend.h"
#include "backend/cuda/mma.cuh"

namespace fathom::cuda {

constexpr unsigned kAll = 0xFFFFFFFFU;  // lanes of a warp
constexpr float kLog2E = 1.44269504F;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

__device__ inline float Exp(float x) { return Exp2(x * kLog2E); }

__device__ inline float WarpSum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}

// Passes over NaN.
__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, d));
  return x;
}

__device__ inline void Unpack(uint4 packed, float (&x)[8]) {
  const std::uint32_t word[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

__device__ inline void CopyAsync(std::uint32_t to, const Half* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` groups of this thread are under way.
template <int pending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// RowSource of one head, read once.
struct HeadSource {
  const Half* rows;
  const Half* sinks;  // null: nothing is resident
  const Half* recent;
  int ring;
  int recent_first;
  int modulus;  // 0: rows are not folded
};
__device__ inline HeadSource SourceOf(const RowSource& source, int head, int sequence,
                                      int head_dim) {
  const Resident& resident = source.resident;
  HeadSource of_head = {source.rows[head], nullptr, nullptr, 1, 0, 0};
  if (source.row_modulus != nullptr) of_head.modulus = *source.row_modulus;
  if (resident.sinks == nullptr) return of_head;
  of_head.sinks = resident.sinks + static_cast<std::int64_t>(head) * kSinks * 2 * head_dim;
  of_head.recent = resident.recent + static_cast<std::int64_t>(head) * resident.ring * 2 * head_dim;
  of_head.ring = resident.ring;
  of_head.recent_first = resident.recent_first[sequence];
  return of_head;
}
__device__ inline const Half* RowOf(const HeadSource& source, int head_dim, int token) {
  const bool sink = source.sinks != nullptr && token < kSinks;
  const bool recent = source.sinks != nullptr && !sink && token >= source.recent_first;
  const Half* base = sink ? source.sinks : recent ? source.recent : source.rows;
  const int modulus = sink ? 0 : recent ? source.ring : source.modulus;
  const int row = modulus == 0 ? token : token % modulus;
  return base + static_cast<std::int64_t>(row) * 2 * head_dim;
}

// A block of threads in groups of kColumns, a thread eight channels: adds the groups' totals up,
// four heads at a time. scratch: [kThreads / kColumns][4][D], free after a barrier.
template <int kThreads, int kColumns, int kHeads>
__device__ inline void StoreTotals(const float (&total)[kHeads][8], int head_dim, int group,
                                   float* scratch, float* out) {
  constexpr int kGroups = kThreads / kColumns;
  const auto c = static_cast<int>(threadIdx.x) % kColumns;
  const auto mine = static_cast<int>(threadIdx.x) / kColumns;
#pragma unroll
  for (int first = 0; first < kHeads; first += 4) {
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (c * 8 >= head_dim) continue;
      const float(&x)[8] = total[first + h];
      auto* to = reinterpret_cast<float4*>(scratch + (mine * 4 + h) * head_dim + c * 8);
      to[0] = make_float4(x[0], x[1], x[2], x[3]);
      to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    __syncthreads();
    // [4][D] of every group of threads in one row.
#pragma unroll 1
    for (auto i = static_cast<int>(threadIdx.x); i < min(4, group - first) * head_dim;
         i += kThreads) {
      float sum = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) sum += scratch[g * 4 * head_dim + i];
      out[first * head_dim + i] = sum;
    }
  }
}

}  // namespace fathom::cuda
