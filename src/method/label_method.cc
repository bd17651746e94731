// SPDX-License-Identifier: MIT
#include "method/label_method.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/half.h"
#include "base/parallel.h"
#include "method/head_stats.h"
#include "store/codec_fit.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

constexpr std::int32_t kVector = 16;  // Backend::Score takes multiples of it

// Per token and label vector.
std::int64_t VectorBytes(const LabelConfig& config, std::int64_t n_channels) {
  if (!config.stored_beside_key) return 0;
  return config.code == LabelCode::kHalf ? 2 * n_channels : (n_channels + 1) / 2 + 2 + 2;
}

double VectorBits(const LabelConfig& config, std::int64_t n_channels) {
  return static_cast<double>(config.code == LabelCode::kHalf ? 16 * n_channels
                                                             : 4 * n_channels + 16 + 16);
}

class LabelMethod final : public TableMethod {
 public:
  LabelMethod(const MethodContext& context, LabelConfig config, const std::string& spec)
      : TableMethod(context, config.sparse, spec),
        labels_(std::move(config)),
        n_channels_(std::min(labels_.n_channels, geometry().head_dim)),
        width_((n_channels_ + kVector - 1) / kVector * kVector),
        n_sets_(labels_.per_query_head ? geometry().group() : 1),
        heads_(n_slots()),
        mapped_(Size(geometry().n_heads) * Size(geometry().head_dim)),
        q_(Size(geometry().n_heads) * Size(width_)),
        score_(Size(geometry().n_kv_heads) * Size(n_sets_)) {}

 protected:
  void StartHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) override {
    Head& head = heads_[Slot(layer, kv_head)];
    head.stats = MeasureHead(context_, layer, kv_head, n_tokens, labels_.basis, labels_.abs_stats);
    head.channels = labels_.channels({context_, layer, kv_head, n_tokens, head.stats});
    head.table.assign(Size(n_sets_), {});
  }

  void ExtendHead(std::int32_t layer, std::int32_t kv_head, std::int64_t first,
                  std::int64_t n_blocks) override {
    Head& head = heads_[Slot(layer, kv_head)];
    for (auto& table : head.table) table.resize(Size(n_blocks * kBlockTokens * width_));
    BlockReader reader(context_.rows->rows(layer, kv_head), head.stats.basis);
    std::vector<float> label(Size(width_));
    for (std::int64_t b = first; b < n_blocks; ++b) {
      const float* x = reader.Load(b);
      for (std::int64_t i = b * kBlockTokens; i < (b + 1) * kBlockTokens; ++i) {
        for (std::size_t set = 0; set < head.table.size(); ++set) {
          Label(x, head.channels[set], label.data());
          ConvertFloatToHalf(label.data(), width_, head.table[set].data() + i * width_);
        }
        x += geometry().head_dim;
      }
    }
  }

  std::int64_t StoredBytes(std::int64_t n_blocks) const override {
    return n_blocks * kBlockTokens * n_sets_ * VectorBytes(labels_, n_channels_);
  }

  double ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/, std::int64_t n_index,
                    const float* q, const LayerScores& out) override {
    ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(),
                [&](std::int64_t h) { LabelQueries(layer, static_cast<std::int32_t>(h), q, out); });
    const std::int32_t group = geometry().group() / n_sets_;  // heads that share a table
    context_.backend->Score({width_, group, n_index, score_, width_});
    return VectorBits(labels_, n_channels_) * n_sets_ * geometry().n_kv_heads;
  }

 private:
  struct Head {
    HeadStats stats;
    std::vector<std::vector<std::int32_t>> channels;  // [n_sets][n_channels]
    std::vector<std::vector<Half>> table;             // [n_sets][n][width]
  };

  // x: [D]; label: [width], zeros behind the channels.
  void Label(const float* x, const std::vector<std::int32_t>& channels, float* label) const {
    std::fill_n(label, width_, 0.0F);
    for (std::size_t c = 0; c < channels.size(); ++c) label[c] = x[channels[c]];
    if (labels_.code == LabelCode::kFourBit) QuantizeLabels(label, channels.size());
  }

  void LabelQueries(std::int32_t layer, std::int32_t kv_head, const float* q,
                    const LayerScores& out) {
    const Head& head = heads_[Slot(layer, kv_head)];
    const std::int64_t dim = geometry().head_dim;
    const std::int64_t group = geometry().group();
    const std::int64_t first = kv_head * group;
    head.stats.basis.MapQueries(q + first * dim, group, mapped_.data() + first * dim);
    for (std::int64_t g = 0; g < group; ++g) {
      const std::size_t set = n_sets_ == 1 ? 0 : Size(g);
      const float* x = mapped_.data() + (first + g) * dim;
      Label(x, head.channels[set], q_.data() + (first + g) * width_);
      double offset = 0, noise = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        offset += static_cast<double>(q[(first + g) * dim + d]) * head.stats.basis.center[Size(d)];
        noise += static_cast<double>(x[d]) * x[d] * head.stats.variance[Size(d)];
      }
      for (const std::int32_t c : head.channels[set]) {  // what is read is taken as exact
        noise -= static_cast<double>(x[c]) * x[c] * head.stats.variance[Size(c)];
      }
      out.offset[first + g] = static_cast<float>(offset);
      out.noise[first + g] = static_cast<float>(std::max(noise, 0.0));
    }
    const std::int64_t sharing = group / n_sets_;
    for (std::int32_t set = 0; set < n_sets_; ++set) {
      const std::int64_t at = first + set * sharing;
      score_[Size(kv_head * n_sets_ + set)] = {head.table[Size(set)].data(),
                                               q_.data() + at * width_,
                                               out.scores + at * out.stride, out.stride};
    }
  }

  const LabelConfig labels_;
  const std::int32_t n_channels_;
  const std::int32_t width_;   // n_channels rounded up for the kernels
  const std::int32_t n_sets_;  // label tables of one KV head
  std::vector<Head> heads_;    // [n_layers][n_kv_heads]
  std::vector<float> mapped_;  // [n_heads][D] queries in the basis
  std::vector<float> q_;       // [n_heads][width] query labels
  std::vector<ScoreHead> score_;
};

}  // namespace

void QuantizeLabels(float* x, std::size_t n) {
  constexpr float kSteps = 15;
  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  for (std::size_t i = 0; i < n; ++i) {
    if (x[i] < low) low = x[i];
    if (x[i] > high) high = x[i];
  }
  float scale = HalfToFloat(FloatToHalf((high - low) / kSteps));
  if (!(scale > 0)) scale = 1;
  const float minimum = HalfToFloat(FloatToHalf(low));
  for (std::size_t i = 0; i < n; ++i) {
    float code = std::nearbyint((x[i] - minimum) / scale);
    code = code > 0 ? std::min(code, kSteps) : 0;
    x[i] = code * scale + minimum;
  }
}

std::unique_ptr<Method> MakeLabelMethod(const MethodContext& context, LabelConfig config,
                                        const std::string& spec) {
  return std::make_unique<LabelMethod>(context, std::move(config), spec);
}

std::int64_t LabelBytes(const LabelConfig& config, HeadGeometry geometry, std::int64_t n_tokens) {
  const std::int64_t n_index = n_tokens / kBlockTokens * kBlockTokens;
  const std::int64_t sets = config.per_query_head ? geometry.group() : 1;
  const std::int64_t channels = std::min(config.n_channels, geometry.head_dim);
  return SparseIndexBytes(config.sparse, geometry, n_tokens,
                          n_index * sets * VectorBytes(config, channels));
}

}  // namespace fathom
