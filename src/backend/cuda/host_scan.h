// SPDX-License-Identifier: MIT
// An index that lies in host memory, copied to the device for one call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/scan_mean.h"
#include "fathom/backend.h"

namespace fathom::cuda {

struct HeadIndexView {
  std::span<const SegmentView> segments;
  std::span<const ScanTable> tables;
};

// Planes, means and tables (mean codec) of the heads of one layer; whole segments are copied. All
// heads have the same blocks.
class UploadedIndex {
 public:
  UploadedIndex(std::span<const HeadIndexView> heads, std::int32_t head_dim, std::int32_t group,
                std::int32_t segment_blocks, std::int32_t mean_bits, cudaStream_t stream);

  // Tokens of every head's segments.
  std::int64_t n_tokens() const { return n_blocks_ * kBlockTokens; }
  // Scores of all tokens, scores: [n_heads * group][stride] on the device.
  void Scores(float* scores, std::int64_t stride, cudaStream_t stream) const;
  // The scan of all pieces, its sink still to be set.
  MeanScan scan() const;

 private:
  void AddSegment(const SegmentView& segment, std::int32_t head, std::int32_t first_block,
                  std::int32_t table, std::int32_t segment_blocks, cudaStream_t stream);

  std::int32_t head_dim_, mean_bits_, n_heads_;
  std::int64_t n_blocks_ = 0;
  MeanTableSet tables_;
  std::vector<DeviceBuffer<std::uint64_t>> planes_;
  std::vector<DeviceBuffer<std::uint8_t>> means_;
  std::vector<ScanPiece> host_pieces_;
  DeviceBuffer<ScanPiece> pieces_;
  DeviceBuffer<Lengths> lengths_;
  std::int32_t max_tiles_ = 0;
};

}  // namespace fathom::cuda
