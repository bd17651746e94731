// SPDX-License-Identifier: MIT
// A capture as the source of a benchmark's data: its rows repeat along the tokens, its layers and
// heads along those of the shape.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/bench_keys.h"
#include "device/captured.h"
#include "fathom/step_bench.h"
#include "fathom/store.h"

namespace fathom::cuda {

// A capture in host memory, as fp16 rows. Layer l of the shape is layer l % n_layers() of it.
class CaptureData {
 public:
  // Layers read, of all.
  using ProgressFn = std::function<void(std::int64_t done, std::int64_t total)>;

  // As many layers as the shape has. Throws what CaptureFile and DescribeStepKeys throw, and
  // Error(kNoMemory) where the rows do not fit.
  CaptureData(const std::string& path, const StepShape& shape, const ProgressFn& progress = {});

  const std::string& path() const { return path_; }
  const StepKeys& keys() const { return keys_; }
  std::int32_t n_layers() const { return rows_->n_layers(); }
  std::int64_t n_blocks() const { return keys_.n_tokens / kBlockTokens; }
  const RowStore& rows() const { return *rows_; }  // whole blocks
  // Measured positions, [P][n_heads][D].
  const std::vector<float>& queries(std::int32_t layer) const {
    return queries_[static_cast<std::size_t>(layer)];
  }
  // Earlier positions, for statistics.
  const std::vector<LayerQueries>& samples() const { return samples_; }

 private:
  std::string path_;
  StepKeys keys_;
  std::unique_ptr<RowStore> rows_;
  std::vector<std::vector<float>> queries_;
  std::vector<LayerQueries> samples_;
};

// Blocks 0 .. n - 1 of tables that repeat as the keys do, one table for each of their samples: what
// is missing are rows, length and destination.
RepeatItems BlocksOf(const StepSizes& sizes, const BenchKeys& keys, const void* from,
                     std::int64_t block_bytes);

// Sequence s begins s / batch of the capture later than the first, in whole blocks. Statistics are
// those of the whole capture; FitQueries are the last of its samples, and the steps take its
// measured positions in turn.
std::unique_ptr<BenchKeys> MakeCapturedKeys(const StepSizes& sizes,
                                            std::shared_ptr<const CaptureData> data,
                                            cudaStream_t stream);

}  // namespace fathom::cuda
