// SPDX-License-Identifier: MIT
#include "method/channel_method.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "fathom/plan.h"

namespace fathom {
namespace {

LayerIndexOptions IndexOptions(const MethodContext& context, BasisRule basis, bool abs_stats) {
  LayerIndexOptions options;
  options.shape.codec = Codec::kPaper;
  options.shape.head_dim = context.rows->geometry().head_dim;
  options.basis = basis;
  options.abs_stats = abs_stats;
  return options;
}

class FixedPlanes final : public PlaneMethod {
 public:
  FixedPlanes(const MethodContext& context, FixedPlanesConfig config, const std::string& spec)
      : PlaneMethod(context, config.sparse, IndexOptions(context, config.basis, config.abs_stats),
                    spec),
        stored_(config.stored),
        choose_(std::move(config.depth)),
        depth_(static_cast<std::size_t>(n_layers()) *
               static_cast<std::size_t>(geometry().n_kv_heads)) {
    index().set_on_changed([this](std::int32_t layer, std::int32_t kv_head) {
      Depth(layer, kv_head) = choose_(index().head(layer, kv_head).stats);
    });
  }

 protected:
  void PlanHead(std::int32_t layer, std::int32_t kv_head, HeadRead* read) override {
    read->depth = Depth(layer, kv_head);
    read->read_bits = PaperReadBits(read->depth);
    SetNoise(index().head(layer, kv_head).stats, read);
  }

  std::int64_t IndexMemory() const override {
    // The store is linear in channels and, scales aside, in planes.
    const StoredPart all = {geometry().head_dim, kPlanes};
    return PlaneMethod::IndexMemory() / StoredPartBytes(all, 1) * StoredPartBytes(stored_, 1);
  }

 private:
  std::vector<std::uint8_t>& Depth(std::int32_t layer, std::int32_t kv_head) {
    return depth_[static_cast<std::size_t>(layer * geometry().n_kv_heads + kv_head)];
  }

  const StoredPart stored_;
  const DepthFn choose_;
  std::vector<std::vector<std::uint8_t>> depth_;  // [n_layers][n_kv_heads][D]
};

}  // namespace

void TopChannels(std::span<const double> weight, std::int32_t n,
                 std::vector<std::int32_t>* channels) {
  const auto size = static_cast<std::ptrdiff_t>(weight.size());
  const auto kept = std::min<std::ptrdiff_t>(n, size);
  channels->resize(weight.size());
  std::iota(channels->begin(), channels->end(), 0);
  const auto rank = [&](std::int32_t channel) {
    const double w = weight[static_cast<std::size_t>(channel)];
    return std::isnan(w) ? -INFINITY : w;
  };
  std::partial_sort(channels->begin(), channels->begin() + kept, channels->end(),
                    [&](std::int32_t a, std::int32_t b) {
                      return rank(a) != rank(b) ? rank(a) > rank(b) : a < b;
                    });
  channels->resize(static_cast<std::size_t>(kept));
  std::ranges::sort(*channels);
}

std::int64_t StoredPartBytes(StoredPart part, std::int64_t n_blocks) {
  IndexShape shape;
  shape.codec = Codec::kPaper;
  shape.head_dim = part.channels;
  // Per block and channel: 8 bytes a plane and an fp16 scale.
  constexpr std::int64_t kAll = kPlanes * 8 + 2;
  return shape.IndexBytes(n_blocks) / kAll * (std::int64_t{part.planes} * 8 + 2);
}

std::int64_t PlaneIndexBytes(const SparseConfig& config, StoredPart part, HeadGeometry geometry,
                             std::int64_t n_tokens) {
  return SparseIndexBytes(config, geometry, n_tokens,
                          StoredPartBytes(part, n_tokens / kBlockTokens));
}

void SetNoise(const HeadStats& stats, HeadRead* read) {
  const std::size_t dim = read->depth.size();
  for (std::size_t g = 0; g < read->noise.size(); ++g) {
    double noise = 0;
    for (std::size_t j = 0; j < dim; ++j) {
      const double q = read->q[g * dim + j];
      noise += std::ldexp(q * q * stats.variance[j], -2 * read->depth[j]);
    }
    read->noise[g] = static_cast<float>(noise);
  }
}

std::unique_ptr<Method> MakeFixedPlanes(const MethodContext& context, FixedPlanesConfig config,
                                        const std::string& spec) {
  return std::make_unique<FixedPlanes>(context, std::move(config), spec);
}

std::vector<std::uint8_t> WholeChannels(std::span<const std::int32_t> channels, std::size_t dim) {
  std::vector<std::uint8_t> depth(dim);
  for (const std::int32_t channel : channels) depth[static_cast<std::size_t>(channel)] = kPlanes;
  return depth;
}

}  // namespace fathom
