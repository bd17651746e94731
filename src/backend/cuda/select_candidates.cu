// SPDX-License-Identifier: MIT
// The best of a list's candidates. A CTA holds the keys of a list in registers.
#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

struct Scratch {
  RadixScratch radix;
  std::uint32_t count;
  std::uint64_t warp_least[kRadixThreads / 32];
};

// kItems * kRadixThreads >= capacity.
template <int kItems>
__global__ __launch_bounds__(kRadixThreads) void SelectCandidatesKernel(const SelectCandidates a) {
  __shared__ Scratch s;
  const auto list = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t head = list / a.group;
  const std::int32_t keep = a.lengths[head / a.n_kv_heads].keep;
  if (keep == 0) return;
  const std::int32_t count = a.candidates.count[list];
  if (count < keep || count > a.candidates.capacity) {
    if (threadIdx.x == 0) a.redo[head] = 1;
    return;
  }
  const std::uint64_t* keys =
      a.candidates.keys + static_cast<std::int64_t>(list) * a.candidates.capacity;
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  std::uint64_t key[kItems];  // 0, which is below every key, where there is none
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const std::int32_t at = u * kRadixThreads + tid;
    key[u] = at < count ? __ldg(reinterpret_cast<const unsigned long long*>(keys) + at) : 0;
  }
  ClearBins(&s.radix);
  if (tid == 0) s.count = 0;
  __syncthreads();
  Radix<std::uint64_t> radix(static_cast<std::uint32_t>(keep));
  do {
#pragma unroll
    for (int u = 0; u < kItems; ++u) {
      if (key[u] != 0) radix.Count(&s.radix, key[u]);
    }
    __syncthreads();
    radix.Step(&s.radix);
  } while (!radix.Splits() && !radix.Exact());  // distinct keys split at the last digit

  std::uint32_t own = 0;
  std::uint64_t least = ~std::uint64_t{0};
#pragma unroll
  for (int u = 0; u < kItems; ++u) {
    const bool wins = key[u] != 0 && key[u] >= radix.value;
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
    const bool wins = key[u] != 0 && key[u] >= radix.value;
    if (wins && place < static_cast<std::uint32_t>(keep)) winners[place++] = TokenOf(key[u]);
  }
  least = WarpMin(least);
  if (tid % 32 == 0) s.warp_least[tid / 32] = least;
  __syncthreads();
  if (tid >= 32) return;
  least = WarpMin(s.warp_least[tid]);
  if (tid != 0) return;
  a.kth_key[list] = least;
  a.cut[list] = ScoreOf(static_cast<std::uint32_t>(least >> 32));
}

template <int kItems>
void Launch(const SelectCandidates& args, cudaStream_t stream) {
  SelectCandidatesKernel<kItems>
      <<<static_cast<unsigned>(args.n_lists), kRadixThreads, 0, stream>>>(args);
  CheckLaunch("SelectCandidates");
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
