// SPDX-License-Identifier: MIT
#include "method/channel_method.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/parallel.h"
#include "method/head_stats.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

class FixedChannels final : public ChannelMethod {
 public:
  FixedChannels(const MethodContext& context, const ChannelConfig& config, ChannelsFn channels,
                const std::string& spec)
      : ChannelMethod(context, config, spec),
        choose_(std::move(channels)),
        all_(AllChannels(config.stored.channels)) {}

 protected:
  std::vector<std::int32_t> TableChannels(const HeadStats& stats) const override {
    return choose_(stats);
  }
  void PlanRead(std::int32_t /*kv_head*/, const Head& head, ChannelRead* read,
                float* noise) override {
    read->channels = all_;
    const std::int64_t dim = geometry().head_dim;
    for (std::int64_t g = 0; g < geometry().group(); ++g) {
      noise[g] = Noise(head.stats, read->mapped.data() + g * dim, head.channels);
    }
  }

 private:
  const ChannelsFn choose_;
  const std::vector<std::int32_t> all_;
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

std::vector<std::int32_t> LargestChannels(const HeadStats& stats, std::int32_t n) {
  std::vector<double> weight = stats.abs_key;
  if (std::ranges::any_of(stats.abs_query, [](double q) { return q != 0.0; })) {
    for (std::size_t j = 0; j < weight.size(); ++j) weight[j] *= stats.abs_query[j];
  }
  std::vector<std::int32_t> channels;
  TopChannels(weight, n, &channels);
  return channels;
}

std::vector<std::int32_t> AllChannels(std::int64_t n) {
  std::vector<std::int32_t> channels(Size(n));
  std::iota(channels.begin(), channels.end(), 0);
  return channels;
}

std::int64_t StoredPartBytes(StoredPart part, std::int64_t n_blocks) {
  constexpr std::int64_t kSegment = LabelTable::kSegmentBlocks;
  return (n_blocks + kSegment - 1) / kSegment * kSegment * part.channels *
         (std::int64_t{part.planes} * 8 + 2);
}

std::int64_t LabelIndexBytes(const SparseConfig& config, StoredPart part, HeadGeometry geometry,
                             std::int64_t n_tokens) {
  return SparseIndexBytes(config, geometry, n_tokens,
                          StoredPartBytes(part, n_tokens / kBlockTokens));
}

double LabelReadBits(StoredPart part) {
  return part.channels * (part.planes + 16.0 / kBlockTokens);
}

ChannelMethod::ChannelMethod(const MethodContext& context, const ChannelConfig& config,
                             const std::string& spec)
    : TableMethod(context, config.sparse, spec),
      basis_(config.basis),
      abs_stats_(config.abs_stats),
      layout_(config.layout),
      stored_(config.stored),
      heads_(n_slots()),
      reads_(Size(geometry().n_kv_heads)),
      scan_(reads_.size()) {}

float ChannelMethod::Noise(const HeadStats& stats, const float* q,
                           std::span<const std::int32_t> channels) const {
  const auto part = [&](std::size_t j) {
    return static_cast<double>(q[j]) * q[j] * stats.variance[j];
  };
  double noise = 0;
  for (std::size_t j = 0; j < stats.variance.size(); ++j) noise += part(j);
  for (const std::int32_t c : channels) {
    noise -= part(Size(c)) * (1 - std::ldexp(1.0, -2 * stored_.planes));
  }
  return static_cast<float>(std::max(noise, 0.0));
}

void ChannelMethod::StartHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) {
  Head& head = heads_[Slot(layer, kv_head)];
  head.stats = MeasureHead(context_, layer, kv_head, n_tokens, basis_, abs_stats_);
  head.channels = TableChannels(head.stats);
  head.table = LabelTable({layout_, stored_.planes, stored_.channels});
}

void ChannelMethod::ExtendHead(std::int32_t layer, std::int32_t kv_head, std::int64_t first,
                               std::int64_t n_blocks) {
  Head& head = heads_[Slot(layer, kv_head)];
  head.table.Truncate(first);
  head.table.AppendRows(context_.rows->rows(layer, kv_head), head.stats.basis, head.channels,
                        n_blocks, *context_.backend);
}

void ChannelMethod::CutHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_blocks) {
  heads_[Slot(layer, kv_head)].table.Truncate(n_blocks);
}

std::int64_t ChannelMethod::StoredBytes(std::int64_t n_blocks) const {
  return StoredPartBytes(stored_, n_blocks);
}

double ChannelMethod::ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/,
                                 std::int64_t /*n_index*/, const float* q, const LayerScores& out) {
  const std::int64_t group = geometry().group();
  const std::int64_t dim = geometry().head_dim;
  ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t h) {
    const auto kv_head = static_cast<std::int32_t>(h);
    const Head& head = heads_[Slot(layer, kv_head)];
    const Basis& basis = head.stats.basis;
    ChannelRead& read = reads_[Size(h)];
    const float* head_q = q + h * group * dim;
    read.mapped.resize(Size(group * dim));
    basis.MapQueries(head_q, geometry().group(), read.mapped.data());
    PlanRead(kv_head, head, &read, out.noise + h * group);
    read.q.resize(Size(group) * read.channels.size());
    float* gathered = read.q.data();
    for (std::int64_t g = 0; g < group; ++g, head_q += dim) {
      double offset = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        offset += static_cast<double>(head_q[d]) * basis.center[Size(d)];
      }
      out.offset[h * group + g] = static_cast<float>(offset);
      for (const std::int32_t c : read.channels) {
        *gathered++ = read.mapped[Size(g * dim + head.channels[Size(c)])];
      }
    }
    scan_[Size(h)] = {head.table.segments(),
                      static_cast<std::int32_t>(read.channels.size()),
                      layout_ == LabelLayout::kChannels ? read.channels.data() : nullptr,
                      read.q.data(),
                      out.scores + h * group * out.stride,
                      out.stride};
  });
  context_.backend->ScanLabels(
      {layout_, stored_.planes, geometry().group(), LabelTable::kSegmentBlocks, scan_});
  double bits = 0;
  for (const ChannelRead& read : reads_) {
    bits += LabelReadBits({static_cast<std::int32_t>(read.channels.size()), stored_.planes});
  }
  return bits;
}

std::unique_ptr<Method> MakeFixedChannels(const MethodContext& context, const ChannelConfig& config,
                                          ChannelsFn channels, const std::string& spec) {
  return std::make_unique<FixedChannels>(context, config, std::move(channels), spec);
}

}  // namespace fathom
