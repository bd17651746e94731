// SPDX-License-Identifier: MIT
// ScanTables on the device: copied from the host, and packed for the kernels.
#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <vector>

#include "backend/cuda/scan_mean.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostPlanes = kMaxHeadDim * kPlanes;
constexpr int kPlanesPerThread = kMostPlanes / kThreads;

// A weight has a magnitude up to 255, an operand of the MMA is a signed byte: digit d of the sum of
// up to three bytes that makes it up.
__device__ int WeightDigit(int weight, int d) {
  int digit = 0;
  for (; d >= 0; --d) {
    digit = min(max(weight, -128), 127);
    weight -= digit;
  }
  return digit;
}

__device__ int DigitsOf(const std::int16_t* weight, int group) {
  int n = 1;
  for (int h = 0; h < group; ++h) {
    const int w = weight[h];
    if (w > 254) n = 3;
    if (n < 2 && (w > 127 || w < -128)) n = 2;
  }
  return n;
}

// Digit d of a mean weight in base 256, digits signed.
__device__ int MeanDigit(int weight, int d) {
  int digit = 0;
  for (; d >= 0; --d) {
    digit = static_cast<std::int8_t>(weight & 255);
    weight = (weight - digit) >> 8;
  }
  return digit;
}

__device__ std::uint32_t PackFour(const int (&v)[4]) {
  return (v[0] & 255u) | (v[1] & 255u) << 8 | (v[2] & 255u) << 16 | (v[3] & 255u) << 24;
}

__device__ void PackWeights(const MeanTables& t, int table) {
  const int words = (t.group + 3) / 4;
  const std::int64_t row = static_cast<std::int64_t>(table) * t.head_dim * kPlanes;
  const int n = t.head[table].n_planes * words;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    std::uint32_t packed = 0;
    for (int h = i % words * 4; h < min(t.group, (i % words + 1) * 4); ++h) {
      const int weight = t.weight[(row + i / words) * t.group + h];
      packed += static_cast<std::uint32_t>(weight) << 8 * (h % 4);
    }
    t.packed[row * words + i] = packed;
  }
}

// Which plane and which digit of its weight every slot of the filter holds.
__device__ void DealSlots(const MeanTables& t, int table, std::int16_t* slot, std::uint8_t* digit) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const std::int64_t row = static_cast<std::int64_t>(table) * t.head_dim * kPlanes;
  const int n_planes = t.head[table].n_planes;
  int digits[kPlanesPerThread];
  int at[kPlanesPerThread];
  for (int i = 0; i < kPlanesPerThread; ++i) {
    const int p = threadIdx.x * kPlanesPerThread + i;
    digits[i] = p < n_planes ? DigitsOf(t.weight + (row + p) * t.group, t.group) : 0;
  }
  int total = 0;
  Scan(storage).ExclusiveSum(digits, at, total);
  for (int s = threadIdx.x; s < kFilterSlots; s += kThreads) slot[s] = -1;
  __syncthreads();
  for (int i = 0; i < kPlanesPerThread; ++i) {
    for (int d = 0; d < digits[i]; ++d) {
      if (at[i] + d >= kFilterSlots) break;
      slot[at[i] + d] = static_cast<std::int16_t>(threadIdx.x * kPlanesPerThread + i);
      digit[at[i] + d] = static_cast<std::uint8_t>(d);
    }
  }
  if (threadIdx.x == 0) t.head[table].n_slots = total;
  __syncthreads();
}

__device__ void FillFragments(const MeanTables& t, int table, const std::int16_t* slot,
                              const std::uint8_t* digit) {
  const std::int64_t row = static_cast<std::int64_t>(table) * t.head_dim * kPlanes;
  const int n = ColumnGroups(t.group) * 2 * 32;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int lane = i % 32, chunk = i / 32 % 2, head = i / 64 * 8 + lane / 4;
    std::uint32_t word[2];
    for (int r = 0; r < 2; ++r) {
      int v[4] = {};
      for (int k = 0; k < 4; ++k) {
        const int s = chunk * 32 + r * 16 + lane % 4 * 4 + k;
        if (slot[s] < 0 || head >= t.group) continue;
        v[k] = WeightDigit(t.weight[(row + slot[s]) * t.group + head], digit[s]);
      }
      word[r] = PackFour(v);
    }
    t.fragment[static_cast<std::int64_t>(table) * n + i] = {word[0], word[1]};
  }
  for (int s = threadIdx.x; s < kFilterSlots; s += kThreads) {
    t.slot[static_cast<std::int64_t>(table) * kFilterSlots + s] = slot[s];
  }
}

__device__ void FillMeanFragments(const MeanTables& t, int table) {
  const int chunks = MeanChunks(t.head_dim);
  const int n = ColumnGroups(t.group) * chunks * 3 * 32;
  const int n_channels = t.head[table].n_channels;
  const std::int32_t* weight =
      t.mean_weight + static_cast<std::int64_t>(table) * t.head_dim * t.group;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int lane = i % 32, d = i / 32 % 3, chunk = i / 96 % chunks;
    const int head = i / (96 * chunks) * 8 + lane / 4;
    std::uint32_t word[2];
    for (int r = 0; r < 2; ++r) {
      int v[4] = {};
      for (int k = 0; k < 4; ++k) {
        const int c = chunk * 32 + r * 16 + lane % 4 * 4 + k;
        if (c < n_channels && head < t.group) v[k] = MeanDigit(weight[c * t.group + head], d);
      }
      word[r] = PackFour(v);
    }
    t.mean_fragment[static_cast<std::int64_t>(table) * n + i] = {word[0], word[1]};
  }
  for (int h = threadIdx.x; h < t.group; h += kThreads) {
    int total = 0;
    for (int c = 0; c < n_channels; ++c) total += weight[c * t.group + h];
    t.head[table].mean_total[h] = total;
  }
}

__global__ void __launch_bounds__(kThreads) PrepareKernel(MeanTables t) {
  __shared__ std::int16_t slot[kFilterSlots];
  __shared__ std::uint8_t digit[kFilterSlots];
  const int table = static_cast<int>(blockIdx.x);
  PackWeights(t, table);
  DealSlots(t, table, slot, digit);
  FillFragments(t, table, slot, digit);
  FillMeanFragments(t, table);
}

template <typename T>
void CopyIn(T* device, const std::vector<T>& host, cudaStream_t stream) {
  if (host.empty()) return;
  Check(
      cudaMemcpyAsync(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync");
}

MeanTableHead HeadOf(const ScanTable& table, std::int32_t group) {
  MeanTableHead head{};
  head.n_planes = static_cast<std::int32_t>(table.plane.size());
  head.n_channels = static_cast<std::int32_t>(table.channel.size());
  head.n_parts = table.n_parts;
  std::copy(table.part_end.begin(), table.part_end.end(), head.part_end);
  for (std::int32_t r = 0; r < table.n_parts; ++r) {
    for (std::int32_t h = 0; h < group; ++h) {
      head.low[r * kMaxGroup + h] = table.low[static_cast<std::size_t>(r * group + h)];
    }
  }
  std::copy(table.constant.begin(), table.constant.end(), head.constant);
  std::copy(table.shift.begin(), table.shift.end(), head.shift);
  std::copy(table.scale.begin(), table.scale.end(), head.scale);
  return head;
}

}  // namespace

MeanTableSet::MeanTableSet(std::int32_t n_tables, std::int32_t head_dim, std::int32_t group)
    // Zeros: PlanMean leaves heads of dense sequences out, and all tables are prepared.
    : head_(std::span<const MeanTableHead>(
          std::vector<MeanTableHead>(static_cast<std::size_t>(n_tables)))) {
  const auto n = static_cast<std::size_t>(n_tables);
  const auto dim = static_cast<std::size_t>(head_dim);
  const auto g = static_cast<std::size_t>(group);
  const auto columns = static_cast<std::size_t>(ColumnGroups(group));
  plane_.Reserve(n * dim * kPlanes);
  weight_.Reserve(n * dim * kPlanes * g);
  channel_.Reserve(n * dim);
  slot_.Reserve(n * kFilterSlots);
  mean_weight_.Reserve(n * dim * g);
  packed_.Reserve(n * dim * kPlanes * ((g + 3) / 4));
  fragment_.Reserve(n * columns * 64);
  mean_fragment_.Reserve(n * columns * static_cast<std::size_t>(MeanChunks(head_dim)) * 96);
  view_ = {n_tables,
           head_dim,
           group,
           head_.data(),
           plane_.data(),
           weight_.data(),
           channel_.data(),
           mean_weight_.data(),
           packed_.data(),
           slot_.data(),
           fragment_.data(),
           mean_fragment_.data()};
}

void MeanTableSet::Upload(std::span<const ScanTable* const> tables, cudaStream_t stream) {
  const auto dim = static_cast<std::size_t>(view_.head_dim);
  const auto g = static_cast<std::size_t>(view_.group);
  std::vector<MeanTableHead> head;
  std::vector<std::int16_t> plane(tables.size() * dim * kPlanes);
  std::vector<std::int16_t> weight(plane.size() * g);
  std::vector<std::int16_t> channel(tables.size() * dim);
  std::vector<std::int32_t> mean_weight(channel.size() * g);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const ScanTable& t = *tables[i];
    head.push_back(HeadOf(t, view_.group));
    const auto narrow = [](std::int32_t x) { return static_cast<std::int16_t>(x); };
    std::ranges::transform(t.plane, plane.data() + i * dim * kPlanes, narrow);
    std::ranges::copy(t.weight, weight.data() + i * dim * kPlanes * g);
    std::ranges::transform(t.channel, channel.data() + i * dim, narrow);
    std::ranges::copy(t.mean_weight, mean_weight.data() + i * dim * g);
  }
  CopyIn(view_.head, head, stream);
  CopyIn(view_.plane, plane, stream);
  CopyIn(view_.weight, weight, stream);
  CopyIn(view_.channel, channel, stream);
  CopyIn(view_.mean_weight, mean_weight, stream);
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // the vectors go
  PrepareTables(view_, stream);
}

void PrepareTables(const MeanTables& tables, cudaStream_t stream) {
  if (tables.n_tables == 0) return;
  PrepareKernel<<<static_cast<unsigned>(tables.n_tables), kThreads, 0, stream>>>(tables);
  CheckLaunch("PrepareTables");
}

}  // namespace fathom::cuda
