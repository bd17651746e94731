// SPDX-License-Identifier: MIT
// A block of threads plans one head, and makes and prepares its tables. What it reads is asked for
// at the start and kept in shared memory. Sums of doubles keep the order of the host's loops; it is
// documented beside each of them. Most loops stay loops: the kernel runs through them once, and its
// code has to be fetched.
#include "backend/cuda/follow.cuh"
#include "backend/cuda/plan.h"
#include "backend/cuda/prepare_tables.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kSteps = kLevels - 1;
constexpr int kLanes = 8;  // of SumInLanes in plan/sums.h
constexpr int kByte = 255;
constexpr int kMostShift = 15;
constexpr double kHalfRange = 129;
constexpr double kNothing = 1e-290;
constexpr double kMostTotal = 0x1p24 - 0x1p15;
constexpr int kProducts = 1024;  // of a query and a decoder that are kept
static_assert(kThreads >= kMaxHeadDim && kThreads >= kMaxGroup * kLanes, "a thread each");
static_assert(kThreads >= kMaxGroup * kMostParts + kMaxGroup && kMostParts == 8);

struct Shared {
  double variance[kMaxHeadDim];
  double distortion[kMaxHeadDim];          // at the channel's level
  double product[kProducts];               // [plane][group] of queries and decoders, where they fit
  double mean_product[kProducts];          // [channel][group] of queries and steps of the means
  double scale[kMaxGroup];                 // of a head's squares in the weights
  double part_sum[kMaxGroup][kMostParts];  // of |q w|
  double means[kMaxGroup];
  unsigned long long warp_parts[kWarps][2];
  float q[kMaxGroup * kMaxHeadDim];  // [group][D]
  float decoder[kMaxHeadDim][kPlanes];
  float mean_step[kMaxHeadDim];
  float center[kMaxHeadDim];
  std::int32_t mean_weight[kMaxHeadDim * kMaxGroup];
  std::int16_t weight[kMaxHeadDim * kPlanes * kMaxGroup];
  std::int16_t plane[kMaxHeadDim * kPlanes];
  std::int16_t channel[kMaxHeadDim];  // that are read, ascending
  int warp_reads[kWarps];
  int part_end[kMostParts];
  int n_channels, n_planes, n_parts;
  bool finite[kMaxGroup];  // the query is
  PrepareScratch<kThreads> prepare;
};

// What is read for one channel, by its own thread.
struct Channel {
  double slope[kSteps];
  double distortion[kLevels];
  std::uint8_t level[kSteps];
};

__device__ double FiniteOrZero(double x) { return isfinite(x) ? x : 0.0; }

// Half away from zero; |x| below 2^31.
__device__ std::int64_t Rounded(double x) {
  return static_cast<std::int64_t>(x + copysign(0.5, x));
}

__device__ int DepthOf(int level) { return level > 0 ? level - 1 : 0; }

__device__ void LoadHead(const MeanPlan& p, int head, int dim, int group, Channel* c, Shared& s) {
  const int j = static_cast<int>(threadIdx.x);
  const std::int64_t row = std::int64_t{head} * dim;
  const float* q = p.q + row * group;
  if (j < dim) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      c->slope[i] = p.slope[row * kSteps + i * dim + j];
      c->level[i] = p.level[row * kSteps + i * dim + j];
    }
#pragma unroll
    for (int i = 0; i < kLevels; ++i) c->distortion[i] = p.distortion[row * kLevels + i * dim + j];
    s.variance[j] = p.variance[row + j];
    s.center[j] = p.center[row + j];
  }
#pragma unroll 4
  for (int i = j; i < group * dim; i += kThreads) s.q[i] = q[i];
}

// spread of each query head and what its squares are multiplied by: FillWeights, kSpread. A sum of
// every 8th channel in a lane, joined as SumInLanes does.
__device__ void HeadScales(int dim, int group, Shared& s) {
  const int h = static_cast<int>(threadIdx.x) / kLanes, k = static_cast<int>(threadIdx.x) % kLanes;
  if (static_cast<int>(threadIdx.x) / 32 * 32 >= group * kLanes) return;  // the whole warp
  double sum = 0;
  bool finite = true;
  if (h < group) {
#pragma unroll 4
    for (int j = k; j < dim; j += kLanes) {
      const double x = s.q[h * dim + j];
      sum += x * x * s.variance[j];
      finite = finite && isfinite(x);
    }
  }
  const unsigned all = __ballot_sync(kAll, finite) >> (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
  if (h >= group || k != 0) return;
  s.scale[h] = isfinite(sum) ? 1.0 / sqrt(fmax(sum, 1e-20)) : 0.0;
  s.finite[h] = (all & 0xFFu) == 0xFFu;
}

// The level of the thread's channel at the multiplier.
__device__ int LevelOf(const Channel& c, double multiplier, int dim, int group, const Shared& s) {
  const int j = static_cast<int>(threadIdx.x);
  double weight = 0;
#pragma unroll 2
  for (int h = 0; h < group; ++h) {
    const double x = s.q[h * dim + j];
    weight += FiniteOrZero(x * x * s.scale[h]);
  }
  int taken = 0, level = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) taken += weight * c.slope[step] > multiplier ? 1 : 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) level = taken == step + 1 ? c.level[step] : level;
  return level;
}

// Fields of 16 bits, the first four parts in one word, the others in the next.
struct PartCounts {
  unsigned long long word[2];

  __device__ int Of(int part) const {
    return static_cast<int>((part < 4 ? word[0] : word[1]) >> 16 * (part % 4) & 0xFFFF);
  }
  __device__ void AddOne(int part) {
    const unsigned long long one = 1ULL << 16 * (part % 4);
    word[0] += part < 4 ? one : 0;
    word[1] += part < 4 ? 0 : one;
  }
};

// Counts of the threads before; total: of all. Sums stay below 2^16. Contains a barrier.
__device__ PartCounts SumParts(const PartCounts& own, PartCounts* total, Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  PartCounts sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned long long first = __shfl_up_sync(kAll, sum.word[0], static_cast<unsigned>(d));
    const unsigned long long second = __shfl_up_sync(kAll, sum.word[1], static_cast<unsigned>(d));
    if (lane >= d) sum.word[0] += first, sum.word[1] += second;
  }
  if (lane == 31) s.warp_parts[warp][0] = sum.word[0], s.warp_parts[warp][1] = sum.word[1];
  __syncthreads();
  *total = {{0, 0}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum.word[i] -= own.word[i];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) sum.word[i] += s.warp_parts[w][i];
      total->word[i] += s.warp_parts[w][i];
    }
  }
  return sum;
}

// Channels and planes that are read, dealt to parts as ListReads does; level: of the thread's
// channel, 0 beyond the last.
__device__ void ListReads(int level, Shared& s) {
  const int j = static_cast<int>(threadIdx.x), depth = DepthOf(level);
  int reads = 0;  // planes << 16 | channels
  const int before =
      ExclusiveSum<kThreads>(depth << 16 | (level > 0 ? 1 : 0), s.warp_reads, &reads);
  const int at = before & 0xFFFF, planes = reads >> 16;
  const int parts = planes <= 12 ? 1 : planes <= 48 ? 2 : planes <= 128 ? 4 : 8;
  PartCounts own = {{0, 0}}, total;
#pragma unroll 1
  for (int i = 0; i < depth; ++i) own.AddOne((at + i) % parts);
  PartCounts place = SumParts(own, &total, s);
  PartCounts end;  // of the parts: sums of their totals up to each
#pragma unroll
  for (int i = 0; i < 2; ++i) end.word[i] = total.word[i] * 0x0001000100010001ULL;
  end.word[1] += (end.word[0] >> 48) * 0x0001000100010001ULL;
#pragma unroll
  for (int i = 0; i < 2; ++i) place.word[i] += end.word[i] - total.word[i];
  if (level > 0) s.channel[at] = static_cast<std::int16_t>(j);
#pragma unroll 1
  for (int i = 0; i < depth; ++i) {
    const int part = (at + i) % parts;
    s.plane[place.Of(part)] = static_cast<std::int16_t>(j * kPlanes + i);
    place.AddOne(part);
  }
  if (j < kMostParts) s.part_end[j] = j < parts ? end.Of(j) : planes;
  if (j == 0) {
    s.n_channels = reads & 0xFFFF;
    s.n_planes = planes;
    s.n_parts = parts;
  }
}

// The step of the mean and the decoder of the thread's channel at its depth.
struct ChannelCodec {
  float mean_step;
  float decoder[kPlanes];

  __device__ ChannelCodec(const MeanPlan& p, std::int64_t table, int dim, int level) {
    const int j = static_cast<int>(threadIdx.x), depth = DepthOf(level);
    mean_step = j < dim ? p.mean_step[table * dim + j] : 0;
    const float* row = p.weight + ((table * dim + j) * kPlanes + depth - 1) * kPlanes;
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) decoder[i] = depth > 0 ? row[i] : 0;
  }
  __device__ void Store(int dim, Shared& s) const {
    const int j = static_cast<int>(threadIdx.x);
    if (j >= dim) return;
    s.mean_step[j] = mean_step;
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) s.decoder[j][i] = decoder[i];
  }
};

// Of one query head: what the sums and the integers are made of.
struct Products {
  const Shared& s;
  int dim, group, h;

  __device__ bool kept() const { return s.n_planes * group <= kProducts; }
  __device__ bool means_kept() const { return s.n_channels * group <= kProducts; }
  __device__ double Weight(int i) const {
    const int plane = s.plane[i], channel = plane / kPlanes;
    return static_cast<double>(s.q[h * dim + channel]) * s.decoder[channel][plane % kPlanes];
  }
  __device__ double Mean(int i) const {
    const int j = s.channel[i];
    return static_cast<double>(s.q[h * dim + j]) * s.mean_step[j];
  }
  __device__ double KeptWeight(int i) const { return s.product[i * group + h]; }
  __device__ double KeptMean(int i) const { return s.mean_product[i * group + h]; }
};

__device__ void KeepProducts(int dim, int group, Shared& s) {
  const Products all{s, dim, group, 0};
  if (all.kept()) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < s.n_planes * group; i += kThreads) {
      s.product[i] = Products{s, dim, group, i % group}.Weight(i / group);
    }
  }
  if (all.means_kept()) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < s.n_channels * group; i += kThreads) {
      s.mean_product[i] = Products{s, dim, group, i % group}.Mean(i / group);
    }
  }
}

// Sums of magnitudes of every part, and of the means: Measure. Each is a thread's own, in order.
__device__ void Measure(int dim, int group, int limit, Shared& s) {
  const int t = static_cast<int>(threadIdx.x);
  double sum = 0;
  if (t < group * kMostParts) {
    const Products p{s, dim, group, t / kMostParts};
    const int r = t % kMostParts, end = s.part_end[r];
    const int begin = r == 0 ? 0 : s.part_end[r - 1];  // parts that are not used are empty
    if (p.kept()) {
#pragma unroll 8
      for (int i = begin; i < end; ++i) sum += fabs(p.KeptWeight(i));
    } else {
#pragma unroll 1
      for (int i = begin; i < end; ++i) sum += fabs(p.Weight(i));
    }
    s.part_sum[p.h][r] = sum;
  } else if (t >= kThreads - kMaxGroup && t - (kThreads - kMaxGroup) < group) {
    // The last threads: those before may be busy with parts of 16 heads.
    const Products p{s, dim, group, t - (kThreads - kMaxGroup)};
    if (p.means_kept()) {
#pragma unroll 8
      for (int i = 0; i < s.n_channels; ++i) sum += fabs(p.KeptMean(i));
    } else {
#pragma unroll 1
      for (int i = 0; i < s.n_channels; ++i) sum += fabs(p.Mean(i));
    }
    s.means[p.h] = sum * limit;
  }
}

// Round of one head by a warp; false where a part exceeds a byte. magnitude: of all weights.
__device__ bool RoundWeights(const Products& p, double scale, Shared& s, MeanTableHead* head,
                             int* magnitude) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool kept = p.kept();
  *magnitude = 0;
#pragma unroll 1
  for (int r = 0; r < s.n_parts; ++r) {
    const int begin = r == 0 ? 0 : s.part_end[r - 1];
    int of_part = 0, low = 0;
#pragma unroll 1
    for (int i = begin + lane; i < s.part_end[r]; i += 32) {
      const double exact = kept ? p.KeptWeight(i) : p.Weight(i);
      const auto rounded = static_cast<int>(Rounded(exact * scale));
      s.weight[i * p.group + p.h] = static_cast<std::int16_t>(rounded);
      of_part += abs(rounded);
      low -= min(rounded, 0);
    }
    of_part = __reduce_add_sync(kAll, of_part);
    low = __reduce_add_sync(kAll, low);
    if (lane == 0) head->low[r * kMaxGroup + p.h] = low;
    if (of_part > kByte) return false;
    *magnitude += of_part;
  }
  return true;
}

// FillWeights of scan_table.cc: what one step of U is worth.
__device__ double FillHeadWeights(const Products& p, double most, Shared& s, MeanTableHead* head,
                                  int* magnitude) {
  const double means = s.means[p.h], floor = means / (0x1p24 - 0x1p16);
  const double parts = s.n_parts;
  *magnitude = 0;
  if (most < kNothing) return means > 0 ? fmax(means / 128, floor) : 1;
  double scale = kByte / most;
  if (floor > 0) scale = fmin(scale, 2 * parts / floor);
  constexpr double kStep = 1 - 0x1p-9;
  while (!RoundWeights(p, scale, s, head, magnitude)) scale *= kStep;
  return 2 * parts / scale;
}

// The largest sum of a part, in the order of the host's comparisons.
__device__ double MostOf(const double* part_sum, int n_parts) {
  double most = 0;
#pragma unroll
  for (int r = 0; r < kMostParts; ++r) {
    if (r < n_parts && !(part_sum[r] <= most)) most = part_sum[r];
  }
  return most;
}

// The integers of one query head; a warp.
__device__ void FillHead(const Products& p, Shared& s, MeanTableHead* head) {
  const int lane = static_cast<int>(threadIdx.x) % 32, h = p.h;
#pragma unroll 1
  for (int i = lane; i < s.n_planes; i += 32) s.weight[i * p.group + h] = 0;
  if (lane < kMostParts) head->low[lane * kMaxGroup + h] = 0;
  const double most = MostOf(s.part_sum[h], s.n_parts);
  if (!(s.finite[h] && isfinite(most) && isfinite(s.means[h]))) {
#pragma unroll 1
    for (int i = lane; i < s.n_channels; i += 32) s.mean_weight[i * p.group + h] = 0;
    if (lane != 0) return;
    head->constant[h] = head->shift[h] = 0;
    head->scale[h] = __int_as_float(0x7FC00000);
    return;
  }
  __syncwarp();
  int magnitude = 0;
  const double u = FillHeadWeights(p, most, s, head, &magnitude);
  // The largest shift with which totals stay in range, or 0: a lane tries each.
  const bool fits = lane <= kMostShift && !(ldexp(kHalfRange + s.means[h] / u, lane) > kMostTotal);
  const int shift = max(31 - __clz(static_cast<int>(__ballot_sync(kAll, fits))), 0);
  const double scale = ldexp(u, -shift);
  const bool kept = p.means_kept();
#pragma unroll 1
  for (int i = lane; i < s.n_channels; i += 32) {
    s.mean_weight[i * p.group + h] =
        static_cast<std::int32_t>(Rounded((kept ? p.KeptMean(i) : p.Mean(i)) / scale));
  }
  if (lane != 0) return;
  const int log2_parts = s.n_parts == 1 ? 0 : s.n_parts == 2 ? 1 : s.n_parts == 4 ? 2 : 3;
  const double middle = static_cast<double>(magnitude) / (2.0 * s.n_parts) + log2_parts / 4.0;
  head->constant[h] = static_cast<std::int32_t>(-Rounded(ldexp(middle, shift)));
  head->shift[h] = shift;
  head->scale[h] = static_cast<float>(scale);
}

// offset and noise of the group's scores; a warp per query head, the last ones first.
__device__ void FillNoise(const MeanPlan& p, int head, int dim, int group, const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int h = kWarps - 1 - static_cast<int>(threadIdx.x) / 32; h < group; h += kWarps) {
    double noise = 0, offset = 0;
#pragma unroll 1
    for (int j = lane; j < dim; j += 32) {
      const double x = s.q[h * dim + j];
      noise += x * x * s.distortion[j];
      offset += x * s.center[j];
    }
#pragma unroll 1
    for (int i = 16; i > 0; i /= 2) {
      noise += __shfl_down_sync(kAll, noise, static_cast<unsigned>(i));
      offset += __shfl_down_sync(kAll, offset, static_cast<unsigned>(i));
    }
    if (lane == 0) {
      p.noise[head * group + h] = static_cast<float>(noise);
      p.offset[head * group + h] = static_cast<float>(offset);
    }
  }
}

// Copies a table out of shared memory and prepares it.
__device__ void StoreTable(const MeanTables& t, std::int64_t table, Shared& s) {
  const int tid = static_cast<int>(threadIdx.x), dim = t.head_dim, group = t.group;
  MeanTableHead* out = t.head + table;
#pragma unroll 1
  for (int i = tid; i < s.n_planes * group; i += kThreads) {
    t.weight[table * dim * kPlanes * group + i] = s.weight[i];
  }
#pragma unroll 1
  for (int i = tid; i < s.n_channels * group; i += kThreads) {
    t.mean_weight[table * dim * group + i] = s.mean_weight[i];
  }
#pragma unroll 1
  for (int i = tid; i < s.n_planes; i += kThreads) {
    t.plane[table * dim * kPlanes + i] = s.plane[i];
  }
#pragma unroll 1
  for (int i = tid; i < s.n_channels; i += kThreads) t.channel[table * dim + i] = s.channel[i];
  if (tid < kMostParts) out->part_end[tid] = s.part_end[tid];
  if (tid == 0) {
    out->n_planes = s.n_planes;
    out->n_channels = s.n_channels;
    out->n_parts = s.n_parts;
  }
  PrepareTable<kThreads>(t, static_cast<int>(table),
                         {s.n_planes, s.n_channels, s.weight, s.mean_weight}, &s.prepare);
}

__global__ void __launch_bounds__(kThreads, 1) PlanKernel(MeanPlan p) {
  Follow();
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int head = static_cast<int>(blockIdx.x), j = static_cast<int>(threadIdx.x);
  const int dim = p.tables.head_dim, group = p.tables.group;
  const int keep = p.lengths[head / p.n_kv_heads].keep;
  const double multiplier = *p.multiplier;
  Channel channel;
  LoadHead(p, head, dim, group, &channel, s);
  if (keep == 0) return;
  __syncthreads();
  HeadScales(dim, group, s);
  __syncthreads();
  const int level = j < dim ? LevelOf(channel, multiplier, dim, group, s) : 0;
  std::int64_t table = std::int64_t{head} * p.n_codecs;
  ChannelCodec codec(p, table, dim, level);
  if (j < dim) {
    double distortion = channel.distortion[0];
#pragma unroll
    for (int i = 1; i < kLevels; ++i) distortion = level == i ? channel.distortion[i] : distortion;
    s.distortion[j] = distortion;
  }
  ListReads(level, s);
  const int limit = (1 << (p.mean_bits - 1)) - 1;
#pragma unroll 1
  for (int i = 0; i < p.n_codecs; ++i, ++table) {
    if (i > 0) codec = ChannelCodec(p, table, dim, level);
    codec.Store(dim, s);
    __syncthreads();
    KeepProducts(dim, group, s);
    __syncthreads();
    Measure(dim, group, limit, s);
    __syncthreads();
#pragma unroll 1
    for (int h = j / 32; h < group; h += kWarps) {
      FillHead({s, dim, group, h}, s, p.tables.head + table);
    }
    if (i == 0) FillNoise(p, head, dim, group, s);
    __syncthreads();
    StoreTable(p.tables, table, s);
  }
}

}  // namespace

void PlanMean(const MeanPlan& plan, cudaStream_t stream) {
  if (plan.n_heads == 0) return;
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  Check(cudaFuncSetAttribute(PlanKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of PlanKernel");
  LaunchFollower("PlanMean", PlanKernel, static_cast<unsigned>(plan.n_heads), kThreads, kBytes,
                 stream, plan);
}

}  // namespace fathom::cuda
