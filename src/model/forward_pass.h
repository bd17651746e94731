// SPDX-License-Identifier: MIT
// What a Runner runs on: one implementation per device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fathom/model.h"

namespace fathom {

class ForwardPass {
 public:
  virtual ~ForwardPass() = default;

  // As Runner::Forward, whose checks are done.
  virtual std::span<const float> Run(std::span<const Token> tokens, std::int64_t first,
                                     const AttentionFn& attention, bool want_logits) = 0;
};

// By ggml's kernels.
std::unique_ptr<ForwardPass> MakeCpuPass(std::shared_ptr<const Model> model, int n_threads);

// On the first CUDA device; with FATHOM_CUDA only. n_threads convert the weights, which all passes
// of a model share. Buffers for max_tokens tokens per call are made at once. Throws Error:
// kUnsupported (no usable device, a shape that the kernels do not take), kNoMemory (of the device),
// what CUDA reports.
std::unique_ptr<ForwardPass> MakeCudaPass(std::shared_ptr<const Model> model, int n_threads,
                                          std::int64_t max_tokens);

}  // namespace fathom
