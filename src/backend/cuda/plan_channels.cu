// SPDX-License-Identifier: MIT
// The published plan and SparQ's choice of channels.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/plan.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr double kFloor = 1e-30;
constexpr double kThetaLimit = 60.0;
constexpr int kBisections = 30;

using Scan = cub::BlockScan<int, kThreads>;

// clip(round_half_even((log2_g - theta) / 2), 0, 4)
__device__ int Depth(double log2_g, double theta) {
  const double x = 0.5 * (log2_g - theta);
  return static_cast<int>(rint(fmin(fmax(x, 0.0), static_cast<double>(kPlanes))));
}

// Lists what is read, ascending; `read` rows of this thread's channel, from row `first` on.
__device__ void List(typename Scan::TempStorage& storage, int read, int first, std::int16_t* rows,
                     std::int32_t* n) {
  int at = 0, total = 0;
  Scan(storage).ExclusiveSum(read, at, total);
  for (int i = 0; i < read; ++i) rows[at + i] = static_cast<std::int16_t>(first + i);
  if (threadIdx.x == 0) *n = total;
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) PaperKernel(PaperPlanArgs p) {
  Follow();
  __shared__ typename Scan::TempStorage storage;
  const int head = static_cast<int>(blockIdx.x), j = static_cast<int>(threadIdx.x);
  if (p.lengths[head / p.n_kv_heads].keep == 0) return;
  const float* q = p.q + std::int64_t{head} * p.group * p.head_dim;
  double log2_g = -1e300;  // threads beyond D read nothing
  if (j < p.head_dim) {
    double g = 0;
    for (int h = 0; h < p.group; ++h) {
      const double x = q[h * p.head_dim + j];
      g += x * x;
    }
    g *= p.variance[std::int64_t{head} * p.head_dim + j];
    log2_g = log2(fmax(isfinite(g) ? g : 0.0, kFloor));
  }
  // Depths are small integers: any order of adding gives the same sum.
  const auto total = [&](double theta) {
    return __syncthreads_count(Depth(log2_g, theta) > 0) +
           __syncthreads_count(Depth(log2_g, theta) > 1) +
           __syncthreads_count(Depth(log2_g, theta) > 2) +
           __syncthreads_count(Depth(log2_g, theta) > 3);
  };
  double low = -kThetaLimit, high = kThetaLimit;
  if (total(high) > p.budget) {
    low = high;
    high = 1100;  // above the logarithm of every double
  }
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (total(middle) > p.budget ? low : high) = middle;
  }
  const int depth = j < p.head_dim ? Depth(log2_g, high) : 0;
  if (j < p.head_dim) {
    p.depth[std::int64_t{head} * p.head_dim + j] = static_cast<std::uint8_t>(depth);
  }
  const std::int64_t row = std::int64_t{head} * p.head_dim;
  List(storage, depth, j * kPlanes, p.planes + row * kPlanes, p.n_planes + head);
  List(storage, depth > 0 ? 1 : 0, j, p.channels + row, p.n_channels + head);
}

// Queries of a head in the basis of its table.
__device__ void MapQueries(const ChannelPlan& p, int head, const float* q) {
  const float* map = p.map + std::int64_t{head} * p.head_dim * p.r;
  for (int i = static_cast<int>(threadIdx.x); i < p.group * p.r; i += kThreads) {
    const int h = i / p.r, j = i % p.r;
    float sum = 0;
    for (int d = 0; d < p.head_dim; ++d) sum += q[h * p.head_dim + d] * map[d * p.r + j];
    p.chosen_q[std::int64_t{head} * p.group * p.r + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) ChannelKernel(ChannelPlan p, bool choose) {
  Follow();
  __shared__ typename Scan::TempStorage storage;
  __shared__ float size[kMaxHeadDim];
  const int head = static_cast<int>(blockIdx.x), j = static_cast<int>(threadIdx.x);
  // Heads of dense steps too: scans of labels do not leave them out.
  const float* q = p.q + std::int64_t{head} * p.group * p.head_dim;
  float mine = -1;
  if (j < p.head_dim) {
    mine = 0;
    for (int h = 0; h < p.group; ++h) mine += fabsf(q[h * p.head_dim + j]);
    if (!(mine >= 0)) mine = -0.5F;  // NaN: after all numbers
    size[j] = mine;
  }
  __syncthreads();
  int better = choose ? 0 : j;
  if (choose && j < p.head_dim) {
    for (int i = 0; i < p.head_dim; ++i) {
      better += size[i] > mine || (size[i] == mine && i < j) ? 1 : 0;
    }
  }
  const bool chosen = j < p.head_dim && better < p.r;
  int at = 0, total = 0;
  Scan(storage).ExclusiveSum(chosen ? 1 : 0, at, total);
  if (threadIdx.x == 0) p.n_channels[head] = p.r;
  if (p.map != nullptr) MapQueries(p, head, q);
  if (!chosen) return;
  p.channels[std::int64_t{head} * p.r + at] = static_cast<std::int16_t>(j);
  p.scan_channels[std::int64_t{head} * p.r + at] = j;
  if (p.map != nullptr) return;
  const int from = p.fixed != nullptr ? p.fixed[std::int64_t{head} * p.r + at] : j;
  for (int h = 0; h < p.group; ++h) {
    p.chosen_q[(std::int64_t{head} * p.group + h) * p.r + at] = q[h * p.head_dim + from];
  }
}

}  // namespace

void PlanPaper(const PaperPlanArgs& plan, cudaStream_t stream) {
  if (plan.n_heads == 0) return;
  LaunchFollower("PlanPaper", PaperKernel, static_cast<unsigned>(plan.n_heads), kThreads, 0, stream,
                 plan);
}

void PlanChannels(const ChannelPlan& plan, cudaStream_t stream) {
  if (plan.n_heads == 0) return;
  LaunchFollower("PlanChannels", ChannelKernel, static_cast<unsigned>(plan.n_heads), kThreads, 0,
                 stream, plan, true);
}

void TakeChannels(const ChannelPlan& plan, cudaStream_t stream) {
  if (plan.n_heads == 0) return;
  LaunchFollower("TakeChannels", ChannelKernel, static_cast<unsigned>(plan.n_heads), kThreads, 0,
                 stream, plan, false);
}

}  // namespace fathom::cuda
