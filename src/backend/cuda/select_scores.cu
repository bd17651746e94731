// SPDX-License-Identifier: MIT
// The best of all scores of a list, whatever they are. One digit of all keys is counted at a time;
// as soon as those that may still win fit in shared memory, the rest is done there.
#include <cstdint>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/radix.cuh"
#include "backend/cuda/select.h"

namespace fathom::cuda {
namespace {

constexpr std::uint32_t kBuffer = 4096;

struct Scratch {
  std::uint64_t keys[kBuffer];
  RadixScratch radix;
  std::uint32_t n_keys;
  std::uint32_t n_winners;
  std::uint64_t warp_least[kRadixThreads / 32];
};

// fn(key, valid) for tokens [first, last); all lanes of a warp call it together.
template <typename Fn>
__device__ inline void ForEachKey(const float* scores, std::int32_t first, std::int32_t last,
                                  const Fn& fn) {
  constexpr int kLoads = 8;
  for (std::int32_t base = first; base < last; base += kLoads * kRadixThreads) {
    const std::int32_t token = base + static_cast<std::int32_t>(threadIdx.x);
    float score[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const std::int32_t t = token + u * kRadixThreads;
      score[u] = t < last ? __ldcg(scores + t) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const std::int32_t t = token + u * kRadixThreads;
      fn(CandidateKey(score[u], t), t < last);
    }
  }
}

// Writes a winner where `wins`. All lanes of a warp call it.
__device__ inline void Emit(Scratch* s, std::int32_t* winners, std::uint64_t key, bool wins,
                            std::uint64_t* least) {
  const std::uint32_t place = WarpPlace(wins, &s->n_winners);
  if (!wins) return;
  winners[place] = TokenOf(key);
  if (key < *least) *least = key;
}

// The winners of shared keys, which are those that agree with radix.
__device__ inline void Finish(Scratch* s, Radix<std::uint64_t> radix, std::int32_t* winners,
                              std::uint64_t* least) {
  const std::uint32_t n = s->n_keys;
  while (!radix.Splits()) {
    for (std::uint32_t i = threadIdx.x; i < n; i += kRadixThreads) {
      radix.Count(&s->radix, s->keys[i]);
    }
    __syncthreads();
    radix.Step(&s->radix);
  }
  for (std::uint32_t base = 0; base < n; base += kRadixThreads) {
    const std::uint32_t i = base + threadIdx.x;
    const std::uint64_t key = i < n ? s->keys[i] : 0;
    Emit(s, winners, key, i < n && key >= radix.value, least);
  }
}

__global__ __launch_bounds__(kRadixThreads) void SelectScoresKernel(const SelectScores a) {
  Follow();
  __shared__ Scratch s;
  const auto list = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t head = list / a.group;
  if (a.redo != nullptr && a.redo[head] == 0) return;
  const Lengths lengths = a.lengths[head / a.n_kv_heads];
  if (lengths.keep == 0) return;
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  const float* scores = a.scores + list * a.stride;
  std::int32_t* winners = a.winners + static_cast<std::int64_t>(list) * a.max_keep;
  ClearBins(&s.radix);
  if (tid == 0) {
    s.n_keys = 0;
    s.n_winners = 0;
  }
  __syncthreads();
  Radix<std::uint64_t> radix(static_cast<std::uint32_t>(lengths.keep));
  do {
    ForEachKey(scores, lengths.first, lengths.last, [&](std::uint64_t key, bool valid) {
      if (valid) radix.Count(&s.radix, key);
    });
    __syncthreads();
    radix.Step(&s.radix);
  } while (!radix.Splits() && radix.inside > kBuffer);

  // Larger than all that agree: a winner. Agrees: one if all of them are, else not yet known.
  std::uint64_t least = ~std::uint64_t{0};
  const bool splits = radix.Splits();
  ForEachKey(scores, lengths.first, lengths.last, [&](std::uint64_t key, bool valid) {
    const std::uint64_t decided = key & radix.mask;
    const bool better = valid && decided >= radix.value;
    if (!__any_sync(kAllLanes, better)) return;
    const bool open = better && !splits && decided == radix.value;
    Emit(&s, winners, key, better && !open, &least);
    const std::uint32_t place = WarpPlace(open, &s.n_keys);
    if (open) s.keys[place] = key;
  });
  __syncthreads();
  if (!splits) Finish(&s, radix, winners, &least);
  StoreLast(least, s.warp_least, a.kth_key + list, a.cut + list);
}

}  // namespace

void Select(const SelectScores& args, cudaStream_t stream) {
  if (args.n_lists == 0) return;
  LaunchFollower("SelectScores", SelectScoresKernel, static_cast<unsigned>(args.n_lists),
                 kRadixThreads, 0, stream, args);
}

}  // namespace fathom::cuda
