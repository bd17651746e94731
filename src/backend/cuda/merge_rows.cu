// SPDX-License-Identifier: MIT
// Joins what the splits of AttendKernel left, and measures the rest. A block per list; its loads
// are asked for before anything is known of them, so that they are waited for together.
#include <cstdint>

#include "backend/cuda/attend.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/rows.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kHeldSplits = 2;             // of a warp, and of a lane, whose loads go first
constexpr int kHeldRest = 4;               // fours of a thread's rest whose loads go first
constexpr int kColumns = kMaxHeadDim / 4;  // of four channels
static_assert(kWarps == 32, "lane w of a warp has what warp w needs");

struct Shared {
  float4 total[kWarps][kColumns];
  double rest[kWarps];
};

__device__ inline double WarpSum(double x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}

// The rest of a list; a thread has every kThreads-th four of it.
struct RestSum {
  const float4* rest;
  float4 held[kHeldRest];

  __device__ RestSum(const RestMass& r, int list)
      : rest(reinterpret_cast<const float4*>(r.rest + list * r.stride)) {
    const std::int64_t n4 = r.rest == nullptr ? 0 : r.stride / 4;
#pragma unroll
    for (int u = 0; u < kHeldRest; ++u) {
      const int at = u * kThreads + static_cast<int>(threadIdx.x);
      held[u] = at < n4 ? __ldcg(rest + at) : make_float4(0, 0, 0, 0);
    }
  }
  // Of four at `at` those among the first n; in single precision.
  static __device__ double Four(const float4& v, int at, int n) {
    const float x = at < n ? v.x : 0, y = at + 1 < n ? v.y : 0;
    const float z = at + 2 < n ? v.z : 0, w = at + 3 < n ? v.w : 0;
    return static_cast<double>((x + y) + (z + w));
  }
  // The thread's sum, of the first n.
  __device__ double Sum(int n) const {
    const auto tid = static_cast<int>(threadIdx.x);
    double sum = 0;
#pragma unroll
    for (int u = 0; u < kHeldRest; ++u) sum += Four(held[u], (u * kThreads + tid) * 4, n);
#pragma unroll 4
    for (int at = kHeldRest * kThreads + tid; at < (n + 3) / 4; at += kThreads) {
      sum += Four(__ldcg(rest + at), at * 4, n);
    }
    return sum;
  }
};

// By a warp, all lanes of which have lse.
__device__ inline void StoreRest(const RestMass& r, int list, bool dense, const double* sums,
                                 float lse) {
  const double s = r.scale;
  const double offset = r.offset != nullptr ? r.offset[list] : 0;
  const double noise = r.noise != nullptr ? r.noise[list] : 0;
  const double above = s * (r.cut[list] + offset) + s * s * noise / 2 - lse;
  const double all = WarpSum(sums[threadIdx.x % 32]);
  const auto unit = dense ? 0.0F : static_cast<float>(exp(above > 88 ? 88.0 : above));
  const auto mass = dense ? 0.0F : static_cast<float>(unit * all);
  if (threadIdx.x % 32 != 0) return;
  r.unit[list] = unit;
  r.mass[list] = mass;
  r.least[list] = unit == 0 ? -kNothing : r.least_share * (1 + mass) / unit;
}

// The states of a list's parts: split s is held by lane s % 32 of every warp.
struct Parts {
  const PartState* part;
  int step, n_splits;
  PartState held[kHeldSplits];
  float shift, sum, light;  // of all parts, in all lanes

  __device__ Parts(const PartState* part_of_list, int group, int n)
      : part(part_of_list), step(group), n_splits(n) {
#pragma unroll
    for (int u = 0; u < kHeldSplits; ++u) {
      const int s = u * 32 + static_cast<int>(threadIdx.x) % 32;
      held[u] = s < n_splits ? part[s * step] : PartState{kNothing, 0, 0, 0};
    }
  }
  __device__ void Join() {
    const int beyond = kHeldSplits * 32 + static_cast<int>(threadIdx.x) % 32;
    float top = kNothing;
#pragma unroll
    for (int u = 0; u < kHeldSplits; ++u) top = fmaxf(top, held[u].top);
#pragma unroll 1
    for (int s = beyond; s < n_splits; s += 32) top = fmaxf(top, part[s * step].top);
    top = WarpMax(top);
    shift = top == kNothing ? 0 : top;
    sum = light = 0;
    const auto add = [&](const PartState& p) {
      const float w = Exp(p.top - shift);
      sum = __fmaf_rn(p.sum, w, sum);
      light = __fmaf_rn(p.light, w, light);
    };
#pragma unroll
    for (int u = 0; u < kHeldSplits; ++u) add(held[u]);
#pragma unroll 1
    for (int s = beyond; s < n_splits; s += 32) add(part[s * step]);
    sum = fathom::cuda::WarpSum(sum);
    light = fathom::cuda::WarpSum(light);
  }
  // What a part weighs; negative: it is empty, and what its rows sum to is not defined.
  __device__ float Share(const PartState& p) const { return p.sum == 0 ? -1 : Exp(p.top - shift); }
};

__device__ inline void AddScaled(float share, const float4& x, float4* to) {
  if (share < 0) return;
  to->x = __fmaf_rn(share, x.x, to->x);
  to->y = __fmaf_rn(share, x.y, to->y);
  to->z = __fmaf_rn(share, x.z, to->z);
  to->w = __fmaf_rn(share, x.w, to->w);
}

// kPieces: columns of a lane.
template <int kPieces>
__global__ void __launch_bounds__(kThreads, 1) MergeKernel(const __grid_constant__ MergeParts a) {
  Follow();
  __shared__ Shared shared;
  const auto tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32, warp = tid / 32;
  const auto list = static_cast<int>(blockIdx.x);
  const int head = list / a.group;
  const std::int64_t first =
      static_cast<std::int64_t>(head) * a.n_splits * a.group + list % a.group;
  Parts parts(a.part + first, a.group, a.n_splits);
  // A warp takes every 32nd split.
  const auto piece = [&](int split, int p) {
    const int column = lane + p * 32;
    if (split >= a.n_splits || column * 4 >= a.head_dim) return make_float4(0, 0, 0, 0);
    const float* from = a.part_out + (first + split * a.group) * a.head_dim;
    return __ldcg(reinterpret_cast<const float4*>(from) + column);
  };
  float4 ahead[kHeldSplits][kPieces];
#pragma unroll
  for (int u = 0; u < kHeldSplits; ++u) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) ahead[u][p] = piece(u * 32 + warp, p);
  }
  const RestSum rest(a.rest, list);
  const int n_rest = a.rest.rest == nullptr ? 0 : a.rest.lengths[head / a.n_kv_heads].n_blocks;
  const bool dense = a.rest.count != nullptr && a.rest.count[head] < 0;
  float mean = 0;
  if (a.mean_value != nullptr && tid < a.head_dim) {
    mean = a.mean_value[static_cast<std::int64_t>(head) * a.head_dim + tid];
  }

  parts.Join();
  float4 total[kPieces] = {};
#pragma unroll
  for (int u = 0; u < kHeldSplits; ++u) {
    const float share = __shfl_sync(kAll, parts.Share(parts.held[u]), warp);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) AddScaled(share, ahead[u][p], &total[p]);
  }
#pragma unroll 1
  for (int s = kHeldSplits * 32 + warp; s < a.n_splits; s += 32) {
    const float share = parts.Share(parts.part[s * a.group]);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) AddScaled(share, piece(s, p), &total[p]);
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) shared.total[warp][lane + p * 32] = total[p];
  if (n_rest != 0) {
    const double sum = WarpSum(rest.Sum(dense ? 0 : n_rest));
    if (lane == 0) shared.rest[warp] = sum;
  } else if (lane == 0) {
    shared.rest[warp] = 0;
  }
  __syncthreads();

  if (warp == kWarps - 1) {  // beyond those that have a channel
    const float lse = parts.sum == 0 ? kNothing : parts.shift + logf(parts.sum);
    if (lane == 0) a.lse[list] = lse;
    if (a.rest.rest != nullptr) StoreRest(a.rest, list, dense, shared.rest, lse);
  }
  if (tid >= a.head_dim) return;
  float value = 0;
#pragma unroll 8
  for (int w = 0; w < kWarps; ++w) {
    value += reinterpret_cast<const float*>(shared.total[w])[tid];
  }
  value = __fmaf_rn(parts.light, mean, value);
  a.out[static_cast<std::int64_t>(list) * a.head_dim + tid] =
      parts.sum == 0 ? 0 : value / parts.sum;
}

}  // namespace

void Merge(const MergeParts& a, cudaStream_t stream) {
  if (a.n_heads <= 0) return;
  const auto lists = static_cast<unsigned>(a.n_heads * a.group);
  LaunchFollower("MergeKernel", a.head_dim <= 128 ? MergeKernel<1> : MergeKernel<2>, lists,
                 kThreads, 0, stream, a);
}

}  // namespace fathom::cuda
