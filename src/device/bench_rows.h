// SPDX-License-Identifier: MIT
// Rows of a benchmark's step: in host memory, folded where it does not hold all, with sinks and the
// last tokens in HBM, and what the residual knows of their values.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/host_arena.h"
#include "device/attention_step.h"
#include "device/bench_index.h"
#include "device/bench_keys.h"

namespace fathom::cuda {

inline constexpr std::int32_t kRing = 256;  // recent tokens in HBM: window, tail and some more

class BenchRows {
 public:
  // Token i's row is i % modulus. The sequences have n_tokens each, of which the last is the
  // current one; residual: make means of values. Waits for every layer.
  BenchRows(const StepSizes& sizes, std::int64_t n_tokens, std::int64_t modulus, bool residual,
            BenchKeys* keys, HostArena* arena, cudaStream_t stream, const BenchProgress& progress);

  // Host memory for the rows of so many tokens.
  static std::int64_t Bytes(const StepSizes& sizes, std::int64_t modulus);

  LayerRows Of(std::int32_t layer) const;
  const std::int32_t* positions() const { return positions_.data(); }  // [batch] of current tokens
  // Writes the current tokens' rows, after BenchKeys::TakeStep has had its say. Records work.
  void Append(std::int32_t layer, const StepVectors& vectors, cudaStream_t stream) const;
  // What TakeStep is given of a layer.
  StepVectors Vectors(std::int32_t layer, float* q, float* k, float* v) const;

 private:
  std::int64_t Row() const { return 2 * std::int64_t{sizes_.heads.head_dim}; }
  void FillResident(std::int32_t layer, BenchKeys* keys, cudaStream_t stream);

  const StepSizes sizes_;
  const std::int64_t n_tokens_, modulus_;
  DeviceBuffer<std::int32_t> modulus_device_, recent_first_, positions_;
  DeviceBuffer<Half> sinks_, ring_, means_;
  DeviceBuffer<float> mean_value_, factor_;
  std::vector<DeviceBuffer<Half*>> rows_;
  std::vector<DeviceBuffer<const Half*>> const_rows_, mean_lists_;
};

}  // namespace fathom::cuda
