// SPDX-License-Identifier: MIT
// The forward pass as ggml graphs that stop where attention begins.
//
// Stage 0: embedding, then norm, QKV, bias, QK-norm and RoPE of layer 0. Stage l: attention output
// projection, residual and feed-forward of layer l - 1, then QKV of layer l. Stage n_layers: the
// rest of the last layer for the last token only, final norm and logits. Between the stages the
// caller reads q, k, v and writes the attention output; the residual stream stays inside.
#pragma once

#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "model/hparams.h"
#include "model/weights.h"

namespace fathom {

// Scratch memory of ggml's kernels, shared by all stages: they never run at the same time.
class WorkBuffer {
 public:
  std::uint8_t* AtLeast(std::size_t bytes);

 private:
  struct Deleter {
    void operator()(std::uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::uint8_t[], Deleter> data_;
  std::size_t size_ = 0;
};

// All stages for a fixed number of tokens, with their memory.
class StageGraphs {
 public:
  // hparams and weights must outlive it. Throws Error(kNoMemory).
  StageGraphs(const HParams& hparams, const Weights& weights, std::int64_t n_tokens, int n_threads);
  StageGraphs(const StageGraphs&) = delete;
  StageGraphs& operator=(const StageGraphs&) = delete;

  std::int64_t n_tokens() const { return n_tokens_; }
  // Inputs, to be filled before stage 0.
  std::int32_t* tokens() const { return static_cast<std::int32_t*>(tokens_->data); }
  std::int32_t* positions() const { return static_cast<std::int32_t*>(positions_->data); }
  // Outputs of stages 0 .. n_layers - 1.
  const float* q() const { return static_cast<const float*>(q_->data); }
  const float* k() const { return static_cast<const float*>(k_->data); }
  const float* v() const { return static_cast<const float*>(v_->data); }
  // Input of stages 1 .. n_layers.
  float* attention() const { return static_cast<float*>(attention_->data); }
  // Output of stage n_layers.
  const float* logits() const { return static_cast<const float*>(logits_->data); }

  void Run(std::int32_t stage, WorkBuffer& work);

 private:
  struct Stage {
    ggml_cgraph* graph = nullptr;
    ggml_cplan plan{};
  };

  void AllocateInputsAndOutputs();
  void BuildStage(std::int32_t stage);
  void AllocateTemporaries();
  ggml_tensor* Norm(ggml_tensor* x, ggml_tensor* weight);
  ggml_tensor* Linear(ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x);
  ggml_tensor* Rope(ggml_tensor* x, ggml_tensor* norm, std::int64_t n_heads);
  ggml_tensor* FeedForward(const LayerWeights& w, ggml_tensor* attention, ggml_tensor* residual);
  void BuildQkv(const LayerWeights& w, ggml_tensor* x, ggml_cgraph* graph);
  void PlaceOutput(ggml_tensor* node, const ggml_tensor* place, ggml_cgraph* graph);

  const HParams& hparams_;
  const Weights& weights_;
  const WeightSet& matrices_;  // of weights_, for this number of tokens
  std::int64_t n_tokens_;
  int n_threads_;
  ggml_context_ptr context_;
  ggml_backend_buffer_ptr io_buffer_;
  ggml_gallocr_ptr allocator_;  // memory of the temporaries
  ggml_tensor* tokens_ = nullptr;
  ggml_tensor* positions_ = nullptr;
  ggml_tensor* residual_ = nullptr;  // [n][n_embd]
  ggml_tensor* q_ = nullptr;         // [n][n_heads * D]
  ggml_tensor* k_ = nullptr;         // [n][n_kv_heads * D]
  ggml_tensor* v_ = nullptr;
  ggml_tensor* attention_ = nullptr;  // [n][n_heads * D]
  ggml_tensor* logits_ = nullptr;     // [n_vocab], of the last token
  std::vector<Stage> stages_;
};

}  // namespace fathom
