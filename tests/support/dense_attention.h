// SPDX-License-Identifier: MIT
// Dense causal attention over a growing cache, in plain C++: the simplest thing that can stand
// behind a Runner in tests.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fathom/model.h"

namespace fathom::testing {

class DenseAttention {
 public:
  enum class CacheType {
    kF16,
    kF32
  };  // how keys and values are rounded, as libllama's type_k and type_v

  DenseAttention(const ModelInfo& info, CacheType type)
      : heads_(info.heads),
        type_(type),
        keys_(static_cast<std::size_t>(info.n_layers)),
        values_(static_cast<std::size_t>(info.n_layers)) {}

  AttentionFn Fn() {
    return [this](std::int32_t layer, std::int64_t n, const float* q, const float* k,
                  const float* v, float* out) { Attend(layer, n, q, k, v, out); };
  }

  // Keys of one layer, [tokens][n_kv_heads][D].
  const std::vector<float>& keys(std::int32_t layer) const {
    return keys_[static_cast<std::size_t>(layer)];
  }

 private:
  // libllama's products with an f16 cache round the other factor, too: queries and softmax weights.
  float Rounded(float x) const {
    return type_ == CacheType::kF32 ? x : ggml_fp16_to_fp32(ggml_fp32_to_fp16(x));
  }

  void Append(std::vector<float>& cache, const float* rows, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) {
      cache.push_back(Rounded(rows[i]));
    }
  }

  void Attend(std::int32_t layer, std::int64_t n, const float* q, const float* k, const float* v,
              float* out) {
    std::vector<float>& keys = keys_[static_cast<std::size_t>(layer)];
    std::vector<float>& values = values_[static_cast<std::size_t>(layer)];
    const std::int64_t row = std::int64_t{heads_.n_kv_heads} * heads_.head_dim;
    const std::int64_t before = static_cast<std::int64_t>(keys.size()) / row;
    Append(keys, k, n * row);
    Append(values, v, n * row);
#pragma omp parallel for schedule(dynamic, 8)
    for (std::int64_t i = 0; i < n * heads_.n_heads; ++i) {
      const std::int64_t token = i / heads_.n_heads;
      const std::int64_t offset = i % heads_.n_heads / heads_.group() * heads_.head_dim;
      AttendOne(before + token + 1, q + i * heads_.head_dim, keys.data() + offset,
                values.data() + offset, row, out + i * heads_.head_dim);
    }
  }

  void AttendOne(std::int64_t n_keys, const float* q, const float* keys, const float* values,
                 std::int64_t stride, float* out) const {
    const int d = heads_.head_dim;
    const float scale = 1.0F / std::sqrt(static_cast<float>(d));
    std::vector<float> weights(static_cast<std::size_t>(n_keys));
    std::vector<float> query(q, q + d);
    for (float& x : query) x = Rounded(x);
    float best = -INFINITY;
    for (std::int64_t j = 0; j < n_keys; ++j) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int c = 0; c < d; ++c) sum += query[c] * keys[j * stride + c];
      weights[static_cast<std::size_t>(j)] = sum * scale;
      best = std::max(best, sum * scale);
    }
    float total = 0;
    for (float& w : weights) total += w = std::exp(w - best);
    for (int c = 0; c < d; ++c) out[c] = 0;
    for (std::int64_t j = 0; j < n_keys; ++j) {
      const float w = Rounded(weights[static_cast<std::size_t>(j)] / total);
#pragma omp simd
      for (int c = 0; c < d; ++c) out[c] += w * values[j * stride + c];
    }
  }

  HeadGeometry heads_;
  CacheType type_;
  std::vector<std::vector<float>> keys_;
  std::vector<std::vector<float>> values_;
};

}  // namespace fathom::testing
