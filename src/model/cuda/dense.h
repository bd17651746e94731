// SPDX-License-Identifier: MIT
// The dense operations of a forward pass on a CUDA device, for prefill and decode: everything but
// attention. Matrices are products of bf16 accumulated in fp32; the hidden state, norms, RoPE, q,
// k, v and logits are fp32.
//
// A pass is Embed, then for every layer in order BeforeAttention, the caller's attention and
// AfterAttention, then Logits. All of it goes to one stream, allocates nothing and waits for
// nothing, so that it can be captured (run the same numbers of rows once before: see Matmul::Run).
// The hidden state of max_rows rows stays inside. One DenseOps per stream; not thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/cuda/buffer.h"
#include "model/cuda/dense_shape.h"
#include "model/cuda/device_weights.h"
#include "model/cuda/matmul.h"

namespace fathom::cuda {

class DenseOps {
 public:
  // Throws Error as CheckShape and Check do; kUsage unless max_rows >= 1.
  DenseOps(std::shared_ptr<const DeviceWeights> weights, std::int32_t max_rows);

  const DenseShape& shape() const { return weights_->shape(); }
  std::int32_t max_rows() const { return max_rows_; }
  // Device memory that one takes beside the weights.
  static std::size_t Bytes(const DenseShape& shape, std::int32_t max_rows);

  // Chooses the algorithms of passes with n rows of which n_logits get logits, ahead of the first.
  void Prepare(std::int32_t n, std::int32_t n_logits);

  // Every pointer below is device memory aligned to 16 bytes, and 0 <= n <= max_rows.

  // Begins a pass: the hidden state becomes the embedding of tokens [n], ids of the vocabulary.
  void Embed(const std::int32_t* tokens, std::int32_t n, cudaStream_t stream);
  // Norm, query, key and value of a layer, with bias, QK-norm and RoPE. positions [n] must hold
  // the same in all layers of a pass: layer 0 computes the angles for all. Writes q
  // [n][n_heads][D], k and v [n][n_kv_heads][D].
  void BeforeAttention(std::int32_t layer, std::int32_t n, const std::int32_t* positions, float* q,
                       float* k, float* v, cudaStream_t stream);
  // Output projection, residual and feed-forward of a layer, for rows [first_row, first_row + n) of
  // the pass: in the last layer, only those whose logits are wanted need it. attention:
  // [n][n_heads][D], of those rows.
  void AfterAttention(std::int32_t layer, std::int32_t n, const float* attention,
                      cudaStream_t stream, std::int32_t first_row = 0);
  // Final norm and output of rows [first_row, first_row + n_rows): logits [n_rows][n_vocab].
  void Logits(std::int32_t first_row, std::int32_t n_rows, float* logits, cudaStream_t stream);
  // The most likely token of each row; of equal ones the smallest, NaN loses. tokens: [n].
  void Greedy(const float* logits, std::int32_t n, std::int32_t* tokens, cudaStream_t stream);

 private:
  void Multiply(const Bf16* w, std::int64_t out, std::int32_t n, std::int64_t in, float* y,
                cudaStream_t stream);
  // x + delta of rows, normed into input_; keep: also stored as the hidden state.
  void Norm(const float* weight, const float* delta_bias, bool has_delta, bool keep,
            std::int32_t first_row, std::int32_t n, cudaStream_t stream);

  std::shared_ptr<const DeviceWeights> weights_;
  std::int32_t max_rows_;
  Matmul matmul_;
  DeviceBuffer<float> hidden_;   // [max_rows][n_embd]
  DeviceBuffer<float> delta_;    // [max_rows][n_embd]: what the last product adds to hidden_
  DeviceBuffer<float> wide_;     // [max_rows][qkv_size or 2 n_ff]: product with a fused matrix
  DeviceBuffer<Bf16> input_;     // [max_rows][widest]: of the next product
  DeviceBuffer<float2> angles_;  // [max_rows][n_dims / 2]
  bool has_delta_ = false;       // delta_ is of a feed-forward and not yet in hidden_
};

}  // namespace fathom::cuda
