// SPDX-License-Identifier: MIT
// A session's index on the device: a copy of the planes in page-locked host memory, from where
// every step fetches what it reads, and the block means and statistics in device memory. The copy
// takes as much host memory as the planes themselves, D / 2 bytes per token and KV head.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/cuda/buffer.h"
#include "device/attention_step.h"
#include "device/mean_stats.h"
#include "device/scans.h"
#include "method/step_source.h"
#include "model/cuda/pinned_buffer.h"

namespace fathom::cuda {

// Of one sequence and the mean codec. Nothing here may be called while the device works with it.
class PlaneMirror {
 public:
  // sizes: batch 1. shape: of every head of the index. lengths: in units of the index, on the
  // device. Throws Error(kNoMemory) where the device has too little.
  PlaneMirror(const StepSizes& sizes, std::int32_t dense_layers, const IndexShape& shape,
              const Lengths* lengths);

  // Becomes the first n_blocks blocks (> 0) of the source's index: adds what is new, or starts
  // again where the source is another or has lost blocks. Returns whether a recorded step has to be
  // recorded again. Throws Error(kUnsupported) for an index whose heads have different codecs.
  bool Sync(const StepSource& source, std::int64_t n_blocks, int n_threads, cudaStream_t stream);

  IndexScan* scan() { return &index_; }
  const MeanTableHead* heads() const { return index_.heads(); }
  std::int32_t n_codecs() const { return n_codecs_; }
  const IndexShape& shape() const { return shape_; }
  std::int64_t n_blocks() const { return n_blocks_; }

 private:
  // Head of a layer that scans, among all of them.
  std::int64_t Slot(std::int32_t layer, std::int32_t kv_head) const {
    return std::int64_t{layer - dense_layers_} * heads_.n_kv_heads + kv_head;
  }
  std::int64_t segments_per_head() const { return capacity_ / shape_.segment_blocks; }
  void CheckCodecs(const StepSource& source) const;
  void CopySegment(const StepSource& source, std::int64_t segment, std::int64_t first,
                   std::int64_t end, int n_threads, cudaStream_t stream);
  void AddSlabs(std::int64_t n_segments);
  void SetPieces(const StepSource& source);
  void SetStats(const StepSource& source);

  const HeadGeometry heads_;
  const std::int32_t dense_layers_, n_layers_;  // those that scan: dense_layers_ .. n_layers_ - 1
  const IndexShape shape_;
  const std::int64_t n_slots_;         // heads of all layers that scan
  const std::int64_t capacity_;        // blocks
  const std::int64_t plane_bytes_;     // of a segment
  const std::int64_t side_row_bytes_;  // of a channel's means

  std::uint64_t version_ = 0;
  std::int64_t n_blocks_ = 0;
  std::int32_t n_codecs_ = 1;
  std::vector<PinnedBuffer<std::byte>> slabs_;  // planes of segment i: [n_slots][plane_bytes]
  DeviceBuffer<const std::byte*> segments_;     // [n_slots][segments of capacity_]
  DeviceBuffer<std::uint8_t> sides_;            // [n_slots][D][side_row_bytes_]
  PinnedBuffer<std::uint8_t> packed_sides_;     // of one segment: [n_slots][D][its row]
  DeviceBuffer<ScanPiece> pieces_;              // [n_slots][n_codecs]
  DeviceBuffer<double> multiplier_;
  DeviceMeanStats stats_;
  MeanIndex index_;
};

}  // namespace fathom::cuda
