// SPDX-License-Identifier: MIT
#include "model/cuda/device_weights.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/parallel.h"
#include "fathom/error.h"
#include "model/cuda/dense_kernels.h"
#include "model/cuda/pinned_buffer.h"
#include "model/model_impl.h"

namespace fathom::cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::int64_t kStageElements = 1 << 23;  // of a staging buffer: 16 MiB of bf16
constexpr std::int64_t kRowsPerTask = 16;

// Hands out places in one allocation.
class Cursor {
 public:
  explicit Cursor(std::byte* base) : base_(base) {}

  template <typename T>
  T* Take(std::int64_t n) {
    const std::size_t at = used_;
    used_ += static_cast<std::size_t>(n) * sizeof(T);
    used_ = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  float* Vector(std::int64_t n, bool present = true) { return present ? Take<float>(n) : nullptr; }
  Bf16* Matrix(std::int64_t out, std::int64_t in) { return Take<Bf16>(out * in); }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

std::string GibText(std::size_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  return text.data();
}

// To nearest even; NaN stays NaN.
Bf16 ToBf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<Bf16>((bits >> 16) | 0x40U);
  return static_cast<Bf16>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

// Rows [first, first + n) of a matrix in any ggml type.
void ConvertRows(const ggml_tensor* matrix, std::int64_t first, std::int64_t n, Bf16* out) {
  const std::int64_t in = matrix->ne[0];
  const std::size_t row_bytes = ggml_row_size(matrix->type, in);
  const ggml_to_float_t to_float = ggml_get_type_traits(matrix->type)->to_float;
  std::vector<float> row(static_cast<std::size_t>(in));
  for (std::int64_t r = 0; r < n; ++r) {
    const std::byte* source = static_cast<const std::byte*>(matrix->data) +
                              static_cast<std::size_t>(first + r) * row_bytes;
    if (matrix->type == GGML_TYPE_F32) {
      std::memcpy(row.data(), source, row_bytes);
    } else {
      to_float(source, row.data(), in);
    }
    std::transform(row.begin(), row.end(), out + r * in, ToBf16);
  }
}

// Copies tensors to the device: one staging buffer is filled while the other is sent.
class Uploader {
 public:
  explicit Uploader(int n_threads) : n_threads_(n_threads) {}
  // After an error, too, nothing may still be sent from buffers that go.
  ~Uploader() { Ignore(cudaStreamSynchronize(stream_.get())); }
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  void Matrix(const ggml_tensor* matrix, Bf16* device) {
    const std::int64_t in = matrix->ne[0];
    const std::int64_t rows = matrix->ne[1];
    const std::int64_t step = std::max<std::int64_t>(kStageElements / in, 1);
    for (std::int64_t first = 0; first < rows; first += step) {
      const std::int64_t n = std::min(step, rows - first);
      Bf16* stage = NextStage(n * in);
      ParallelFor((n + kRowsPerTask - 1) / kRowsPerTask, n_threads_, [&](std::int64_t task) {
        const std::int64_t at = task * kRowsPerTask;
        ConvertRows(matrix, first + at, std::min(kRowsPerTask, n - at), stage + at * in);
      });
      Check(cudaMemcpyAsync(device + first * in, stage, static_cast<std::size_t>(n * in) * 2,
                            cudaMemcpyHostToDevice, stream_.get()),
            "cudaMemcpyAsync of weights");
      sent_[turn_].Record(stream_.get());
    }
  }

  // n floats: those of the vector, or zeros where the model has none.
  void Vector(const ggml_tensor* vector, std::int64_t n, float* device) {
    const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
    if (vector == nullptr) {
      Check(cudaMemsetAsync(device, 0, bytes, stream_.get()), "cudaMemsetAsync of biases");
    } else {
      Check(cudaMemcpyAsync(device, vector->data, bytes, cudaMemcpyHostToDevice, stream_.get()),
            "cudaMemcpyAsync of weights");
    }
  }

  void Finish() { stream_.Wait(); }

 private:
  // A buffer that nothing is sent from any more.
  Bf16* NextStage(std::int64_t elements) {
    turn_ = 1 - turn_;
    Check(cudaEventSynchronize(sent_[turn_].get()), "cudaEventSynchronize");
    const auto need = static_cast<std::size_t>(std::max(elements, kStageElements));
    if (stages_[turn_].size() < need) stages_[turn_] = PinnedBuffer<Bf16>(need);
    return stages_[turn_].data();
  }

  int n_threads_;
  std::size_t turn_ = 0;
  std::array<PinnedBuffer<Bf16>, 2> stages_;
  std::array<Event, 2> sent_;
  Stream stream_;
};

}  // namespace

void CheckDeviceMemory(std::size_t bytes, const std::string& what, const std::string& remedy) {
  std::size_t available = 0;
  std::size_t total = 0;
  Check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
  if (bytes <= available) return;
  throw Error(ErrorCode::kNoMemory, what + " need " + GibText(bytes) + " of device memory and " +
                                        GibText(available) + " of " + GibText(total) +
                                        " are free; " + remedy);
}

std::size_t DeviceWeights::Place(std::byte* base) {
  Cursor at(base);
  const DenseShape& s = shape_;
  layers_.resize(static_cast<std::size_t>(s.n_layers));
  for (DeviceLayer& w : layers_) {
    w.attn_norm = at.Vector(s.n_embd);
    w.q_norm = at.Vector(s.heads.head_dim, s.has_qk_norm);
    w.k_norm = at.Vector(s.heads.head_dim, s.has_qk_norm);
    w.ffn_norm = at.Vector(s.n_embd);
    w.qkv = at.Matrix(s.qkv_size(), s.n_embd);
    w.qkv_bias = at.Vector(s.qkv_size(), s.has_qkv_bias);
    w.attn_output = at.Matrix(s.n_embd, s.q_size());
    w.attn_output_bias = at.Vector(s.n_embd, s.has_attn_output_bias);
    w.gate_up = at.Matrix(2 * std::int64_t{s.n_ff}, s.n_embd);
    w.gate_up_bias = at.Vector(2 * std::int64_t{s.n_ff}, s.has_ffn_bias);
    w.down = at.Matrix(s.n_embd, s.n_ff);
    w.down_bias = at.Vector(s.n_embd, s.has_ffn_bias);
  }
  token_embd_ = at.Matrix(s.n_vocab, s.n_embd);
  output_norm_ = at.Vector(s.n_embd);
  output_ = s.tied_output ? token_embd_ : at.Matrix(s.n_vocab, s.n_embd);
  output_bias_ = at.Vector(s.n_vocab, s.has_output_bias);
  rope_factors_ = at.Vector(s.rope.n_dims / 2, s.has_rope_factors);
  return at.used();
}

std::size_t DeviceWeights::Bytes(const DenseShape& shape) {
  return DeviceWeights(shape).Place(nullptr);
}

void DeviceWeights::Allocate() {
  CheckShape(shape_);
  const std::size_t bytes = Place(nullptr);
  CheckDeviceMemory(bytes, "the model's weights in bf16", "choose a smaller model or device 'cpu'");
  memory_.Reserve(bytes);
  Place(memory_.data());
}

void DeviceWeights::Upload(const Weights& weights, int n_threads) {
  Uploader up(n_threads);
  const DenseShape& s = shape_;
  const std::int64_t q_size = s.q_size();
  const std::int64_t kv_size = s.kv_size();
  const WeightSet& set = weights.For(2);  // those of the file, not repacked ones
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerWeights& from = set.layers[i];
    const DeviceLayer& to = layers_[i];
    up.Vector(from.attn_norm, s.n_embd, to.attn_norm);
    up.Vector(from.ffn_norm, s.n_embd, to.ffn_norm);
    if (s.has_qk_norm) {
      up.Vector(from.attn_q_norm, s.heads.head_dim, to.q_norm);
      up.Vector(from.attn_k_norm, s.heads.head_dim, to.k_norm);
    }
    up.Matrix(from.attn_q, to.qkv);
    up.Matrix(from.attn_k, to.qkv + q_size * s.n_embd);
    up.Matrix(from.attn_v, to.qkv + (q_size + kv_size) * s.n_embd);
    if (s.has_qkv_bias) {
      up.Vector(from.attn_q_bias, q_size, to.qkv_bias);
      up.Vector(from.attn_k_bias, kv_size, to.qkv_bias + q_size);
      up.Vector(from.attn_v_bias, kv_size, to.qkv_bias + q_size + kv_size);
    }
    up.Matrix(from.attn_output, to.attn_output);
    if (s.has_attn_output_bias) up.Vector(from.attn_output_bias, s.n_embd, to.attn_output_bias);
    up.Matrix(from.ffn_gate, to.gate_up);
    up.Matrix(from.ffn_up, to.gate_up + std::int64_t{s.n_ff} * s.n_embd);
    up.Matrix(from.ffn_down, to.down);
    if (s.has_ffn_bias) {
      up.Vector(from.ffn_gate_bias, s.n_ff, to.gate_up_bias);
      up.Vector(from.ffn_up_bias, s.n_ff, to.gate_up_bias + s.n_ff);
      up.Vector(from.ffn_down_bias, s.n_embd, to.down_bias);
    }
  }
  up.Matrix(weights.token_embd(), token_embd_);
  up.Vector(weights.output_norm(), s.n_embd, output_norm_);
  if (!s.tied_output) up.Matrix(set.output, output_);
  if (s.has_output_bias) up.Vector(weights.output_bias(), s.n_vocab, output_bias_);
  if (s.has_rope_factors) up.Vector(weights.rope_freqs(), s.rope.n_dims / 2, rope_factors_);
  up.Finish();
}

void DeviceWeights::FillRandom(std::uint64_t seed) {
  constexpr float kDeviation = 0.02F;
  const Stream stream;
  std::uint64_t part = 0;
  const auto matrix = [&](Bf16* to, std::int64_t n) {
    LaunchRandomBf16({to, n, seed + (part++ << 48), kDeviation}, stream.get());
  };
  const auto vector = [&](float* to, std::int64_t n, float middle, float deviation) {
    if (to != nullptr) {
      LaunchRandomFloat({to, n, seed + (part++ << 48), middle, deviation}, stream.get());
    }
  };
  const DenseShape& s = shape_;
  const std::int64_t n_embd = s.n_embd;
  const std::int64_t n_ff = s.n_ff;
  for (const DeviceLayer& w : layers_) {
    vector(w.attn_norm, n_embd, 1, 0);
    vector(w.q_norm, s.heads.head_dim, 1, 0);
    vector(w.k_norm, s.heads.head_dim, 1, 0);
    vector(w.ffn_norm, n_embd, 1, 0);
    matrix(w.qkv, s.qkv_size() * n_embd);
    vector(w.qkv_bias, s.qkv_size(), 0, kDeviation);
    matrix(w.attn_output, n_embd * s.q_size());
    vector(w.attn_output_bias, n_embd, 0, kDeviation);
    matrix(w.gate_up, 2 * n_ff * n_embd);
    vector(w.gate_up_bias, 2 * n_ff, 0, kDeviation);
    matrix(w.down, n_embd * n_ff);
    vector(w.down_bias, n_embd, 0, kDeviation);
  }
  matrix(token_embd_, s.n_vocab * n_embd);
  vector(output_norm_, n_embd, 1, 0);
  if (!s.tied_output) matrix(output_, s.n_vocab * n_embd);
  vector(output_bias_, s.n_vocab, 0, kDeviation);
  vector(rope_factors_, s.rope.n_dims / 2, 1, 0);
  stream.Wait();
}

std::shared_ptr<const DeviceWeights> DeviceWeights::Load(const Model& model, int n_threads) {
  const Model::Impl& impl = model.impl();
  const std::shared_ptr<DeviceWeights> made(new DeviceWeights(ShapeOf(impl.hparams, impl.weights)));
  made->Allocate();
  impl.file.mapping().Prefetch();
  made->Upload(impl.weights, n_threads);
  return made;
}

std::shared_ptr<const DeviceWeights> DeviceWeights::Random(const DenseShape& shape,
                                                           std::uint64_t seed) {
  const std::shared_ptr<DeviceWeights> made(new DeviceWeights(shape));
  made->Allocate();
  made->FillRandom(seed);
  return made;
}

}  // namespace fathom::cuda
