// SPDX-License-Identifier: MIT
// Runs the scan kernels of the mean codec over ranges of blocks, for one thread.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "fathom/backend.h"

namespace fathom::cpu {

class MeanScanner {
 public:
  struct Shape {
    std::int32_t group;
    std::int32_t segment_blocks;
    std::int32_t mean_bits;
    std::int64_t side_bytes;  // means of a segment
  };
  // Where the results of block i and head h go: sums + h * stride + i * 64, base + h * base_stride
  // + i.
  struct Out {
    std::uint8_t* sums;
    std::int64_t stride;
    std::int32_t* base;
    std::int64_t base_stride;
  };

  // Bytes of `plan` that a scanner needs for any table.
  static std::size_t PlanBytes(const KernelTable& kernels, std::int32_t head_dim,
                               std::int32_t group) {
    const auto dim = static_cast<std::size_t>(head_dim);
    return SumPlanBytes(kernels, dim * kPlanes, group) + BasePlanBytes(kernels, dim, group);
  }

  MeanScanner(const KernelTable& kernels, Shape shape, std::byte* plan)
      : kernels_(kernels), shape_(shape), plan_(plan) {}

  // Blocks first .. first + count - 1 of a segment, count <= kScanChunkBlocks. `next` is what will
  // be scanned after it, or null.
  void Run(const ScanTable& table, const SegmentView& segment, const SegmentView* next,
           std::int32_t first, std::int32_t count, const Out& out) {
    assert(first % 2 == 0);
    Prepare(table, RowBlocks(segment, shape_.segment_blocks));
    const bool ends = first + count == segment.n_blocks;
    const std::uint8_t* ahead = next != nullptr && ends ? next->side : nullptr;
    // Means that the call before has not fetched are fetched while the planes are summed.
    const bool fetch_side = count == shape_.segment_blocks && segment.side != fetched_side_;
    const ScanSumsArgs sums = {plan_,
                               segment.planes,
                               next != nullptr && rows_ == RowBlocks(*next, shape_.segment_blocks)
                                   ? next->planes
                                   : nullptr,
                               fetch_side ? segment.side : nullptr,
                               shape_.side_bytes,
                               first,
                               count,
                               shape_.group,
                               out.sums,
                               out.stride};
    kernels_.scan_sums(&sums);
    const ScanBaseArgs base = {base_plan_,
                               segment.side,
                               shape_.segment_blocks,
                               shape_.mean_bits,
                               first,
                               count,
                               shape_.group,
                               static_cast<std::int32_t>(table.channel.size()),
                               table.channel.data(),
                               table.mean_weight.data(),
                               table.constant.data(),
                               out.base,
                               out.base_stride,
                               ahead,
                               shape_.side_bytes};
    kernels_.scan_base(&base);
    const bool fetches = kernels_.scan_base_plan != nullptr && !table.channel.empty();
    fetched_side_ = fetches ? ahead : nullptr;
  }

 private:
  static std::size_t SumPlanBytes(const KernelTable& kernels, std::size_t n_planes,
                                  std::int32_t group) {
    const std::int64_t bytes = kernels.scan_plan_bytes(static_cast<int>(n_planes), group);
    return LineBytes<std::byte>(static_cast<std::size_t>(bytes));
  }
  static std::size_t BasePlanBytes(const KernelTable& kernels, std::size_t n_active,
                                   std::int32_t group) {
    if (kernels.scan_base_plan == nullptr) return 0;
    return LineBytes<std::byte>(
        static_cast<std::size_t>(kernels.scan_base_plan_bytes(static_cast<int>(n_active), group)));
  }

  // Segments of a session share few tables, and most of them rows: the last plan is kept.
  void Prepare(const ScanTable& table, std::int32_t row_blocks) {
    if (planned_ == &table && rows_ == row_blocks) return;
    const ScanPlanArgs args = {
        row_blocks,          shape_.group,       static_cast<std::int32_t>(table.plane.size()),
        table.n_parts,       table.plane.data(), table.part_end.data(),
        table.weight.data(), table.low.data(),   plan_};
    kernels_.scan_plan(&args);
    if (kernels_.scan_base_plan != nullptr && planned_ != &table) PrepareBase(table);
    planned_ = &table;
    rows_ = row_blocks;
  }

  void PrepareBase(const ScanTable& table) {
    base_plan_ = plan_ + SumPlanBytes(kernels_, table.plane.size(), shape_.group);
    const ScanBasePlanArgs args = {
        shape_.segment_blocks, shape_.mean_bits,
        shape_.group,          static_cast<std::int32_t>(table.channel.size()),
        table.channel.data(),  table.mean_weight.data(),
        table.constant.data(), base_plan_};
    kernels_.scan_base_plan(&args);
  }

  const KernelTable& kernels_;
  const Shape shape_;
  std::byte* const plan_;
  std::byte* base_plan_ = nullptr;
  const ScanTable* planned_ = nullptr;
  std::int32_t rows_ = 0;  // row_blocks of the plan
  const std::uint8_t* fetched_side_ = nullptr;
};

}  // namespace fathom::cpu
