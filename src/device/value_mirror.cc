// SPDX-License-Identifier: MIT
#include "device/value_mirror.h"

#include <algorithm>
#include <cstddef>
#include <span>

#include "backend/cuda/host_copy.h"

namespace fathom::cuda {
namespace {

constexpr std::int64_t kBlocksAtOnce = 256;  // copied through one staging area

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

ValueMirror::ValueMirror(const StepSizes& sizes, std::int32_t dense_layers, ResidualRule rule)
    : heads_(sizes.heads),
      dense_layers_(dense_layers),
      n_layers_(sizes.n_layers),
      by_block_(rule == ResidualRule::kBlock),
      n_slots_(std::int64_t{sizes.n_layers - dense_layers} * sizes.heads.n_kv_heads),
      capacity_(sizes.max_tokens / kBlockTokens + 1),
      mean_(Size(n_slots_ * sizes.heads.head_dim)),
      factor_(Size(std::int64_t{sizes.n_layers - dense_layers} * sizes.heads.n_heads)) {
  if (by_block_) means_.Reserve(Size(n_slots_ * capacity_ * heads_.head_dim));
  std::vector<const Half*> pointers;
  for (std::int64_t slot = 0; slot < n_slots_; ++slot) {
    pointers.push_back(by_block_ ? means_.data() + slot * capacity_ * heads_.head_dim : nullptr);
  }
  pointers_ = DeviceBuffer<const Half*>(std::span<const Half* const>(pointers));
}

void ValueMirror::Sync(const StepSource& source, std::int64_t kept, std::int64_t n_blocks,
                       cudaStream_t stream) {
  const std::int64_t dim = heads_.head_dim;
  std::vector<Half> staged;
  for (std::int64_t first = kept; by_block_ && first < n_blocks; first += kBlocksAtOnce) {
    const std::int64_t n = std::min(kBlocksAtOnce, n_blocks - first);
    staged.clear();
    for (std::int32_t layer = dense_layers_; layer < n_layers_; ++layer) {
      for (std::int32_t h = 0; h < heads_.n_kv_heads; ++h) {
        const Half* from = source.values(layer, h).block_means() + first * dim;
        staged.insert(staged.end(), from, from + n * dim);
      }
    }
    Check(
        cudaMemcpy2DAsync(means_.data() + first * dim, Size(capacity_ * dim) * sizeof(Half),
                          staged.data(), Size(n * dim) * sizeof(Half), Size(n * dim) * sizeof(Half),
                          Size(n_slots_), cudaMemcpyHostToDevice, stream),
        "cudaMemcpy2DAsync");
    Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  std::vector<float> mean;
  for (std::int32_t layer = dense_layers_; layer < n_layers_; ++layer) {
    for (std::int32_t h = 0; h < heads_.n_kv_heads; ++h) {
      const auto of_head = source.values(layer, h).mean();
      mean.insert(mean.end(), of_head.begin(), of_head.end());
    }
  }
  const auto factors = source.factors().subspan(Size(dense_layers_) * Size(heads_.n_heads));
  CopyToDevice(mean_.data(), mean.data(), mean.size(), stream);
  CopyToDevice(factor_.data(), factors.data(), factors.size(), stream);
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void ValueMirror::Fill(std::int32_t layer, LayerRows* rows) const {
  const std::int64_t slot = Slot(layer);
  rows->value_means = pointers_.data() + slot;
  rows->mean_value = mean_.data() + slot * heads_.head_dim;
  rows->factor = factor_.data() + std::int64_t{layer - dense_layers_} * heads_.n_heads;
}

}  // namespace fathom::cuda
