// SPDX-License-Identifier: MIT
// The limit of a scan, from a sample. It is read once and stays in registers: of a few hundred
// groups of it, the r-th largest maximum is a lower bound of the r-th largest score, and hardly
// more than r scores reach it; among those the r-th is found. A group has scores of every tile,
// because neighbours are alike. Where the sample is large, or r, parts of it are read again.
#include <cstdint>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr int kGroups = 4 * kRadixThreads;
constexpr int kBuffer = 2 * kGroups;                   // scores that reach the bound
constexpr int kFew = 512;                              // keys that are ranked by comparing all
constexpr std::uint32_t kFewRank = 256;                // ranks for which kFew groups suffice
constexpr int kHeld = 8;                               // fours of a thread in registers
constexpr int kBatch = 2;                              // fours of a thread that are read together
constexpr std::uint32_t kMinusInfinity = 0x007FFFFFu;  // OrderedScore(-inf)
constexpr float kLowest = -3.402823466e+38f;

struct Scratch {
  alignas(16) std::uint32_t keys[kBuffer];
  RadixScratch radix;
  std::uint32_t count;
  std::uint32_t nth;
};

__device__ inline float4 AllMinusInfinity() {
  const float inf = __int_as_float(0xFF800000);
  return make_float4(inf, inf, inf, inf);
}

// Where four u of a thread lies: a warp takes 64 bytes of every 2 kB.
__device__ inline std::int32_t PlaceOf(std::int32_t u) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
  return (u * 8 + lane / 4) * 128 + warp * 4 + lane % 4;
}

// The scores of a list, as a thread sees them.
struct Sample {
  const float4* scores;
  std::int32_t n4;
  float4 held[kHeld];

  // n4 may not be known yet: most4 are there to be read.
  __device__ void Load(const float4* from, std::int64_t most4) {
    scores = from;
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      held[u] = PlaceOf(u) < most4 ? __ldcg(scores + PlaceOf(u)) : AllMinusInfinity();
    }
  }
  __device__ void SetLength(std::int32_t n) {
    n4 = n;
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      if (PlaceOf(u) >= n4) held[u] = AllMinusInfinity();
    }
  }
  // fn(four scores) for all n4 * 4, and for -inf behind the end; all lanes of a warp call it
  // together.
  template <typename Fn>
  __device__ void ForEach(const Fn& fn) const {
#pragma unroll
    for (int u = 0; u < kHeld; ++u) fn(held[u]);
    for (std::int32_t u = kHeld; u * kRadixThreads < n4; u += kBatch) {
      float4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::int32_t at = PlaceOf(u + i);
        v[i] = at < n4 ? __ldcg(scores + at) : AllMinusInfinity();
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) fn(v[i]);
    }
  }
};

// The rank-th largest of shared keys [0, n), 1 <= rank <= n <= kFew, by comparing each with all.
// keys[n ..] up to a multiple of 4 are written. Needs a barrier before and ends with one.
__device__ inline std::uint32_t NthOfFew(Scratch* s, std::uint32_t n, std::uint32_t rank) {
  if (threadIdx.x < (4 - n % 4) % 4) s->keys[n + threadIdx.x] = 0;  // below all, or equal
  __syncthreads();
  const std::uint32_t lanes = n <= 32 ? 32 : n <= 64 ? 16 : n <= 128 ? 8 : n <= 256 ? 4 : 2;
  const std::uint32_t mine = threadIdx.x / lanes;
  const std::uint32_t key = mine < n ? s->keys[mine] : 0;
  std::uint32_t above = 0, equal = 0;
  const auto* fours = reinterpret_cast<const uint4*>(s->keys);
#pragma unroll 4
  for (std::uint32_t i = threadIdx.x % lanes; i < (n + 3) / 4; i += lanes) {
    const uint4 v = fours[i];
    above += (v.x > key ? 1 : 0) + (v.y > key ? 1 : 0) + (v.z > key ? 1 : 0) + (v.w > key ? 1 : 0);
    equal +=
        (v.x == key ? 1 : 0) + (v.y == key ? 1 : 0) + (v.z == key ? 1 : 0) + (v.w == key ? 1 : 0);
  }
  std::uint32_t both = above << 16 | equal;
  for (std::uint32_t d = lanes / 2; d > 0; d /= 2) {
    both += __shfl_xor_sync(kAllLanes, both, static_cast<int>(d));
  }
  above = both >> 16, equal = both & 0xFFFF;
  if (mine < n && above < rank && rank <= above + equal) s->nth = key;
  __syncthreads();
  return s->nth;
}

// The same for any n.
__device__ inline std::uint32_t NthKey(Scratch* s, std::uint32_t n, std::uint32_t rank) {
  if (n <= kFew) return NthOfFew(s, n, rank);
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
__device__ inline float LowerBound(Scratch* s, const Sample& sample, std::uint32_t rank) {
  float4 best = AllMinusInfinity();
  sample.ForEach([&](const float4& v) {  // fmaxf passes over a NaN
    best.x = fmaxf(best.x, v.x);
    best.y = fmaxf(best.y, v.y);
    best.z = fmaxf(best.z, v.z);
    best.w = fmaxf(best.w, v.w);
  });
  // As few groups as make a bound that is near enough.
  std::uint32_t n = kGroups;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (rank <= 64) {
    float most = fmaxf(fmaxf(best.x, best.y), fmaxf(best.z, best.w));
#pragma unroll
    for (int d = 16; d >= 4; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
    n = 128;
    if (lane < 4) s->keys[warp * 4 + lane] = OrderedScore(most);
  } else if (rank <= kFewRank) {
    n = kFew;
#pragma unroll
    for (int d = 16; d >= 4; d /= 2) {
      best.x = fmaxf(best.x, __shfl_xor_sync(kAllLanes, best.x, d));
      best.y = fmaxf(best.y, __shfl_xor_sync(kAllLanes, best.y, d));
      best.z = fmaxf(best.z, __shfl_xor_sync(kAllLanes, best.z, d));
      best.w = fmaxf(best.w, __shfl_xor_sync(kAllLanes, best.w, d));
    }
  }
  if (n == kGroups || (n == kFew && lane < 4)) {
    const std::uint32_t at = n == kGroups ? threadIdx.x : warp * 4 + lane;
    reinterpret_cast<uint4*>(s->keys)[at] = {OrderedScore(best.x), OrderedScore(best.y),
                                             OrderedScore(best.z), OrderedScore(best.w)};
  }
  __syncthreads();
  const std::uint32_t key = NthKey(s, n, rank);  // ends with a barrier
  return key <= kMinusInfinity ? kLowest : ScoreOf(key);
}

// Puts the scores >= bound into shared keys and returns their number, which may exceed kBuffer.
__device__ inline std::uint32_t Gather(Scratch* s, const Sample& sample, float bound) {
  std::uint32_t own = 0;
  sample.ForEach([&](const float4& v) {
    own += (v.x >= bound ? 1 : 0) + (v.y >= bound ? 1 : 0) + (v.z >= bound ? 1 : 0) +
           (v.w >= bound ? 1 : 0);
  });
  if (__any_sync(kAllLanes, own != 0)) {
    const std::uint32_t up_to = InclusiveWarpSum(own);
    std::uint32_t place = 0;
    if (threadIdx.x % 32 == 31) place = atomicAdd(&s->count, up_to);
    place = __shfl_sync(kAllLanes, place, 31) + up_to - own;
    const auto put = [&](float score) {
      if (!(score >= bound)) return;
      if (place < kBuffer) s->keys[place] = OrderedScore(score);
      ++place;
    };
    if (own != 0) {
      sample.ForEach([&](const float4& v) { put(v.x), put(v.y), put(v.z), put(v.w); });
    }
  }
  __syncthreads();
  return s->count;
}

// The rank-th largest of the sample by counting digits.
__device__ inline std::uint32_t NthOfSample(Scratch* s, const Sample& sample, std::uint32_t rank) {
  Radix<std::uint32_t> radix(rank);
  while (!radix.Exact()) {
    // What ForEach puts behind the end is -inf: below the rank-th, or equal to it.
    sample.ForEach([&](const float4& v) {
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
  Follow();
  __shared__ Scratch s;
  const std::int32_t list = static_cast<std::int32_t>(blockIdx.x);
  const Lengths lengths = a.lengths[list / a.group / a.n_kv_heads];
  Sample sample;
  sample.Load(reinterpret_cast<const float4*>(a.sample + list * a.stride), a.stride / 4);
  ClearBins(&s.radix);
  if (threadIdx.x == 0) {
    s.count = 0;
    if (a.count != nullptr) a.count[list] = 0;
    if (a.redo != nullptr && list % a.group == 0) a.redo[list / a.group] = 0;
  }
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
  sample.SetLength(static_cast<std::int32_t>(valid / 4));
  __syncthreads();
  std::uint32_t key = 0;
  bool found = false;
  const bool fits = valid <= kBuffer;
  if (fits || rank <= kGroups) {
    const float bound = rank > kFewRank && fits ? kLowest : LowerBound(&s, sample, rank);
    const std::uint32_t n = Gather(&s, sample, bound);
    found = n <= kBuffer;
    if (found && n >= rank) key = NthKey(&s, n, rank);
  }
  if (!found) key = NthOfSample(&s, sample, rank);
  if (threadIdx.x == 0) {
    a.least[list] = key <= kMinusInfinity ? __int_as_float(0xFF800000) : ScoreOf(key);
  }
}

}  // namespace

void FindLimits(const SampleLimits& args, cudaStream_t stream) {
  if (args.n_lists == 0) return;
  LaunchFollower("FindLimits", FindLimitsKernel, static_cast<unsigned>(args.n_lists), kRadixThreads,
                 0, stream, args);
}

}  // namespace fathom::cuda
