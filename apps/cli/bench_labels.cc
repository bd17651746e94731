// SPDX-License-Identifier: MIT
#include "bench_labels.h"

#include <algorithm>
#include <numeric>

namespace fathom::cli {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<std::int32_t> LargestVariance(std::span<const double> variance, std::int32_t n) {
  std::vector<std::int32_t> channels(variance.size());
  std::iota(channels.begin(), channels.end(), 0);
  std::ranges::stable_sort(channels, std::greater{},
                           [&](std::int32_t c) { return variance[Size(c)]; });
  channels.resize(Size(n));
  std::ranges::sort(channels);
  return channels;
}

}  // namespace

std::vector<LabelScan> LabelScans(std::int32_t head_dim) {
  const std::int32_t half = std::min(32, head_dim);
  const std::int32_t quarter = std::min(16, head_dim);
  const std::string all = std::to_string(head_dim);
  return {
      {"nibbles, 32 channels", {LabelLayout::kTokens, kPlanes, half}, half},
      {"nibbles, 16 channels", {LabelLayout::kTokens, kPlanes, quarter}, quarter},
      {"nibbles, 32 of " + all + " channels", {LabelLayout::kChannels, kPlanes, head_dim}, half},
      {"thumbnail, 2 planes", {LabelLayout::kTokens, 2, head_dim}, head_dim},
  };
}

LabelCopies::LabelCopies(const LabelScan& scan, const RowStore& rows, std::int64_t n_tokens,
                         std::span<const double> variance, std::int64_t n_layers,
                         const Backend& backend)
    : scan_(scan), head_dim_(rows.geometry().head_dim) {
  const std::int32_t n_kv_heads = rows.geometry().n_kv_heads;
  const Basis basis = RawBasis(head_dim_, {});
  for (std::int32_t h = 0; h < n_kv_heads; ++h) {
    channels_.push_back(LargestVariance(
        variance.subspan(Size(h) * Size(head_dim_), Size(head_dim_)), scan.shape.n_channels));
  }
  // Reads of SparQ are scattered: every third or fourth channel of the table.
  for (std::int32_t c = 0; c < scan.read_channels; ++c) {
    read_.push_back(
        static_cast<std::int32_t>(std::int64_t{c} * scan.shape.n_channels / scan.read_channels));
  }
  tables_.resize(Size(n_layers));
  for (auto& layer : tables_) {
    for (std::int32_t h = 0; h < n_kv_heads; ++h) layer.emplace_back(scan.shape);
  }
  const std::int64_t n_tables = n_layers * n_kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(backend.n_threads())
  for (std::int64_t i = 0; i < n_tables; ++i) {
    const std::int64_t h = i % n_kv_heads;
    tables_[Size(i / n_kv_heads)][Size(h)].AppendRows(rows.rows(0, static_cast<std::int32_t>(h)),
                                                      basis, channels_[Size(h)],
                                                      n_tokens / kBlockTokens, backend);
  }
}

void LabelCopies::Scan(const Backend& backend, std::int64_t layer, std::int32_t group,
                       const float* q, float* scores) const {
  const std::vector<LabelTable>& tables = tables_[Size(layer)];
  const std::int64_t n_tokens = tables.front().n_blocks() * kBlockTokens;
  const std::size_t read = Size(scan_.read_channels);
  std::vector<float> picked(tables.size() * Size(group) * read);
  std::vector<LabelScanHead> heads(tables.size());
  float* to = picked.data();
  for (std::size_t h = 0; h < tables.size(); ++h) {
    const std::size_t first = h * Size(group);
    heads[h] = {tables[h].segments(),
                scan_.read_channels,
                scan_.shape.layout == LabelLayout::kChannels ? read_.data() : nullptr,
                to,
                scores + first * Size(n_tokens),
                n_tokens};
    for (std::size_t g = first; g < first + Size(group); ++g) {
      for (const std::int32_t c : read_)
        *to++ = q[g * Size(head_dim_) + Size(channels_[h][Size(c)])];
    }
  }
  backend.ScanLabels(
      {scan_.shape.layout, scan_.shape.planes, group, LabelTable::kSegmentBlocks, heads});
}

}  // namespace fathom::cli
