// SPDX-License-Identifier: MIT
// Dense attention by the same ggml operations, on the same f16 cache layout, as libllama without
// flash attention. With it a Runner must give libllama's logits bit for bit, whatever the weights
// are quantized to: any other attention differs in the last bits, and the 8-bit rounding of
// activations in quantized models amplifies that to about 1 % of the logits (libllama's own flash
// attention differs as much from its plain one).
#pragma once

#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fathom/model.h"

namespace fathom::testing {

class GgmlAttention {
 public:
  GgmlAttention(const ModelInfo& info, std::int64_t capacity, int n_threads)
      : heads_(info.heads), capacity_((capacity + kPad - 1) / kPad * kPad), n_threads_(n_threads) {
    ggml_init_params params{};
    params.mem_size =
        std::size_t{2} * info.n_layers * (RowSize() * capacity_ * sizeof(ggml_fp16_t) + 1024);
    cache_.reset(ggml_init(params));
    for (int layer = 0; layer < info.n_layers; ++layer) {
      keys_.push_back(ggml_new_tensor_2d(cache_.get(), GGML_TYPE_F16, RowSize(), capacity_));
      values_.push_back(
          ggml_new_tensor_2d(cache_.get(), GGML_TYPE_F16, capacity_, RowSize()));  // transposed
      std::memset(keys_.back()->data, 0, ggml_nbytes(keys_.back()));
      std::memset(values_.back()->data, 0, ggml_nbytes(values_.back()));
    }
    used_.resize(static_cast<std::size_t>(info.n_layers));
  }

  AttentionFn Fn() {
    return [this](std::int32_t layer, std::int64_t n, const float* q, const float* k,
                  const float* v, float* out) {
      Append(layer, n, k, v);
      Attend(layer, n, q, out);
    };
  }

 private:
  static constexpr std::int64_t kPad =
      256;  // libllama computes over a multiple of this; the rest is masked

  std::int64_t RowSize() const { return std::int64_t{heads_.n_kv_heads} * heads_.head_dim; }

  void Append(std::int32_t layer, std::int64_t n, const float* k, const float* v) {
    const auto l = static_cast<std::size_t>(layer);
    auto* keys = static_cast<ggml_fp16_t*>(keys_[l]->data);
    auto* values = static_cast<ggml_fp16_t*>(values_[l]->data);
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t c = 0; c < RowSize(); ++c) {
        keys[(used_[l] + i) * RowSize() + c] = ggml_fp32_to_fp16(k[i * RowSize() + c]);
        values[c * capacity_ + used_[l] + i] = ggml_fp32_to_fp16(v[i * RowSize() + c]);
      }
    }
    used_[l] += n;
  }

  void Attend(std::int32_t layer, std::int64_t n, const float* q, float* out) {
    const auto l = static_cast<std::size_t>(layer);
    const std::int64_t d = heads_.head_dim;
    const std::int64_t n_kv = std::min(capacity_, (used_[l] + kPad - 1) / kPad * kPad);
    ggml_init_params params{};
    params.mem_size =
        static_cast<std::size_t>(n * heads_.n_heads * (3 * n_kv + 6 * d) * 4 + n * n_kv * 4) +
        (8U << 20);
    const ggml_context_ptr context(ggml_init(params));
    ggml_context* c = context.get();
    ggml_tensor* query = ggml_new_tensor_3d(c, GGML_TYPE_F32, d, heads_.n_heads, n);
    std::memcpy(query->data, q, ggml_nbytes(query));
    ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F32, n_kv, n);
    for (std::int64_t i = 0; i < n; ++i) {
      float* row = static_cast<float*>(mask->data) + i * n_kv;
      for (std::int64_t j = 0; j < n_kv; ++j) row[j] = j <= used_[l] - n + i ? 0.0F : -INFINITY;
    }
    const std::size_t half = sizeof(ggml_fp16_t);
    ggml_tensor* keys =
        ggml_view_3d(c, keys_[l], d, n_kv, heads_.n_kv_heads, half * RowSize(), half * d, 0);
    ggml_tensor* values = ggml_view_3d(c, values_[l], n_kv, d, heads_.n_kv_heads, half * capacity_,
                                       half * capacity_ * d, 0);
    ggml_tensor* scores = ggml_mul_mat(c, keys, ggml_permute(c, query, 0, 2, 1, 3));
    scores = ggml_soft_max_ext(c, scores, mask, 1.0F / std::sqrt(static_cast<float>(d)), 0.0F);
    ggml_tensor* mixed = ggml_permute(c, ggml_mul_mat(c, values, scores), 0, 2, 1, 3);
    ggml_tensor* result = ggml_cont_2d(c, mixed, d * heads_.n_heads, n);
    ggml_cgraph* graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, result);
    ggml_cplan plan = ggml_graph_plan(graph, n_threads_, nullptr);
    std::vector<std::uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    ggml_graph_compute(graph, &plan);
    std::memcpy(out, result->data, ggml_nbytes(result));
  }

  HeadGeometry heads_;
  std::int64_t capacity_;
  int n_threads_;
  ggml_context_ptr cache_;
  std::vector<ggml_tensor*> keys_;
  std::vector<ggml_tensor*> values_;
  std::vector<std::int64_t> used_;
};

}  // namespace fathom::testing
