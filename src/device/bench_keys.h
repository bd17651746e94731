// SPDX-License-Identifier: MIT
// Where the keys, values and queries of a benchmark's step come from. Methods take rows, statistics
// and tables from here and do not know of what data they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/cuda/buffer.h"
#include "device/attention_step.h"
#include "fathom/calibration.h"
#include "fathom/types.h"

namespace fathom::cuda {

// A batch's data that begins again after so many blocks; sequence s starts `shift` * s blocks
// later than the first one.
struct Tiling {
  std::int64_t period = 0;
  std::int64_t shift = 0;
};

// Rows on the host from which statistics and tables are made, whole blocks: [n_blocks * 64][2][D].
struct SampleRows {
  const Half* rows = nullptr;
  std::int64_t n_blocks = 0;
};

// What the dense layers computed of a layer, all fp32, and where the current tokens' rows are kept.
struct StepVectors {
  float* q;                       // [n_lists][D]
  float* k;                       // [n_heads][D]
  float* v;                       // [n_heads][D]
  const std::int32_t* positions;  // [batch] of the current tokens
  const Half* recent;             // [n_heads][ring][2][D], token i at slot i % ring
  std::int32_t ring;
};

// Not thread-safe.
class BenchKeys {
 public:
  virtual ~BenchKeys() = default;

  // Rows first .. first + n - 1 of every head of the batch, at rows[head] + (i - first) * 2D. rows:
  // [n_heads], a device array; memory of the device or mapped.
  virtual void Fill(std::int32_t layer, Half* const* rows, std::int64_t first, std::int64_t n,
                    cudaStream_t stream) = 0;
  // Mean values of the blocks, [n_heads][n_blocks][D], and of all tokens, [n_heads][D], both on the
  // device. May wait.
  virtual void FillValueMeans(std::int32_t layer, Half* means, std::int64_t n_blocks,
                              float* mean_value, cudaStream_t stream) = 0;

  // Layer l has the statistics of set l % n_sets(), head h of the batch those of sample SampleOf(h)
  // of n_samples().
  virtual std::int32_t n_sets() const = 0;
  virtual std::int32_t n_samples() const = 0;
  virtual std::int32_t SampleOf(std::int32_t head) const = 0;
  virtual SampleRows Sample(std::int32_t set, std::int32_t sample) = 0;
  // abs: the means of absolute values too. Safe to call for several samples at once.
  virtual HeadStats Stats(std::int32_t set, std::int32_t sample, BasisRule rule, bool abs) = 0;

  // How the rows of Sample repeat to become those of the batch; null where they are only like them,
  // so that no table can be made of them.
  virtual const Tiling* tiling() const { return nullptr; }

  // Queries [n_kv_heads][group][D] of layers 0 .. n_layers - 1, of several steps one after the
  // other, for what is fitted before steps are timed; empty: those of the dense layers.
  virtual std::vector<std::vector<float>> FitQueries() const { return {}; }
  // Puts the step's own queries into place of those of the dense layers, and the rows' key and
  // value. Records work, as the next does, which goes on to the queries of the next step.
  virtual void TakeStep(std::int32_t /*layer*/, const StepVectors& /*vectors*/,
                        cudaStream_t /*stream*/) {}
  virtual void NextStep(cudaStream_t /*stream*/) {}
};

// Synthetic keys (synthetic.h): every token has its own.
std::unique_ptr<BenchKeys> MakeSyntheticKeys(const StepSizes& sizes, std::uint64_t seed,
                                             cudaStream_t stream);

// base + i * stride, i < n, as a device array.
template <typename T>
DeviceBuffer<T*> Pointers(T* base, std::int64_t n, std::int64_t stride) {
  std::vector<T*> host;
  for (std::int64_t i = 0; i < n; ++i) host.push_back(base + i * stride);
  return DeviceBuffer<T*>(std::span<T* const>(host));
}

}  // namespace fathom::cuda
