// SPDX-License-Identifier: MIT
#include "method/layer_index.h"

#include <algorithm>
#include <utility>

#include "base/half.h"
#include "base/parallel.h"

namespace fathom {
namespace {

// Moments of the keys of one KV head, the first 16 tokens left out.
Moments KeyMoments(const Half* rows, std::int64_t n_tokens, std::int32_t dim,
                   bool full_covariance) {
  Moments moments(dim, full_covariance);
  const auto width = static_cast<std::size_t>(dim);
  std::vector<float> keys(kBlockTokens * width);
  for (std::int64_t first = kStatsSkip; first < n_tokens; first += kBlockTokens) {
    const std::int64_t n = std::min<std::int64_t>(kBlockTokens, n_tokens - first);
    for (std::int64_t i = 0; i < n; ++i) {
      const Half* key = rows + (first + i) * 2 * dim;
      for (std::size_t j = 0; j < width; ++j)
        keys[static_cast<std::size_t>(i) * width + j] = HalfToFloat(key[j]);
    }
    moments.Add(keys.data(), n);
  }
  return moments;
}

// Var_j = v_j' C v_j of the rotated coordinates.
std::vector<double> RotatedVariance(const Basis& basis, const std::vector<double>& covariance) {
  const auto dim = static_cast<std::size_t>(basis.dim);
  std::vector<double> variance(dim);
  for (std::size_t j = 0; j < dim; ++j) {
    double sum = 0;
    for (std::size_t a = 0; a < dim; ++a) {
      double row = 0;
      for (std::size_t b = 0; b < dim; ++b)
        row += covariance[a * dim + b] * basis.key_map[b * dim + j];
      sum += row * basis.key_map[a * dim + j];
    }
    variance[j] = std::max(sum, 0.0);
  }
  return variance;
}

}  // namespace

LayerIndex::LayerIndex(const MethodContext& context, IndexShape shape, BasisRule rule)
    : context_(context),
      shape_(shape),
      rule_(rule),
      heads_(static_cast<std::size_t>(context.rows->n_layers()) *
             static_cast<std::size_t>(context.rows->geometry().n_kv_heads)),
      built_tokens_(static_cast<std::size_t>(context.rows->n_layers()), 0) {}

std::size_t LayerIndex::Slot(std::int32_t layer, std::int32_t kv_head) const {
  return static_cast<std::size_t>(layer) *
             static_cast<std::size_t>(context_.rows->geometry().n_kv_heads) +
         static_cast<std::size_t>(kv_head);
}

void LayerIndex::BuildHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) {
  const Half* rows = context_.rows->rows(layer, kv_head);
  const std::int32_t dim = shape_.head_dim;
  const bool klt = rule_ == BasisRule::kKlt;
  const Moments moments = KeyMoments(rows, n_tokens, dim, klt);
  Basis basis;
  std::vector<double> variance;
  if (klt) {
    const SecondMoment none(dim);
    basis = KltBasis(moments, context_.queries ? (*context_.queries)[Slot(layer, kv_head)] : none);
    variance = RotatedVariance(basis, moments.Covariance());
  } else {
    basis =
        RawBasis(dim, rule_ == BasisRule::kCentred ? moments.mean() : std::span<const double>());
    variance = moments.Variance();
  }
  auto head = std::make_unique<IndexedHead>(
      IndexedHead{HeadIndex(shape_, std::move(basis)), std::move(variance)});
  head->index.Build(rows, n_tokens / kBlockTokens, *context_.backend);
  heads_[Slot(layer, kv_head)] = std::move(head);
  Changed(layer, kv_head);
}

void LayerIndex::BuildAll(std::int64_t n_tokens) {
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  ParallelFor(static_cast<std::int64_t>(heads_.size()), context_.backend->n_threads(),
              [&](std::int64_t slot) {
                const auto layer = static_cast<std::int32_t>(slot / n_kv);
                if (!built(layer))
                  BuildHead(layer, static_cast<std::int32_t>(slot % n_kv), n_tokens);
              });
  for (auto& tokens : built_tokens_) tokens = tokens > 0 ? tokens : n_tokens;
}

void LayerIndex::Extend(std::int32_t layer, std::int64_t n_tokens) {
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  const int n_threads = context_.backend->n_threads();
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  if (!built(layer)) {
    ParallelFor(n_kv, n_threads,
                [&](std::int64_t h) { BuildHead(layer, static_cast<std::int32_t>(h), n_tokens); });
    built_tokens_[static_cast<std::size_t>(layer)] = n_tokens;
    return;
  }
  if (head(layer, 0).index.n_blocks() >= n_blocks) return;
  ParallelFor(n_kv, n_threads, [&](std::int64_t h) {
    const auto kv_head = static_cast<std::int32_t>(h);
    head(layer, kv_head)
        .index.Append(context_.rows->rows(layer, kv_head), n_blocks, *context_.backend);
    Changed(layer, kv_head);
  });
}

void LayerIndex::Truncate(std::int64_t n_tokens) {
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  for (std::int32_t layer = 0; layer < context_.rows->n_layers(); ++layer) {
    auto& built_tokens = built_tokens_[static_cast<std::size_t>(layer)];
    if (built_tokens == 0) continue;
    const bool drop = n_tokens < built_tokens;
    for (std::int32_t h = 0; h < n_kv; ++h) {
      auto& slot = heads_[Slot(layer, h)];
      if (drop) {
        slot.reset();
      } else if (slot->index.n_blocks() > n_blocks) {
        slot->index.Truncate(context_.rows->rows(layer, h), n_blocks);
        Changed(layer, h);
      }
    }
    if (drop) built_tokens = 0;
  }
}

std::int64_t LayerIndex::MemoryBytes() const {
  std::int64_t bytes = 0;
  for (const auto& head : heads_) bytes += head ? head->index.MemoryBytes() : 0;
  return bytes;
}

}  // namespace fathom
