// SPDX-License-Identifier: MIT
// Labels of one KV head: codes of chosen channels and their scales, laid out for
// Backend::ScanLabels (what a label is: fathom/backend.h; byte layouts: docs/format.md). The table
// owns its memory, which does not move while it grows; cutting it frees segments. Single-writer;
// concurrent readers are safe while nobody writes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fathom/backend.h"
#include "fathom/stats.h"

namespace fathom {

struct LabelShape {
  LabelLayout layout = LabelLayout::kTokens;
  std::int32_t planes = 4;  // bits of a code, 1 .. 4; kChannels: 3 or 4
  std::int32_t n_channels = 0;
};

class LabelTable {
 public:
  static constexpr std::int32_t kSegmentBlocks = 64;  // capacity of a segment

  explicit LabelTable(LabelShape shape = {});
  ~LabelTable();
  LabelTable(LabelTable&&) noexcept;
  LabelTable& operator=(LabelTable&&) noexcept;

  const LabelShape& shape() const { return shape_; }
  std::int64_t n_blocks() const { return n_blocks_; }
  std::span<const LabelView> segments() const { return views_; }

  // Appends a block. codes: [n_channels][64], below 2^planes; scales: [n_channels], see
  // LabelScanArgs. Throws Error(kNoMemory).
  void Append(const std::uint8_t* codes, const Half* scales);
  // Appends blocks up to n_blocks - 1 of the keys, in the basis, with the codes and scales of the
  // paper codec, of which codes keep the first `planes` planes. rows: [n_blocks * 64][2][D];
  // channels: [n_channels] of the basis.
  void AppendRows(const Half* rows, const Basis& basis, std::span<const std::int32_t> channels,
                  std::int64_t n_blocks, const Backend& backend);
  // Requires n_blocks <= n_blocks().
  void Truncate(std::int64_t n_blocks);

 private:
  struct Segment;
  void AddSegment();
  std::size_t ScaleBytes() const;  // of a segment, whole cache lines

  LabelShape shape_;
  std::int64_t n_blocks_ = 0;
  std::vector<Segment> segments_;
  std::vector<LabelView> views_;
};

}  // namespace fathom
