// SPDX-License-Identifier: MIT
// What candidates that did not win weigh, block by block.
#include "backend/cuda/rest.h"

#include <cstdint>

#include "backend/cuda/block_sum.cuh"
#include "backend/cuda/follow.cuh"

namespace fathom::cuda {
namespace {

constexpr int kCorrectThreads = 1024;
constexpr int kSumThreads = 256;
constexpr float kGrain = 1.0f / 4096;  // sums of its multiples below 2^12 are exact in any order
constexpr float kFar = 40;             // arguments of exp that are left to a far lower limit

__device__ inline float Rounded(float x) { return rintf(x * (1 / kGrain)) * kGrain; }

__device__ inline float ScoreOfKey(std::uint64_t key) {
  return ScoreOf(static_cast<std::uint32_t>(key >> 32));
}

// One CTA per list: blocks are shared by its candidates only, and barriers order the phases.
__device__ void CorrectList(const RestOfCandidates& a) {
  const auto list = static_cast<std::int32_t>(blockIdx.x);
  const auto tid = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t head = list / a.group;
  const std::uint64_t* keys =
      a.candidates.keys + static_cast<std::int64_t>(list) * a.candidates.capacity;
  // Most lists have one candidate per thread: it is asked for before their number is known.
  const std::uint64_t own_key = tid < a.candidates.capacity ? keys[tid] : 0;
  const auto key_at = [&](std::int32_t i) { return i == tid ? own_key : keys[i]; };
  const std::int32_t n = min(a.candidates.count[list], a.candidates.capacity);
  const std::uint64_t kth_key = a.kth_key[list];
  const Lengths lengths = a.lengths[head / a.n_kv_heads];
  if (lengths.keep == 0 || (a.redo != nullptr && a.redo[head] != 0)) return;
  const float kth = ScoreOfKey(kth_key);
  const float least = a.candidates.least[list];
  const bool far = !(a.exp_scale * (kth - least) <= kFar);  // an infinite or NaN difference too
  const float cut = far ? kth : least;
  float* rest = a.rest + list * a.rest_stride;
  if (tid == 0) a.cut[list] = cut;

  if (far) {
    for (std::int32_t b = tid; b < lengths.n_blocks; b += kCorrectThreads) rest[b] = 0;
  } else {  // the same value whichever candidates of a block come first
#pragma unroll 1
    for (std::int32_t i = tid; i < n; i += kCorrectThreads) {
      float* const at = rest + TokenOf(key_at(i)) / kBlockTokens;
      *at = Rounded(*at);
    }
  }
  __syncthreads();
  const float counted = far ? 0.0f : 1.0f;
#pragma unroll 1
  for (std::int32_t i = tid; i < n; i += kCorrectThreads) {
    const std::uint64_t key = key_at(i);
    const float weight =
        key >= kth_key ? 0.0f : Rounded(expf(a.exp_scale * (ScoreOfKey(key) - cut)));
    const float change = weight - counted;
    if (change != 0) atomicAdd(rest + TokenOf(key) / kBlockTokens, change);
  }
  if (far) return;
  __syncthreads();
  // Sums of the scan may be a little less than the number of candidates in them.
#pragma unroll 1
  for (std::int32_t i = tid; i < n; i += kCorrectThreads) {
    float* const at = rest + TokenOf(key_at(i)) / kBlockTokens;
    if (__ldcg(at) < 0) *at = 0;
  }
}

__global__ __launch_bounds__(kCorrectThreads) void CorrectRestKernel(
    const __grid_constant__ RestOfCandidates a) {
  RunBeside(a.beside_gather, [&] { CorrectList(a); });
}

__device__ void SumList(const RestOfScores& a) {
  const auto list = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t head = list / a.group;
  const Lengths lengths = a.lengths[head / a.n_kv_heads];
  if (lengths.keep == 0 || (a.redo != nullptr && a.redo[head] == 0)) return;
  const std::uint64_t kth_key = a.kth_key[list];
  const float cut = ScoreOfKey(kth_key);
  if (blockIdx.y == 0 && threadIdx.x == 0) a.cut[list] = cut;
  float* rest = a.rest + list * a.rest_stride;
  const auto term = [&](float score, std::int32_t token) {
    const bool counts =
        token >= lengths.first && token < lengths.last && CandidateKey(score, token) < kth_key;
    return counts ? expf(a.exp_scale * (score - cut)) : 0.0f;
  };
  ForEachBlock<kSumThreads>(a.scores + list * a.stride, lengths.n_blocks,
                            [&](std::int32_t block, const float4& v, std::int32_t token) {
                              const float sum =
                                  SumOfBlock(term(v.x, token), term(v.y, token + 1),
                                             term(v.z, token + 2), term(v.w, token + 3));
                              if (threadIdx.x % kLanesPerBlock == 0 && block < lengths.n_blocks)
                                rest[block] = sum;
                            });
}

__global__ __launch_bounds__(kSumThreads) void SumRestKernel(
    const __grid_constant__ RestOfScores a) {
  RunBeside(a.beside_gather, [&] { SumList(a); });
}

}  // namespace

void CorrectRest(const RestOfCandidates& args, cudaStream_t stream) {
  if (args.n_lists == 0) return;
  LaunchFollower("CorrectRest", CorrectRestKernel, static_cast<unsigned>(args.n_lists),
                 kCorrectThreads, 0, stream, args);
}

void SumRest(const RestOfScores& args, cudaStream_t stream) {
  if (args.n_lists == 0 || args.max_blocks <= 0) return;
  dim3 grid = BlockGrid<kSumThreads>(args.n_lists, args.max_blocks);
  // Where only some heads are made again it is mostly none: few blocks of threads, which loop.
  constexpr unsigned kRare = 8;
  if (args.redo != nullptr && grid.y > kRare) grid.y = kRare;
  LaunchFollower("SumRest", SumRestKernel, grid, kSumThreads, 0, stream, args);
}

}  // namespace fathom::cuda
