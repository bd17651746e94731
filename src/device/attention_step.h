// SPDX-License-Identifier: MIT
// Sparse attention of one decode step of a batch on the device: one layer per call, no host in
// between, so that all layers together can be captured into one graph.
//
//   plan -> fetch -> sample -> limit -> scan -> select -> union -> rows -> attend -> merge
//
// The scan keeps only candidates, tokens whose score reaches a limit that a sample of the same
// scores gives. Where there turn out to be fewer of them than winners are needed, or more than
// there is room for, the scores of that head are written in full and selected from: every step is
// exact.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "backend/cuda/attend.h"
#include "backend/cuda/buffer.h"
#include "backend/cuda/lists.h"
#include "device/index_scan.h"
#include "fathom/types.h"

namespace fathom::cuda {

struct StepSizes {
  HeadGeometry heads;
  std::int32_t n_layers = 0;
  std::int32_t batch = 1;       // sequences
  std::int64_t max_tokens = 0;  // of a sequence
  std::int64_t k = 512;         // attended per query head, sinks and window included
  bool residual = true;         // add the mass of what was not attended

  std::int32_t n_heads() const { return batch * heads.n_kv_heads; }
  std::int32_t n_lists() const { return batch * heads.n_heads; }
};

// Rows of one layer, and what the residual knows of its values. Arrays are per head.
struct LayerRows {
  RowSource source;
  const Half* const* value_means = nullptr;  // [n_heads], each [n_blocks][D]; null: no residual
  const float* mean_value = nullptr;         // [n_heads][D]
  const float* factor = nullptr;             // [n_lists]
};

// How long a sequence is, as the stages of a step read it.
struct StepLengths {
  Lengths tokens;
  Lengths units;  // of the index
  Lengths dense;  // in tokens, for layers without an index
};

class AttentionStep {
 public:
  // Stages of a layer, in the order in which they end.
  enum class Stage { kPlan, kFetch, kScan, kSelect, kRows, kAttend };
  using StageFn = std::function<void(std::int32_t layer, Stage stage)>;

  // unit_tokens: of the index that will be scanned. Throws Error(kUsage) for sizes that the kernels
  // do not take, kNoMemory where the device has too little.
  AttentionStep(const StepSizes& sizes, std::int32_t unit_tokens);

  // How long the sequences are; all their finished blocks are in the index. Not while a graph runs.
  // dense: all attend to everything, as sequences of no more than k tokens do anyway. Waits.
  void SetLengths(std::span<const std::int64_t> n_tokens, bool dense, cudaStream_t stream);
  // The same in two parts, for a step that is a graph by itself: the lengths of a sequence of
  // n_tokens of which n_blocks blocks are in the index ..
  StepLengths LengthsOf(std::int64_t n_tokens, std::int64_t n_blocks, bool dense) const;
  // .. and their copy, recorded, out of page-locked memory that must not change before it has run:
  // [3][batch], tokens, units and dense.
  void CopyLengths(const Lengths* lengths, cudaStream_t stream);
  const Lengths* lengths() const { return lengths_.data(); }  // in tokens
  const Lengths* scan_lengths() const {                       // in units of the index
    return lengths_.data() + sizes_.batch;
  }

  // q, out: [n_lists][D]. index null: the layer attends to everything. on_stage is called while the
  // work is recorded, where given.
  void Run(std::int32_t layer, IndexScan* index, const LayerRows& rows, const float* q, float* out,
           cudaStream_t stream, const StageFn& on_stage = {});

  // What the last layer attended, and which heads were selected from all scores.
  Attended attended() const { return attended_; }
  const std::int32_t* redo() const { return redo_; }
  // Of all layers: how many tokens each head attended, -1 all, and how many block means of values
  // it has read since ClearCounts; [n_layers][n_heads] and the same again. On the device.
  const std::int32_t* counts() const { return counts_.data(); }
  void ClearCounts(cudaStream_t stream);

 private:
  bool has_rest(const IndexScan* index) const {
    return sizes_.residual && index != nullptr && index->has_rest();
  }
  Candidates candidates() const;
  float exp_scale() const;
  void Choose(std::int32_t layer, IndexScan* index, const StageFn& on_stage, cudaStream_t stream);
  void FinishRest(cudaStream_t stream);
  void AttendRowsOf(std::int32_t layer, const IndexScan* index, const LayerRows& rows,
                    const float* q, float* out, cudaStream_t stream, const StageFn& on_stage);
  // In tokens, of a layer with or without an index.
  const Lengths* LengthsFor(const IndexScan* index) const {
    return lengths_.data() + (index == nullptr ? 2 * sizes_.batch : 0);
  }

  const StepSizes sizes_;
  const std::int32_t unit_;
  std::int32_t max_keep_ = 0;
  std::int64_t sample_stride_ = 0;
  std::int64_t score_stride_ = 0;  // units of the index
  std::int64_t rest_stride_ = 0;   // blocks
  std::int32_t n_splits_ = 1;      // of heads that attend to winners
  std::int32_t dense_splits_ = 1;  // of layers without an index
  std::int32_t weigh_splits_ = 1;

  DeviceBuffer<Lengths> lengths_;  // [3][batch]
  DeviceBuffer<float> least_, sample_, scores_, cut_, rest_;
  DeviceBuffer<std::int32_t> counters_;  // candidates of the lists, then heads to redo
  std::int32_t* count_ = nullptr;
  std::int32_t* redo_ = nullptr;
  DeviceBuffer<std::uint64_t> keys_, kth_key_;
  DeviceBuffer<std::int32_t> winners_;
  DeviceBuffer<std::uint32_t> bitmap_;
  DeviceBuffer<std::uint16_t> masks_;
  DeviceBuffer<std::int32_t> tokens_, counts_;
  DeviceBuffer<std::uint16_t> token_masks_;
  Attended attended_{};
  DeviceBuffer<Half> staged_;
  DeviceBuffer<float> part_out_, lse_, unit_mass_, mass_, least_mass_, weigh_out_, weigh_other_;
  DeviceBuffer<PartState> part_;
};

}  // namespace fathom::cuda
