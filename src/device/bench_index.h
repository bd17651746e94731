// SPDX-License-Identifier: MIT
// Indexes of synthetic keys, to time steps with: every method in one of the two places.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/host_arena.h"
#include "device/attention_step.h"
#include "device/scans.h"
#include "fathom/method.h"
#include "fathom/plan.h"

namespace fathom::cuda {

// What the bench knows of a method spec.
struct BenchMethod {
  enum class Kind { kDense, kMean, kPaper, kLabels, kKeys };
  Kind kind = Kind::kDense;
  std::string spec;    // canonical
  double bits = 28;    // kMean
  double budget = 48;  // kPaper
  LabelIndex::Shape labels;
  std::int32_t chunk = 1;  // kKeys: tokens per key
  bool residual = false;
};
// Throws Error(kUsage) for a spec that no method takes, kUnsupported for one that the device does
// not do.
BenchMethod ParseBenchMethod(const std::string& text, std::int32_t head_dim);

// Sizes of a run, and where things are.
struct BenchPlace {
  StepSizes sizes;
  std::int64_t n_tokens = 0;
  bool on_host = true;
  std::uint64_t seed = 1;
  std::int64_t cap_blocks() const {
    return std::int64_t{kTileBlocks} * TilesOf(static_cast<std::int32_t>(n_tokens / kBlockTokens));
  }
};

// Bytes that the index takes where it is put.
std::int64_t BenchIndexBytes(const BenchMethod& method, const BenchPlace& place);

using BenchProgress = std::function<void(std::int64_t done, std::int64_t total)>;

// An index with its memory.
class BenchIndex {
 public:
  virtual ~BenchIndex() = default;
  virtual IndexScan* scan() = 0;
  // Of our own read: the multiplier at which these queries, [n_layers][n_lists][D] of several
  // steps, read the bits that were asked for.
  virtual void FitMultiplier(std::span<const std::vector<float>> /*queries*/) {}
};

// sigma: [n_kv_heads][D] deviations of the keys' channels, on the host. lengths: in units of the
// index, on the device. Throws Error.
std::unique_ptr<BenchIndex> MakeBenchIndex(const BenchMethod& method, const BenchPlace& place,
                                           const std::vector<float>& sigma, const Lengths* lengths,
                                           HostArena* arena, cudaStream_t stream,
                                           const BenchProgress& progress);

}  // namespace fathom::cuda
