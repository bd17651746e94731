// SPDX-License-Identifier: MIT
// The weights of a model as ggml tensors that lie in the mapped file.
#pragma once

#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "model/gguf_file.h"
#include "model/hparams.h"

namespace fathom {

// Optional tensors are null where the file has none.
struct LayerWeights {
  ggml_tensor* attn_norm = nullptr;
  ggml_tensor* attn_q = nullptr;
  ggml_tensor* attn_k = nullptr;
  ggml_tensor* attn_v = nullptr;
  ggml_tensor* attn_output = nullptr;
  ggml_tensor* attn_q_bias = nullptr;
  ggml_tensor* attn_k_bias = nullptr;
  ggml_tensor* attn_v_bias = nullptr;
  ggml_tensor* attn_output_bias = nullptr;
  ggml_tensor* attn_q_norm = nullptr;
  ggml_tensor* attn_k_norm = nullptr;
  ggml_tensor* ffn_norm = nullptr;
  ggml_tensor* ffn_gate = nullptr;
  ggml_tensor* ffn_up = nullptr;
  ggml_tensor* ffn_down = nullptr;
  ggml_tensor* ffn_gate_bias = nullptr;
  ggml_tensor* ffn_up_bias = nullptr;
  ggml_tensor* ffn_down_bias = nullptr;
};

// The matrices of a model in one memory layout.
struct WeightSet {
  std::vector<LayerWeights> layers;
  ggml_tensor* output = nullptr;  // the token embedding where output is tied
};

class Weights {
 public:
  // Checks every tensor of the file: shape, type, and that the graph uses it. Throws Error:
  // kCorrupt (missing tensor, wrong shape), kUnsupported (unknown tensor or type). The file must
  // outlive it.
  Weights(const GgufFile& file, const HParams& hparams);
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // Copies the matrices whose type has one into the layout of ggml's kernels for single tokens. Of
  // Q4_K they decode a token in 3/4 of the time, at the price of private memory. Call once, before
  // building graphs. Throws Error(kNoMemory).
  void Repack();

  // Bytes that Repack takes; known from the start.
  std::int64_t repack_bytes() const { return repack_bytes_; }

  // For graphs of this many tokens: the repacked matrices for one, those of the file for more (in
  // prompts the repacked kernels measured 1.6 times slower on AVX-512).
  const WeightSet& For(std::int64_t n_tokens) const { return n_tokens == 1 ? packed_ : mapped_; }
  ggml_tensor* token_embd() const { return token_embd_; }
  ggml_tensor* output_norm() const { return output_norm_; }
  ggml_tensor* output_bias() const { return output_bias_; }
  ggml_tensor* rope_freqs() const { return rope_freqs_; }
  bool tied_output() const { return tied_output_; }
  std::int64_t n_vocab() const { return token_embd_->ne[1]; }

 private:
  // What Repack would copy, and into which kind of buffer.
  struct RepackPlan {
    ggml_backend_buffer_type_t type = nullptr;
    std::vector<ggml_tensor**> slots;  // into packed_
  };
  RepackPlan PlanRepack();
  void BindLayer(const HParams& hparams, std::int32_t layer);
  ggml_tensor* Matrix(const std::string& name, std::int64_t in, std::int64_t out);
  ggml_tensor* Vector(const std::string& name, std::int64_t size);
  ggml_tensor* OptionalVector(const std::string& name, std::int64_t size);
  ggml_tensor* Bind(const GgufTensor& tensor, std::initializer_list<std::int64_t> shape);

  const GgufFile& file_;
  std::unordered_set<std::string> used_;
  ggml_context_ptr context_;
  ggml_backend_buffer_ptr file_buffer_;  // the whole file, not owned
  ggml_context_ptr repack_context_;
  ggml_backend_buffer_ptr repack_buffer_;
  WeightSet mapped_;
  WeightSet packed_;  // as mapped_, where nothing is repacked
  ggml_tensor* token_embd_ = nullptr;
  ggml_tensor* output_norm_ = nullptr;
  ggml_tensor* output_bias_ = nullptr;
  ggml_tensor* rope_freqs_ = nullptr;
  bool tied_output_ = false;
  std::int64_t repack_bytes_ = 0;
};

}  // namespace fathom
