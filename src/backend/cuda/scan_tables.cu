// SPDX-License-Identifier: MIT
// ScanTables on the device: copied from the host, and packed for the kernels.
#include <algorithm>
#include <vector>

#include "backend/cuda/host_copy.h"
#include "backend/cuda/prepare_tables.cuh"
#include "backend/cuda/scan_mean.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) PrepareKernel(MeanTables t) {
  __shared__ PrepareScratch<kThreads> scratch;
  const int table = static_cast<int>(blockIdx.x);
  const std::int64_t row = static_cast<std::int64_t>(table) * t.head_dim * t.group;
  PrepareTable<kThreads>(t, table,
                         {t.head[table].n_planes, t.head[table].n_channels,
                          t.weight + row * kPlanes, t.mean_weight + row},
                         &scratch);
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
  CopyToDevice(view_.head, head.data(), head.size(), stream);
  CopyToDevice(view_.plane, plane.data(), plane.size(), stream);
  CopyToDevice(view_.weight, weight.data(), weight.size(), stream);
  CopyToDevice(view_.channel, channel.data(), channel.size(), stream);
  CopyToDevice(view_.mean_weight, mean_weight.data(), mean_weight.size(), stream);
  PrepareTables(view_, stream);
}

void PrepareTables(const MeanTables& tables, cudaStream_t stream) {
  if (tables.n_tables == 0) return;
  PrepareKernel<<<static_cast<unsigned>(tables.n_tables), kThreads, 0, stream>>>(tables);
  CheckLaunch("PrepareTables");
}

}  // namespace fathom::cuda
