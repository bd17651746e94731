// SPDX-License-Identifier: MIT
// The weights of a model on a CUDA device: matrices in bf16, norms and biases in fp32, in one
// allocation.
//
// All matrices are [out][in], row-major. What is multiplied by the same input is one matrix: query,
// key and value; gate and up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/buffer.h"
#include "fathom/model.h"
#include "model/cuda/dense_kernels.h"
#include "model/cuda/dense_shape.h"

namespace fathom::cuda {

// Pointers into device memory, aligned to 256 bytes. Null where the shape has no such part.
struct DeviceLayer {
  float* attn_norm = nullptr;         // [n_embd]
  float* q_norm = nullptr;            // [head_dim]
  float* k_norm = nullptr;            // [head_dim]
  float* ffn_norm = nullptr;          // [n_embd]
  Bf16* qkv = nullptr;                // [qkv_size][n_embd]
  float* qkv_bias = nullptr;          // [qkv_size]
  Bf16* attn_output = nullptr;        // [n_embd][q_size]
  float* attn_output_bias = nullptr;  // [n_embd]
  Bf16* gate_up = nullptr;            // [2 n_ff][n_embd], gate first
  float* gate_up_bias = nullptr;      // [2 n_ff]
  Bf16* down = nullptr;               // [n_embd][n_ff]
  float* down_bias = nullptr;         // [n_embd]
};

// Immutable once made; safe to share between threads, streams and DenseOps.
class DeviceWeights {
 public:
  // Weights of a model, dequantized as ggml does and rounded to nearest even; n_threads threads
  // convert while the device copies. Throws Error: kNoMemory (saying how much is needed and free),
  // kUnsupported (CheckShape), what CUDA reports.
  static std::shared_ptr<const DeviceWeights> Load(const Model& model, int n_threads);
  // Random ones, made on the device: matrices and biases normal with a standard deviation of 0.02,
  // norms and frequency factors 1. Equal seeds give equal weights. Throws as Load.
  static std::shared_ptr<const DeviceWeights> Random(const DenseShape& shape, std::uint64_t seed);

  // Device memory that weights of this shape take.
  static std::size_t Bytes(const DenseShape& shape);

  const DenseShape& shape() const { return shape_; }
  const DeviceLayer& layer(std::int32_t i) const { return layers_[static_cast<std::size_t>(i)]; }
  const Bf16* token_embd() const { return token_embd_; }     // [n_vocab][n_embd]
  const float* output_norm() const { return output_norm_; }  // [n_embd]
  const Bf16* output() const { return output_; }  // [n_vocab][n_embd]; token_embd where tied
  const float* output_bias() const { return output_bias_; }    // [n_vocab] or null
  const float* rope_factors() const { return rope_factors_; }  // [n_dims / 2] or null

 private:
  explicit DeviceWeights(const DenseShape& shape) : shape_(shape) {}

  // Gives every part its place from `base` on, or only counts when base is null. Returns the bytes.
  std::size_t Place(std::byte* base);
  // Checks the device's memory, allocates and places.
  void Allocate();
  void Upload(const Weights& weights, int n_threads);
  void FillRandom(std::uint64_t seed);

  DenseShape shape_;
  DeviceBuffer<std::byte> memory_;
  std::vector<DeviceLayer> layers_;
  Bf16* token_embd_ = nullptr;
  float* output_norm_ = nullptr;
  Bf16* output_ = nullptr;
  float* output_bias_ = nullptr;
  float* rope_factors_ = nullptr;
};

// Throws Error(kNoMemory) unless `bytes` of device memory are free: "WHAT needs 15.3 GiB of device
// memory and 10.0 GiB are free; REMEDY".
void CheckDeviceMemory(std::size_t bytes, const std::string& what, const std::string& remedy);

}  // namespace fathom::cuda
