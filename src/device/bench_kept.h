// SPDX-License-Identifier: MIT
// What outlives a run of the step bench, until the process ends: runs follow one another, and
// registering host memory, making weights and reading captures takes longer than timing them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "backend/cuda/host_arena.h"
#include "device/captured_keys.h"
#include "fathom/step_bench.h"
#include "model/cuda/dense.h"

namespace fathom::cuda {

// One run at a time: `mutex` is held by it.
class BenchKept {
 public:
  std::mutex mutex;

  // The arena with all of it free, made anew where it is too small.
  HostArena* Arena(std::int64_t bytes);
  // Bytes that an earlier run has taken and the next one can have.
  std::int64_t arena_bytes() const { return arena_ == nullptr ? 0 : arena_->size(); }
  std::shared_ptr<const DeviceWeights> Weights(const StepShape& shape, std::uint64_t seed);
  // Of one capture at a time, which must not change meanwhile. An empty path: none.
  std::shared_ptr<const CaptureData> Capture(const std::string& path, const StepShape& shape,
                                             const CaptureData::ProgressFn& progress);

 private:
  std::unique_ptr<HostArena> arena_;
  std::shared_ptr<const DeviceWeights> weights_;
  StepShape shape_;  // of the weights
  std::uint64_t seed_ = 0;
  std::shared_ptr<const CaptureData> capture_;
  std::int32_t capture_layers_ = 0;  // that it was read for
};

BenchKept& TheBenchKept();

}  // namespace fathom::cuda
