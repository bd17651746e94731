// SPDX-License-Identifier: MIT
// What the residual of a session knows of its values, in device memory: mean values of blocks and
// of all, and the factors of the query heads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backend/cuda/buffer.h"
#include "device/attention_step.h"
#include "method/step_source.h"

namespace fathom::cuda {

// Of one sequence. Nothing here may be called while the device works with it.
class ValueMirror {
 public:
  // sizes: batch 1. rule: not kOff. Throws Error(kNoMemory) where the device has too little.
  ValueMirror(const StepSizes& sizes, std::int32_t dense_layers, ResidualRule rule);

  // Becomes what the source has of n_blocks blocks, of which the first `kept` are as they were.
  void Sync(const StepSource& source, std::int64_t kept, std::int64_t n_blocks,
            cudaStream_t stream);
  // Sets what LayerRows says of values; of a layer that scans. The pointers stay.
  void Fill(std::int32_t layer, LayerRows* rows) const;

 private:
  std::int64_t Slot(std::int32_t layer) const {
    return std::int64_t{layer - dense_layers_} * heads_.n_kv_heads;
  }

  const HeadGeometry heads_;
  const std::int32_t dense_layers_, n_layers_;
  const bool by_block_;
  const std::int64_t n_slots_;          // heads of all layers that scan
  const std::int64_t capacity_;         // blocks
  DeviceBuffer<Half> means_;            // [n_slots][capacity][D], by block
  DeviceBuffer<const Half*> pointers_;  // [n_slots] into means_, or null
  DeviceBuffer<float> mean_;            // [n_slots][D]
  DeviceBuffer<float> factor_;          // [n_layers that scan][n_heads]
};

}  // namespace fathom::cuda
