// SPDX-License-Identifier: MIT
// Indexes to time steps with: every method in one of the two places.
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
#include "device/bench_keys.h"
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
  // Which coordinates of the keys the labels are: all channels, fixed ones, principal components.
  enum class Coordinates { kAll, kLargest, kPrincipal };
  Coordinates coordinates = Coordinates::kAll;
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
  // Holds random codes instead of the keys'.
  virtual bool is_random() const { return false; }
  // Of our own read: the multiplier at which these queries, as BenchKeys::FitQueries has them, read
  // the bits that were asked for.
  virtual void FitMultiplier(std::span<const std::vector<float>> /*queries*/) {}
};

// lengths: in units of the index, on the device. Throws Error.
std::unique_ptr<BenchIndex> MakeBenchIndex(const BenchMethod& method, const BenchPlace& place,
                                           BenchKeys* keys, const Lengths* lengths,
                                           HostArena* arena, cudaStream_t stream,
                                           const BenchProgress& progress);

}  // namespace fathom::cuda
