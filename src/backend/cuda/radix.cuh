// SPDX-License-Identifier: MIT
// The rank-th largest of many keys by one CTA: counts of 11-bit digits from the top down, so that
// no key is moved. For CTAs of kRadixThreads threads, all of which call everything here.
#pragma once

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

constexpr int kRadixThreads = 1024;
constexpr int kRadixBits = 11;
constexpr int kRadixBins = 1 << kRadixBits;
static_assert(kRadixBins == 2 * kRadixThreads, "a thread owns two bins");
constexpr std::uint32_t kAllLanes = 0xFFFFFFFFu;

struct RadixBin {
  std::uint32_t bin;
  std::uint32_t above;   // keys in larger bins
  std::uint32_t inside;  // keys in this one
};

// In shared memory. Bins are zero but between a count and the end of the FindBin after it.
struct RadixScratch {
  uint2 bins[kRadixBins / 2];
  std::uint32_t warp_sum[kRadixThreads / 32];
  RadixBin found;
};

// A barrier must follow before keys are counted.
__device__ inline void ClearBins(RadixScratch* s) { s->bins[threadIdx.x] = make_uint2(0, 0); }

__device__ inline std::uint32_t InclusiveWarpSum(std::uint32_t value) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned d = 1; d < 32; d *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

__device__ inline std::uint64_t WarpMin(std::uint64_t value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kAllLanes, value, d);
    value = other < value ? other : value;
  }
  return value;
}

// Of the last winner of a list, which is the least key of all threads: key and score. All threads
// of the block call it, after which nothing may follow.
__device__ inline void StoreLast(std::uint64_t least,
                                 std::uint64_t (&warp_least)[kRadixThreads / 32],
                                 std::uint64_t* key, float* score) {
  const unsigned tid = threadIdx.x;
  least = WarpMin(least);
  if (tid % 32 == 0) warp_least[tid / 32] = least;
  __syncthreads();
  if (tid >= 32) return;
  least = WarpMin(warp_least[tid]);
  if (tid != 0) return;
  *key = least;
  *score = ScoreOf(static_cast<std::uint32_t>(least >> 32));
}

// The bin that holds the rank-th largest of what was counted, 1 <= rank <= their number. Needs a
// barrier between the counts and the call; ends with one, bins zero again.
__device__ inline RadixBin FindBin(RadixScratch* s, std::uint32_t rank) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  const unsigned pair = kRadixBins / 2 - 1 - threadIdx.x;  // thread 0 has the largest digits
  const uint2 count = s->bins[pair];
  s->bins[pair] = make_uint2(0, 0);
  const std::uint32_t sum = count.x + count.y;
  const std::uint32_t in_warp = InclusiveWarpSum(sum);
  if (lane == 31) s->warp_sum[warp] = in_warp;
  __syncthreads();
  const std::uint32_t own = s->warp_sum[lane];
  const std::uint32_t before_warp = InclusiveWarpSum(own) - own;  // of warp `lane`
  const std::uint32_t before =
      __shfl_sync(kAllLanes, before_warp, static_cast<int>(warp)) + in_warp - sum;
  if (before < rank && rank <= before + sum) {  // one thread
    const bool high = rank <= before + count.y;
    s->found.bin = 2 * pair + (high ? 1 : 0);
    s->found.above = high ? before : before + count.y;
    s->found.inside = high ? count.y : count.x;
  }
  __syncthreads();
  return s->found;
}

// What is known of the rank-th largest key. Use: while more is wanted, count all keys, barrier,
// Step. The last digit overlaps the one before; the bits they share are decided already.
template <typename Key>
struct Radix {
  Key mask = 0;                // the bits that are decided
  Key value = 0;               // the key in those bits, zero in the others
  std::uint32_t need;          // its rank among the keys that agree in those bits
  std::uint32_t inside = ~0u;  // how many agree
  int shift = static_cast<int>(sizeof(Key)) * 8 - kRadixBits;  // of the next digit

  __device__ explicit Radix(std::uint32_t rank) : need(rank) {}
  __device__ bool Agrees(Key key) const { return (key & mask) == value; }
  __device__ bool Exact() const { return mask == static_cast<Key>(~Key{0}); }
  // Then the keys >= value are the `rank` largest, whatever their other bits are.
  __device__ bool Splits() const { return inside == need; }

  __device__ void Count(RadixScratch* s, Key key) const {
    if (!Agrees(key)) return;
    auto* bins = reinterpret_cast<std::uint32_t*>(s->bins);
    atomicAdd(bins + (static_cast<std::uint32_t>(key >> shift) & (kRadixBins - 1)), 1u);
  }
  __device__ void Step(RadixScratch* s) {
    const RadixBin found = FindBin(s, need);
    need -= found.above;
    inside = found.inside;
    value |= static_cast<Key>(found.bin) << shift;
    mask |= static_cast<Key>(kRadixBins - 1) << shift;
    shift = shift > kRadixBits ? shift - kRadixBits : 0;
  }
};

// A place for each lane that takes one, counted in *counter (shared or global). All lanes call.
__device__ inline std::uint32_t WarpPlace(bool takes, std::uint32_t* counter) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned ballot = __ballot_sync(kAllLanes, takes);
  if (ballot == 0) return 0;
  std::uint32_t first = 0;
  if (lane == 0) first = atomicAdd(counter, static_cast<std::uint32_t>(__popc(ballot)));
  first = __shfl_sync(kAllLanes, first, 0);
  return first + static_cast<std::uint32_t>(__popc(ballot & ((1u << lane) - 1)));
}

}  // namespace fathom::cuda
