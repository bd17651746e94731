// SPDX-License-Identifier: MIT
#include "model/cuda/dense.h"

#include <ggml.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <string>
#include <utility>

#include "fathom/error.h"

namespace fathom::cuda {
namespace {

std::int64_t WideWidth(const DenseShape& shape) {
  return std::max(shape.qkv_size(), 2 * std::int64_t{shape.n_ff});
}
std::int64_t InputWidth(const DenseShape& shape) {
  return std::max({std::int64_t{shape.n_embd}, std::int64_t{shape.n_ff}, shape.q_size()});
}

std::size_t Elements(std::int32_t rows, std::int64_t width) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(width);
}

// As ggml_rope_ext derives them from its arguments.
AnglesArgs RopeConstants(const RopeParams& rope) {
  float corrected[2];
  ggml_rope_yarn_corr_dims(rope.n_dims, rope.n_ctx_orig, rope.freq_base, rope.beta_fast,
                           rope.beta_slow, corrected);
  AnglesArgs args{};
  args.n_pairs = rope.n_dims / 2;
  args.theta_scale = std::pow(rope.freq_base, -2.0F / static_cast<float>(rope.n_dims));
  args.freq_scale = rope.freq_scale;
  args.ext_factor = rope.ext_factor;
  args.corr_low = corrected[0];
  args.corr_high = corrected[1];
  args.magnitude = rope.attn_factor;
  if (rope.ext_factor != 0) args.magnitude *= 1.0F + 0.1F * std::log(1.0F / rope.freq_scale);
  return args;
}

}  // namespace

DenseOps::DenseOps(std::shared_ptr<const DeviceWeights> weights, std::int32_t max_rows)
    : weights_(std::move(weights)), max_rows_(max_rows) {
  if (max_rows < 1) {
    throw Error(ErrorCode::kUsage, std::to_string(max_rows) + " rows; it must be at least 1");
  }
  const DenseShape& s = shape();
  CheckShape(s);
  hidden_.Reserve(Elements(max_rows, s.n_embd));
  delta_.Reserve(Elements(max_rows, s.n_embd));
  wide_.Reserve(Elements(max_rows, WideWidth(s)));
  input_.Reserve(Elements(max_rows, InputWidth(s)));
  angles_.Reserve(Elements(max_rows, s.rope.n_dims / 2));
}

std::size_t DenseOps::Bytes(const DenseShape& shape, std::int32_t max_rows) {
  return Matmul::kWorkspaceBytes + Elements(max_rows, shape.n_embd) * 2 * sizeof(float) +
         Elements(max_rows, WideWidth(shape)) * sizeof(float) +
         Elements(max_rows, InputWidth(shape)) * sizeof(Bf16) +
         Elements(max_rows, shape.rope.n_dims / 2) * sizeof(float2);
}

void DenseOps::Prepare(std::int32_t n, std::int32_t n_logits) {
  const DenseShape& s = shape();
  const auto q_size = static_cast<std::int32_t>(s.q_size());
  for (const std::int32_t rows : {n, n_logits}) {  // the last layer may end with fewer rows
    matmul_.Prepare({s.n_embd, rows, q_size});
    matmul_.Prepare({2 * s.n_ff, rows, s.n_embd});
    matmul_.Prepare({s.n_embd, rows, s.n_ff});
  }
  matmul_.Prepare({static_cast<std::int32_t>(s.qkv_size()), n, s.n_embd});
  matmul_.Prepare({s.n_vocab, n_logits, s.n_embd});
}

void DenseOps::Multiply(const Bf16* w, std::int64_t out, std::int32_t n, std::int64_t in, float* y,
                        cudaStream_t stream) {
  matmul_.Run({static_cast<std::int32_t>(out), n, static_cast<std::int32_t>(in)}, w, input_.data(),
              y, stream);
}

void DenseOps::Norm(const float* weight, const float* delta_bias, bool has_delta, bool keep,
                    std::int32_t first_row, std::int32_t n, cudaStream_t stream) {
  const DenseShape& s = shape();
  const std::int64_t at = std::int64_t{first_row} * s.n_embd;
  float* x = hidden_.data() + at;
  NormArgs args{};
  args.x = x;
  args.delta = has_delta ? delta_.data() + at : nullptr;
  args.delta_bias = delta_bias;
  args.weight = weight;
  args.sum = has_delta && keep ? x : nullptr;
  args.out = input_.data();
  args.n = n;
  args.width = s.n_embd;
  args.eps = s.rms_eps;
  LaunchNorm(args, stream);
}

void DenseOps::Embed(const std::int32_t* tokens, std::int32_t n, cudaStream_t stream) {
  assert(n <= max_rows_);
  has_delta_ = false;
  LaunchEmbed({weights_->token_embd(), tokens, hidden_.data(), n, shape().n_embd}, stream);
}

void DenseOps::BeforeAttention(std::int32_t layer, std::int32_t n, const std::int32_t* positions,
                               float* q, float* k, float* v, cudaStream_t stream) {
  assert(n <= max_rows_);
  const DenseShape& s = shape();
  const DeviceLayer& w = weights_->layer(layer);
  if (layer == 0) {
    AnglesArgs angles = RopeConstants(s.rope);
    angles.positions = positions;
    angles.factors = weights_->rope_factors();
    angles.angles = angles_.data();
    angles.n = n;
    LaunchAngles(angles, stream);
  }
  const float* bias = layer == 0 ? nullptr : weights_->layer(layer - 1).down_bias;
  Norm(w.attn_norm, bias, has_delta_, /*keep=*/true, 0, n, stream);
  has_delta_ = false;
  Multiply(w.qkv, s.qkv_size(), n, s.n_embd, wide_.data(), stream);
  QkvArgs args{};
  args.qkv = wide_.data();
  args.bias = w.qkv_bias;
  args.q_norm = w.q_norm;
  args.k_norm = w.k_norm;
  args.angles = angles_.data();
  args.q = q;
  args.k = k;
  args.v = v;
  args.n = n;
  args.n_heads = s.heads.n_heads;
  args.n_kv_heads = s.heads.n_kv_heads;
  args.head_dim = s.heads.head_dim;
  args.n_pairs = s.rope.n_dims / 2;
  args.neox = s.rope.mode == GGML_ROPE_TYPE_NEOX;
  args.eps = s.rms_eps;
  LaunchQkv(args, stream);
}

void DenseOps::AfterAttention(std::int32_t layer, std::int32_t n, const float* attention,
                              cudaStream_t stream, std::int32_t first_row) {
  assert(first_row >= 0 && first_row + n <= max_rows_);
  const DenseShape& s = shape();
  const DeviceLayer& w = weights_->layer(layer);
  float* delta = delta_.data() + std::int64_t{first_row} * s.n_embd;
  LaunchConvert({attention, input_.data(), n * s.q_size()}, stream);
  Multiply(w.attn_output, s.n_embd, n, s.q_size(), delta, stream);
  Norm(w.ffn_norm, w.attn_output_bias, /*has_delta=*/true, /*keep=*/true, first_row, n, stream);
  Multiply(w.gate_up, 2 * std::int64_t{s.n_ff}, n, s.n_embd, wide_.data(), stream);
  LaunchSwiglu({wide_.data(), w.gate_up_bias, input_.data(), n, s.n_ff}, stream);
  Multiply(w.down, s.n_embd, n, s.n_ff, delta, stream);
  has_delta_ = true;
}

void DenseOps::Logits(std::int32_t first_row, std::int32_t n_rows, float* logits,
                      cudaStream_t stream) {
  assert(first_row >= 0 && first_row + n_rows <= max_rows_);
  const DenseShape& s = shape();
  const float* bias = weights_->layer(s.n_layers - 1).down_bias;
  Norm(weights_->output_norm(), bias, has_delta_, /*keep=*/false, first_row, n_rows, stream);
  Multiply(weights_->output(), s.n_vocab, n_rows, s.n_embd, logits, stream);
  if (s.has_output_bias) LaunchBias({weights_->output_bias(), logits, n_rows, s.n_vocab}, stream);
}

void DenseOps::Greedy(const float* logits, std::int32_t n, std::int32_t* tokens,
                      cudaStream_t stream) {
  LaunchArgmax({logits, tokens, n, shape().n_vocab}, stream);
}

}  // namespace fathom::cuda
