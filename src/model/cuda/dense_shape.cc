// SPDX-License-Identifier: MIT
#include "model/cuda/dense_shape.h"

#include <string>

#include "fathom/error.h"

namespace fathom::cuda {

DenseShape ShapeOf(const HParams& hparams, const Weights& weights) {
  DenseShape shape;
  shape.n_layers = hparams.n_layers;
  shape.n_embd = hparams.n_embd;
  shape.n_ff = hparams.n_ff;
  shape.n_vocab = static_cast<std::int32_t>(weights.n_vocab());
  shape.heads = hparams.heads;
  for (const LayerWeights& w : weights.For(2).layers) {
    shape.has_qk_norm |= w.attn_q_norm != nullptr;
    shape.has_qkv_bias |= w.attn_q_bias || w.attn_k_bias || w.attn_v_bias;
    shape.has_attn_output_bias |= w.attn_output_bias != nullptr;
    shape.has_ffn_bias |= w.ffn_gate_bias || w.ffn_up_bias || w.ffn_down_bias;
  }
  shape.has_output_bias = weights.output_bias() != nullptr;
  shape.has_rope_factors = weights.rope_freqs() != nullptr;
  shape.tied_output = weights.tied_output();
  shape.rms_eps = hparams.rms_eps;
  shape.rope = hparams.rope;
  return shape;
}

DenseShape Qwen3_8B() {
  DenseShape shape;
  shape.n_layers = 36;
  shape.n_embd = 4096;
  shape.n_ff = 12288;
  shape.n_vocab = 151936;
  shape.heads = {32, 8, 128};
  shape.has_qk_norm = true;
  shape.rms_eps = 1e-6F;
  shape.rope.mode = GGML_ROPE_TYPE_NEOX;
  shape.rope.n_dims = 128;
  shape.rope.n_ctx_orig = 40960;
  shape.rope.freq_base = 1e6F;
  return shape;
}

void CheckShape(const DenseShape& shape) {
  const bool aligned = shape.n_embd % 8 == 0 && shape.n_ff % 8 == 0;
  if (aligned && shape.n_embd <= kMaxEmbd) return;
  throw Error(ErrorCode::kUnsupported,
              "the CUDA kernels take embedding_length and feed_forward_length in multiples of 8, "
              "the first up to " +
                  std::to_string(kMaxEmbd) + "; this model has " + std::to_string(shape.n_embd) +
                  " and " + std::to_string(shape.n_ff) + ": use device 'cpu'");
}

}  // namespace fathom::cuda
