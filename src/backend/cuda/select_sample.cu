// SPDX-License-Identifier: MIT
// The limit of a scan, from a sample. Read twice instead of sorted: of 4096 interleaved groups of
// the sample, the r-th largest maximum is a lower bound of the r-th largest score, and hardly more
// than r scores reach it.
#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr int kGroups = 4 * kRadixThreads;
constexpr int kBuffer = 2 * kGroups;                   // scores that reach the bound
constexpr std::uint32_t kMinusInfinity = 0x007FFFFFu;  // OrderedScore(-inf)
constexpr float kLowest = -3.402823466e+38f;

struct Scratch {
  std::uint32_t keys[kBuffer];
  RadixScratch radix;
  std::uint32_t count;
};

// fn(four scores) for all n4 * 4, and for -inf behind the end; all lanes of a warp call it
// together.
template <typename Fn>
__device__ inline void ForEachScore(const float4* sample, std::int32_t n4, const Fn& fn) {
  constexpr int kLoads = 4;
  for (std::int32_t base = 0; base < n4; base += kLoads * kRadixThreads) {
    float4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const std::int32_t at = base + u * kRadixThreads + static_cast<std::int32_t>(threadIdx.x);
      const float inf = __int_as_float(0xFF800000);
      v[u] = at < n4 ? __ldg(sample + at) : make_float4(inf, inf, inf, inf);
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) fn(v[u]);
  }
}

// The rank-th largest of shared keys [0, n), 1 <= rank <= n.
__device__ inline std::uint32_t NthKey(Scratch* s, std::uint32_t n, std::uint32_t rank) {
  Radix<std::uint32_t> radix(rank);
  while (!radix.Exact()) {
    for (std::uint32_t i = threadIdx.x; i < n; i += kRadixThreads) {
      radix.Count(&s->radix, s->keys[i]);
    }
    __syncthreads();
    radix.Step(&s->radix);
  }
  return radix.value;
}

// A score that at least `rank` scores reach, or a lower one; above -inf. rank <= kGroups.
__device__ inline float LowerBound(Scratch* s, const float4* sample, std::int32_t n4,
                                   std::uint32_t rank) {
  const float inf = __int_as_float(0xFF800000);
  float4 best = make_float4(inf, inf, inf, inf);
  ForEachScore(sample, n4, [&](const float4& v) {  // fmaxf passes over a NaN
    best.x = fmaxf(best.x, v.x);
    best.y = fmaxf(best.y, v.y);
    best.z = fmaxf(best.z, v.z);
    best.w = fmaxf(best.w, v.w);
  });
  s->keys[threadIdx.x] = OrderedScore(best.x);
  s->keys[threadIdx.x + kRadixThreads] = OrderedScore(best.y);
  s->keys[threadIdx.x + 2 * kRadixThreads] = OrderedScore(best.z);
  s->keys[threadIdx.x + 3 * kRadixThreads] = OrderedScore(best.w);
  __syncthreads();
  const std::uint32_t key = NthKey(s, kGroups, rank);  // ends with a barrier
  return key <= kMinusInfinity ? kLowest : ScoreOf(key);
}

// Puts the scores >= bound into shared keys and returns their number, which may exceed kBuffer.
__device__ inline std::uint32_t Gather(Scratch* s, const float4* sample, std::int32_t n4,
                                       float bound) {
  ForEachScore(sample, n4, [&](const float4& v) {
    const bool any = v.x >= bound || v.y >= bound || v.z >= bound || v.w >= bound;
    if (!__any_sync(kAllLanes, any)) return;
    const float score[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const bool takes = score[c] >= bound;
      const std::uint32_t place = WarpPlace(takes, &s->count);
      if (takes && place < kBuffer) s->keys[place] = OrderedScore(score[c]);
    }
  });
  __syncthreads();
  return s->count;
}

// The rank-th largest of the sample, read three times.
__device__ inline std::uint32_t NthOfSample(Scratch* s, const float4* sample, std::int32_t n4,
                                            std::uint32_t rank) {
  Radix<std::uint32_t> radix(rank);
  while (!radix.Exact()) {
    // What ForEachScore puts behind the end is -inf: below the rank-th, or equal to it.
    ForEachScore(sample, n4, [&](const float4& v) {
      radix.Count(&s->radix, OrderedScore(v.x));
      radix.Count(&s->radix, OrderedScore(v.y));
      radix.Count(&s->radix, OrderedScore(v.z));
      radix.Count(&s->radix, OrderedScore(v.w));
    });
    __syncthreads();
    radix.Step(&s->radix);
  }
  return radix.value;
}

__global__ __launch_bounds__(kRadixThreads, 1) void FindLimitsKernel(const SampleLimits a) {
  __shared__ Scratch s;
  const std::int32_t list = static_cast<std::int32_t>(blockIdx.x);
  const Lengths lengths = a.lengths[list / a.group / a.n_kv_heads];
  if (lengths.keep == 0) {
    if (threadIdx.x == 0) a.least[list] = __int_as_float(0x7F800000);
    return;
  }
  const auto valid =
      static_cast<std::uint32_t>(SampleTokens(lengths.n_blocks, a.tile_step));  // whole tiles
  const std::uint32_t rank = min(
      2 * static_cast<std::uint32_t>((lengths.keep + a.tile_step - 1) / a.tile_step) + 8, valid);
  if (rank == 0) {
    if (threadIdx.x == 0) a.least[list] = __int_as_float(0xFF800000);
    return;
  }
  const auto* sample = reinterpret_cast<const float4*>(a.sample + list * a.stride);
  const auto n4 = static_cast<std::int32_t>(valid / 4);
  ClearBins(&s.radix);
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  std::uint32_t key = 0;
  bool found = false;
  if (valid <= kBuffer || rank <= kGroups) {
    const float bound = valid <= kBuffer ? kLowest : LowerBound(&s, sample, n4, rank);
    const std::uint32_t n = Gather(&s, sample, n4, bound);
    found = n <= kBuffer;
    if (found && n >= rank) key = NthKey(&s, n, rank);
  }
  if (!found) key = NthOfSample(&s, sample, n4, rank);
  if (threadIdx.x == 0) {
    a.least[list] = key <= kMinusInfinity ? __int_as_float(0xFF800000) : ScoreOf(key);
  }
}

}  // namespace

void FindLimits(const SampleLimits& args, cudaStream_t stream) {
  if (args.n_lists == 0) return;
  FindLimitsKernel<<<static_cast<unsigned>(args.n_lists), kRadixThreads, 0, stream>>>(args);
  CheckLaunch("FindLimits");
}

}  // namespace fathom::cuda
