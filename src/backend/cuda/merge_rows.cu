// SPDX-License-Identifier: MIT
// Joins what the splits of AttendKernel left, and measures the rest.
#include <cstdint>

#include "backend/cuda/attend.h"
#include "backend/cuda/check.h"
#include "backend/cuda/rows.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;

// The rest of a list, by all threads of the block.
__device__ inline void MeasureRest(const MergeParts& a, int list, float lse) {
  const RestMass& r = a.rest;
  __shared__ double sums[kThreads / 32];
  const int head = list / a.group;
  const bool dense = r.count != nullptr && r.count[head] < 0;
  const int n = dense ? 0 : r.lengths[head / a.n_kv_heads].n_blocks;
  const float* rest = r.rest + list * r.stride;
  double sum = 0;
#pragma unroll 8
  for (auto b = static_cast<int>(threadIdx.x); b < n; b += kThreads) {
    sum += static_cast<double>(__ldg(rest + b));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double all = 0;
  for (const double x : sums) all += x;
  const double s = r.scale;
  const double offset = r.offset != nullptr ? r.offset[list] : 0;
  const double noise = r.noise != nullptr ? r.noise[list] : 0;
  const double above = s * (r.cut[list] + offset) + s * s * noise / 2 - lse;
  const auto unit = dense ? 0.0F : static_cast<float>(exp(above > 88 ? 88.0 : above));
  const auto mass = dense ? 0.0F : static_cast<float>(unit * all);
  r.unit[list] = unit;
  r.mass[list] = mass;
  r.least[list] = unit == 0 ? -kNothing : r.least_share * (1 + mass) / unit;
}

// A block per list.
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ MergeParts a) {
  __shared__ float share[kMaxSplits];  // of each part; negative: it is empty
  __shared__ float of_list[3];         // sum, light, lse
  const auto list = static_cast<int>(blockIdx.x);
  const int head = list / a.group;
  const std::int64_t first =
      static_cast<std::int64_t>(head) * a.n_splits * a.group + list % a.group;
  if (threadIdx.x < 32) {
    float top = kNothing, sum = 0, light = 0;
    for (auto s = static_cast<int>(threadIdx.x); s < a.n_splits; s += 32) {
      top = fmaxf(top, a.part[first + s * a.group].top);
    }
    top = WarpMax(top);
    const float shift = top == kNothing ? 0 : top;
    for (auto s = static_cast<int>(threadIdx.x); s < a.n_splits; s += 32) {
      const PartState part = a.part[first + s * a.group];
      const float w = Exp(part.top - shift);
      sum = __fmaf_rn(part.sum, w, sum);
      light = __fmaf_rn(part.light, w, light);
      share[s] = part.sum == 0 ? -1 : w;
    }
    sum = WarpSum(sum);
    light = WarpSum(light);
    if (threadIdx.x == 0) {
      of_list[0] = sum;
      of_list[1] = light;
      of_list[2] = sum == 0 ? kNothing : shift + logf(sum);
      a.lse[list] = of_list[2];
    }
  }
  __syncthreads();
  const float sum = of_list[0];
  for (auto d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kThreads) {
    float total = 0;
#pragma unroll 8
    for (int s = 0; s < a.n_splits; ++s) {
      if (share[s] < 0) continue;
      total = __fmaf_rn(share[s], a.part_out[(first + s * a.group) * a.head_dim + d], total);
    }
    if (a.mean_value != nullptr) {
      total = __fmaf_rn(of_list[1], a.mean_value[static_cast<std::int64_t>(head) * a.head_dim + d],
                        total);
    }
    a.out[static_cast<std::int64_t>(list) * a.head_dim + d] = sum == 0 ? 0 : total / sum;
  }
  if (a.rest.rest != nullptr) MeasureRest(a, list, of_list[2]);
}

}  // namespace

void Merge(const MergeParts& a, cudaStream_t stream) {
  if (a.n_heads <= 0) return;
  MergeKernel<<<static_cast<unsigned>(a.n_heads * a.group), kThreads, 0, stream>>>(a);
  CheckLaunch("MergeKernel");
}

}  // namespace fathom::cuda
