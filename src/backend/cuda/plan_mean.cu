// SPDX-License-Identifier: MIT
// A block of threads plans one head. Sums of doubles keep the order of the host's loops; it is
// documented beside each of them.
#include <cub/block/block_scan.cuh>

#include "backend/cuda/plan.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSteps = kLevels - 1;
constexpr int kLanes = 8;  // of SumInLanes in plan/sums.h
constexpr int kByte = 255;
constexpr int kMostShift = 15;
constexpr double kHalfRange = 129;
constexpr double kNothing = 1e-290;
constexpr double kMostTotal = 0x1p24 - 0x1p15;

using Scan = cub::BlockScan<int, kThreads>;

struct Shared {
  typename Scan::TempStorage scan;
  double lane[kMaxGroup][kLanes];
  double scale[kMaxGroup];                 // of a head's squares in the weights
  double part_sum[kMaxGroup][kMostParts];  // of |q w|
  double most[kMaxGroup], means[kMaxGroup];
  bool finite[kMaxGroup];
  std::uint8_t level[kMaxHeadDim];
  std::int16_t channel[kMaxHeadDim];  // that are read, ascending
  std::int16_t plane[kMaxHeadDim * kPlanes];
  int part_end[kMostParts];
  int n_channels, n_planes, n_parts;
};

__device__ double FiniteOrZero(double x) { return isfinite(x) ? x : 0.0; }

// Half away from zero; |x| below 2^31.
__device__ std::int64_t Rounded(double x) {
  return static_cast<std::int64_t>(x + copysign(0.5, x));
}

__device__ int DepthOf(int level) { return level > 0 ? level - 1 : 0; }

// spread of each query head and what its squares are multiplied by: FillWeights, kSpread.
__device__ void HeadScales(const MeanPlan& p, int head, int dim, int group, const float* q,
                           Shared& s) {
  const int h = static_cast<int>(threadIdx.x) / kLanes, k = static_cast<int>(threadIdx.x) % kLanes;
  const double* variance = p.variance + std::int64_t{head} * dim;
  if (h < group) {
    double sum = 0;
    for (int j = k; j < dim; j += kLanes) {
      const double x = q[h * dim + j];
      sum += x * x * variance[j];
    }
    s.lane[h][k] = sum;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < group) {
    const double* l = s.lane[threadIdx.x];
    const double spread = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
    s.scale[threadIdx.x] = isfinite(spread) ? 1.0 / sqrt(fmax(spread, 1e-20)) : 0.0;
  }
  __syncthreads();
}

// Levels at the multiplier; a thread per channel.
__device__ void FillLevels(const MeanPlan& p, int head, int dim, int group, const float* q,
                           Shared& s) {
  const int j = static_cast<int>(threadIdx.x);
  if (j < dim) {
    double weight = 0;
    for (int h = 0; h < group; ++h) {
      const double x = q[h * dim + j];
      weight += FiniteOrZero(x * x * s.scale[h]);
    }
    int taken = 0;
    for (int step = 0; step < kSteps; ++step) {
      const double slope = p.slope[(std::int64_t{head} * kSteps + step) * dim + j];
      if (weight * slope > *p.multiplier) ++taken;
    }
    s.level[j] = taken == 0 ? 0 : p.level[(std::int64_t{head} * kSteps + taken - 1) * dim + j];
  }
  __syncthreads();
}

// Channels and planes that are read, dealt to parts as ListReads does.
__device__ void ListReads(int dim, Shared& s) {
  const int j = static_cast<int>(threadIdx.x);
  const int level = j < dim ? s.level[j] : 0;
  int at = 0, total = 0;
  Scan(s.scan).ExclusiveSum(level > 0 ? 1 : 0, at, total);
  __syncthreads();
  if (level > 0) s.channel[at] = static_cast<std::int16_t>(j);
  int planes = 0, unused = 0;
  Scan(s.scan).ExclusiveSum(DepthOf(level), unused, planes);
  __syncthreads();
  const int parts = planes <= 12 ? 1 : planes <= 48 ? 2 : planes <= 128 ? 4 : 8;
  int first = 0;
  for (int r = 0; r < parts; ++r) {
    int mine = 0;  // planes of this channel in the part
    for (int i = 0; i < DepthOf(level); ++i) mine += (at + i) % parts == r ? 1 : 0;
    int before = 0, in_part = 0;
    Scan(s.scan).ExclusiveSum(mine, before, in_part);
    __syncthreads();
    for (int i = 0; i < DepthOf(level); ++i) {
      if ((at + i) % parts != r) continue;
      s.plane[first + before++] = static_cast<std::int16_t>(j * kPlanes + i);
    }
    first += in_part;
    if (threadIdx.x == 0) s.part_end[r] = first;
  }
  if (threadIdx.x == 0) {
    s.n_channels = total;
    s.n_planes = planes;
    s.n_parts = parts;
  }
  __syncthreads();
}

struct Codec1 {  // of one head
  const float* mean_step;
  const float* weight;
};

__device__ double ExactWeight(const Codec1& c, const Shared& s, const float* q, int i) {
  const int channel = s.plane[i] / kPlanes, depth = DepthOf(s.level[channel]);
  return static_cast<double>(q[channel]) *
         c.weight[(channel * kPlanes + depth - 1) * kPlanes + s.plane[i] % kPlanes];
}

// The largest part's sum of magnitudes, and what the means can add: Measure. Each sum is a thread's
// own loop, in order.
__device__ void Measure(const Codec1& c, int dim, int group, int limit, const float* q, Shared& s) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < group * kMostParts) {
    const int h = t / kMostParts, r = t % kMostParts;
    double sum = 0;
    if (r < s.n_parts) {
      for (int i = r == 0 ? 0 : s.part_end[r - 1]; i < s.part_end[r]; ++i) {
        sum += fabs(ExactWeight(c, s, q + h * dim, i));
      }
    }
    s.part_sum[h][r] = sum;
  } else if (t >= kThreads - kMaxGroup && t - (kThreads - kMaxGroup) < group) {
    // The last threads: those before may be busy with parts of 16 heads.
    const int h = t - (kThreads - kMaxGroup);
    double means = 0;
    for (int i = 0; i < s.n_channels; ++i) {
      const int j = s.channel[i];
      means += fabs(static_cast<double>(q[h * dim + j]) * c.mean_step[j]);
    }
    s.means[h] = means * limit;
  }
  __syncthreads();
  if (t < group) {
    double most = 0;
    for (int r = 0; r < s.n_parts; ++r) {
      if (!(s.part_sum[t][r] <= most)) most = s.part_sum[t][r];
    }
    s.most[t] = most;
    bool finite = isfinite(most) && isfinite(s.means[t]);
    for (int j = 0; j < dim; ++j) finite = finite && isfinite(q[t * dim + j]);
    s.finite[t] = finite;
  }
  __syncthreads();
}

// Round of one head by a warp; false where a part exceeds a byte.
__device__ bool RoundWeights(const Codec1& c, const Shared& s, const float* q, double scale, int h,
                             int group, std::int16_t* weight, MeanTableHead* head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int i = lane;
  for (int r = 0; r < s.n_parts; ++r) {
    const int begin = r == 0 ? 0 : s.part_end[r - 1];
    int magnitude = 0, low = 0;
    for (i = begin + lane; i < s.part_end[r]; i += 32) {
      const auto rounded = static_cast<int>(Rounded(ExactWeight(c, s, q, i) * scale));
      weight[i * group + h] = static_cast<std::int16_t>(rounded);
      magnitude += abs(rounded);
      low -= min(rounded, 0);
    }
    magnitude = __reduce_add_sync(0xFFFFFFFFu, magnitude);
    low = __reduce_add_sync(0xFFFFFFFFu, low);
    if (lane == 0) head->low[r * kMaxGroup + h] = low;
    if (magnitude > kByte) return false;
  }
  return true;
}

// FillWeights of scan_table.cc: what one step of U is worth.
__device__ double FillHeadWeights(const Codec1& c, const Shared& s, const float* q, int h,
                                  int group, std::int16_t* weight, MeanTableHead* head) {
  const double floor = s.means[h] / (0x1p24 - 0x1p16);
  const double parts = s.n_parts;
  if (s.most[h] < kNothing) return s.means[h] > 0 ? fmax(s.means[h] / 128, floor) : 1;
  double scale = kByte / s.most[h];
  if (floor > 0) scale = fmin(scale, 2 * parts / floor);
  constexpr double kStep = 1 - 0x1p-9;
  while (!RoundWeights(c, s, q, scale, h, group, weight, head)) scale *= kStep;
  return 2 * parts / scale;
}

// The table of one query head; a warp.
__device__ void FillHead(const Codec1& c, const Shared& s, const float* q, int h, int group,
                         std::int16_t* weight, std::int32_t* mean_weight, MeanTableHead* head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = lane; i < s.n_planes; i += 32) weight[i * group + h] = 0;
  for (int i = lane; i < s.n_channels; i += 32) mean_weight[i * group + h] = 0;
  if (lane < kMostParts) head->low[lane * kMaxGroup + h] = 0;
  if (lane == 0) {
    head->constant[h] = head->shift[h] = 0;
    head->scale[h] = __int_as_float(0x7FC00000);
  }
  __syncwarp();
  if (!s.finite[h]) return;
  const double u = FillHeadWeights(c, s, q, h, group, weight, head);
  __syncwarp();
  int shift = kMostShift;
  while (shift > 0 && ldexp(kHalfRange + s.means[h] / u, shift) > kMostTotal) --shift;
  const double scale = ldexp(u, -shift);
  int magnitude = 0;
  for (int i = lane; i < s.n_planes; i += 32) magnitude += abs(weight[i * group + h]);
  magnitude = __reduce_add_sync(0xFFFFFFFFu, magnitude);
  for (int i = lane; i < s.n_channels; i += 32) {
    const int j = s.channel[i];
    mean_weight[i * group + h] =
        static_cast<std::int32_t>(Rounded(static_cast<double>(q[j]) * c.mean_step[j] / scale));
  }
  if (lane != 0) return;
  const int log2_parts = s.n_parts == 1 ? 0 : s.n_parts == 2 ? 1 : s.n_parts == 4 ? 2 : 3;
  const double middle = static_cast<double>(magnitude) / (2.0 * s.n_parts) + log2_parts / 4.0;
  head->constant[h] = static_cast<std::int32_t>(-Rounded(ldexp(middle, shift)));
  head->shift[h] = shift;
  head->scale[h] = static_cast<float>(scale);
}

// offset and noise of the group's scores; a warp per query head.
__device__ void FillNoise(const MeanPlan& p, int head, int dim, int group, const float* q,
                          const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int h = static_cast<int>(threadIdx.x) / 32; h < group; h += kWarps) {
    double noise = 0, offset = 0;
    for (int j = lane; j < dim; j += 32) {
      const double x = q[h * dim + j];
      noise += x * x * p.distortion[(std::int64_t{head} * kLevels + s.level[j]) * dim + j];
      offset += x * p.center[std::int64_t{head} * dim + j];
    }
    for (int i = 16; i > 0; i /= 2) {
      noise += __shfl_down_sync(0xFFFFFFFFu, noise, i);
      offset += __shfl_down_sync(0xFFFFFFFFu, offset, i);
    }
    if (lane == 0) {
      p.noise[head * group + h] = static_cast<float>(noise);
      p.offset[head * group + h] = static_cast<float>(offset);
    }
  }
}

__global__ void __launch_bounds__(kThreads) PlanKernel(MeanPlan p) {
  __shared__ Shared s;
  const int head = static_cast<int>(blockIdx.x);
  const int dim = p.tables.head_dim, group = p.tables.group;
  if (p.lengths[head / p.n_kv_heads].keep == 0) return;
  const float* q = p.q + std::int64_t{head} * group * dim;
  HeadScales(p, head, dim, group, q, s);
  FillLevels(p, head, dim, group, q, s);
  ListReads(dim, s);
  FillNoise(p, head, dim, group, q, s);
  const int limit = (1 << (p.mean_bits - 1)) - 1;
  for (int codec = 0; codec < p.n_codecs; ++codec) {
    const std::int64_t table = std::int64_t{head} * p.n_codecs + codec;
    const Codec1 c{p.mean_step + table * dim, p.weight + table * dim * kPlanes * kPlanes};
    MeanTableHead* out = p.tables.head + table;
    __syncthreads();  // the sums of the codec before are not needed any more
    Measure(c, dim, group, limit, q, s);
    for (int i = static_cast<int>(threadIdx.x); i < s.n_planes; i += kThreads) {
      p.tables.plane[table * dim * kPlanes + i] = s.plane[i];
    }
    for (int i = static_cast<int>(threadIdx.x); i < s.n_channels; i += kThreads) {
      p.tables.channel[table * dim + i] = s.channel[i];
    }
    if (threadIdx.x < kMostParts) {
      const int r = static_cast<int>(threadIdx.x);
      out->part_end[r] = r < s.n_parts ? s.part_end[r] : s.n_planes;
    }
    if (threadIdx.x == 0) {
      out->n_planes = s.n_planes;
      out->n_channels = s.n_channels;
      out->n_parts = s.n_parts;
    }
    for (int h = static_cast<int>(threadIdx.x) / 32; h < group; h += kWarps) {
      FillHead(c, s, q + h * dim, h, group, p.tables.weight + table * dim * kPlanes * group,
               p.tables.mean_weight + table * dim * group, out);
    }
  }
}

}  // namespace

void PlanMean(const MeanPlan& plan, cudaStream_t stream) {
  if (plan.n_heads == 0) return;
  PlanKernel<<<static_cast<unsigned>(plan.n_heads), kThreads, 0, stream>>>(plan);
  CheckLaunch("PlanMean");
  PrepareTables(plan.tables, stream);
}

}  // namespace fathom::cuda
