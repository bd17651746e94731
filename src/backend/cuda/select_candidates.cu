// SPDX-License-Identifier: MIT
// The best of a list's candidates. A CTA holds the keys of a list in registers. Digits are counted
// from the highest bit in which scores differ, so that the first count parts most of them.
#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr int kSpeculative = 2;  // keys of a thread that are read before it is known what is there

struct Scratch {
  RadixScratch radix;
  std::uint32_t count;
  std::uint32_t warp_low[kRadixThreads / 32], warp_high[kRadixThreads / 32];
  std::uint64_t warp_least[kRadixThreads / 32];
};

// Radix of the keys less `base`, which is not above any of them and has all the high bits that the
// keys share. Ends with a barrier.
template <int kItems>
__device__ inline Radix<std::uint64_t> StartRadix(const std::uint64_t (&key)[kItems], Scratch* s,
                                                  std::uint32_t keep, std::uint64_t* base) {
  std::uint32_t low = ~0u, high = 0;  // of the scores
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const auto score = static_cast<std::uint32_t>(key[u] >> 32);
    low = key[u] != 0 ? min(low, score) : low;
    high = max(high, score);
  }
  low = __reduce_min_sync(kAllLanes, low);
  high = __reduce_max_sync(kAllLanes, high);
  const unsigned lane = threadIdx.x % 32;
  if (lane == 0) s->warp_low[threadIdx.x / 32] = low, s->warp_high[threadIdx.x / 32] = high;
  __syncthreads();
  low = __reduce_min_sync(kAllLanes, s->warp_low[lane]);
  high = __reduce_max_sync(kAllLanes, s->warp_high[lane]);
  *base = static_cast<std::uint64_t>(low) << 32;
  const int bits = 64 - __clz(static_cast<int>(high - low));  // of a difference
  Radix<std::uint64_t> radix(keep);
  radix.mask = bits == 64 ? 0 : ~std::uint64_t{0} << bits;
  radix.shift = bits - kRadixBits;
  return radix;
}

// kItems * kRadixThreads >= capacity.
template <int kItems>
__global__ __launch_bounds__(kRadixThreads) void SelectCandidatesKernel(const SelectCandidates a) {
  Follow();
  __shared__ Scratch s;
  const auto list = static_cast<std::int32_t>(blockIdx.x);
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t head = list / a.group;
  const auto* keys = reinterpret_cast<const unsigned long long*>(a.candidates.keys) +
                     static_cast<std::int64_t>(list) * a.candidates.capacity;
  std::uint64_t key[kItems];  // 0, which is below every key, where there is none
#pragma unroll
  for (int u = 0; u < kSpeculative; ++u) {
    const std::int32_t at = u * kRadixThreads + tid;
    key[u] = at < a.candidates.capacity ? __ldcg(keys + at) : 0;
  }
  const std::int32_t count = a.candidates.count[list];
  const std::int32_t keep = a.lengths[head / a.n_kv_heads].keep;
  ClearBins(&s.radix);
  if (tid == 0) s.count = 0;
  if (keep == 0) return;
  if (count < keep || count > a.candidates.capacity) {
    if (tid == 0) a.redo[head] = 1;
    return;
  }
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const std::int32_t at = u * kRadixThreads + tid;
    if (u >= kSpeculative) {
      key[u] = at < count ? __ldcg(keys + at) : 0;
    } else if (at >= count) {
      key[u] = 0;
    }
  }
  std::uint64_t base = 0;
  auto radix = StartRadix(key, &s, static_cast<std::uint32_t>(keep), &base);
  do {
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      if (key[u] != 0) radix.Count(&s.radix, key[u] - base);
    }
    __syncthreads();
    radix.Step(&s.radix);
  } while (!radix.Splits() && !radix.Exact());  // distinct keys split at the last digit
  const std::uint64_t least_winner = radix.value + base;

  std::uint32_t own = 0;
  std::uint64_t least = ~std::uint64_t{0};
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const bool wins = key[u] != 0 && key[u] >= least_winner;
    own += wins ? 1 : 0;
    least = wins && key[u] < least ? key[u] : least;
  }
  const std::uint32_t in_warp = InclusiveWarpSum(own);
  std::uint32_t place = 0;
  if (tid % 32 == 31 && in_warp != 0) place = atomicAdd(&s.count, in_warp);
  place = __shfl_sync(kAllLanes, place, 31) + in_warp - own;
  std::int32_t* winners = a.winners + static_cast<std::int64_t>(list) * a.max_keep;
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const bool wins = key[u] != 0 && key[u] >= least_winner;
    if (wins && place < static_cast<std::uint32_t>(keep)) winners[place++] = TokenOf(key[u]);
  }
  StoreLast(least, s.warp_least, a.kth_key + list, a.cut + list);
}

template <int kItems>
void Launch(const SelectCandidates& args, cudaStream_t stream) {
  LaunchFollower("SelectCandidates", SelectCandidatesKernel<kItems>,
                 static_cast<unsigned>(args.n_lists), kRadixThreads, 0, stream, args);
}

}  // namespace

void Select(const SelectCandidates& args, cudaStream_t stream) {
  if (args.n_lists == 0) return;
  const std::int32_t capacity = args.candidates.capacity;
  Check(capacity <= kMaxCandidates ? cudaSuccess : cudaErrorInvalidValue, "SelectCandidates");
  if (capacity <= 4 * kRadixThreads) {
    Launch<4>(args, stream);
  } else if (capacity <= 8 * kRadixThreads) {
    Launch<8>(args, stream);
  } else {
    Launch<16>(args, stream);
  }
}

}  // namespace fathom::cuda
