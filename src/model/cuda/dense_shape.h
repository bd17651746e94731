// SPDX-License-Identifier: MIT
// What the dense part of a decoder-only transformer looks like: all that DenseOps needs to know
// beside the weights themselves.
#pragma once

#include <cstdint>

#include "fathom/types.h"
#include "model/hparams.h"
#include "model/weights.h"

namespace fathom::cuda {

struct DenseShape {
  std::int32_t n_layers = 0;
  std::int32_t n_embd = 0;  // a multiple of 8, at most kMaxEmbd
  std::int32_t n_ff = 0;    // a multiple of 8
  std::int32_t n_vocab = 0;
  HeadGeometry heads;  // head_dim: a multiple of 16
  bool has_qk_norm = false;
  bool has_qkv_bias = false;
  bool has_attn_output_bias = false;
  bool has_ffn_bias = false;
  bool has_output_bias = false;
  bool has_rope_factors = false;
  bool tied_output = false;
  float rms_eps = 0;
  RopeParams rope;

  std::int64_t q_size() const { return std::int64_t{heads.n_heads} * heads.head_dim; }
  std::int64_t kv_size() const { return std::int64_t{heads.n_kv_heads} * heads.head_dim; }
  std::int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};
inline constexpr std::int32_t kMaxEmbd = 32768;

// A flag for biases is set when any layer has them; the others get zeros.
DenseShape ShapeOf(const HParams& hparams, const Weights& weights);

// The shape of Qwen3-8B, to measure with random weights.
DenseShape Qwen3_8B();

// Throws Error(kUnsupported) for widths that the kernels do not take.
void CheckShape(const DenseShape& shape);

}  // namespace fathom::cuda
