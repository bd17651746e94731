// SPDX-License-Identifier: MIT
// Scans of labels, and of whole keys.
#include <utility>

#include "backend/cuda/host_copy.h"
#include "device/scans.h"
#include "store/layout.h"

namespace fathom::cuda {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

DeviceBuffer<std::int32_t> Filled(std::int32_t n, std::int32_t value) {
  const std::vector<std::int32_t> host(Size(n), value);
  return DeviceBuffer<std::int32_t>(std::span<const std::int32_t>(host));
}

}  // namespace

double CountBlocks(const IndexSizes& sizes, cudaStream_t stream) {
  double blocks = 0;
  for (const Lengths& l : ToHost(sizes.lengths, Size(sizes.batch), stream)) blocks += l.n_blocks;
  return blocks * sizes.heads.n_kv_heads;
}

LabelIndex::LabelIndex(const IndexSizes& sizes, const Shape& shape, bool on_host)
    : sizes_(sizes),
      shape_(shape),
      on_host_(on_host),
      chosen_(Size(std::int64_t{sizes.n_heads()} * shape.n_channels)),
      channels_(Size(std::int64_t{sizes.n_heads()} * shape.n_channels)),
      n_rows_(Filled(sizes.n_heads(), shape.n_channels)),
      one_row_(Filled(sizes.n_heads(), 1)),
      q_(Size(std::int64_t{sizes.n_lists()} * shape.n_channels)) {
  if (!on_host) return;
  staged_codes_.Reserve(Size(sizes.n_heads() * code_bytes()));
  staged_scales_.Reserve(Size(std::int64_t{sizes.n_heads()} * shape.n_channels * sizes.max_blocks));
}

std::int64_t LabelIndex::code_bytes() const {
  const std::int32_t width =
      shape_.layout == LabelLayout::kTokens ? shape_.table_width : shape_.n_channels;
  return sizes_.max_blocks * width *
         static_cast<std::int64_t>(layout::LabelBlockBytes(shape_.planes));
}

void LabelIndex::Plan(std::int32_t layer, const float* q, cudaStream_t stream) {
  const ChannelPlan plan{sizes_.n_heads(),
                         sizes_.heads.n_kv_heads,
                         sizes_.heads.group(),
                         sizes_.heads.head_dim,
                         shape_.n_channels,
                         q,
                         sizes_.lengths,
                         chosen_.data(),
                         channels_.data(),
                         n_rows_.data(),
                         q_.data(),
                         layers_[Size(layer)].channels,
                         layers_[Size(layer)].map};
  shape_.layout == LabelLayout::kChannels ? PlanChannels(plan, stream) : TakeChannels(plan, stream);
}

void LabelIndex::Fetch(std::int32_t layer, cudaStream_t stream) {
  if (!on_host_) return;
  const Layer& l = layers_[Size(layer)];
  const auto block = static_cast<std::int32_t>(layout::LabelBlockBytes(shape_.planes));
  const bool by_channel = shape_.layout == LabelLayout::kChannels;
  // Codes by token are one run, those by channel one for each.
  GatherRuns codes =
      by_channel ? RunsOf(sizes_, l.codes, block, staged_codes_.data(), shape_.n_channels)
                 : RunsOf(sizes_, l.codes, block * shape_.table_width, staged_codes_.data(), 1);
  codes.n_rows = by_channel ? n_rows_.data() : one_row_.data();
  GatherRuns scales =
      RunsOf(sizes_, l.scales, sizeof(Half), staged_scales_.data(), shape_.n_channels);
  scales.n_rows = n_rows_.data();
  if (by_channel) {
    codes.rows = scales.rows = chosen_.data();
    codes.rows_stride = scales.rows_stride = shape_.n_channels;
  }
  Gather(codes, stream);
  Gather(scales, stream);
}

void LabelIndex::Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& /*rest*/,
                      cudaStream_t stream) {
  const bool chosen = shape_.layout == LabelLayout::kChannels && !on_host_;
  LabelScan scan{};
  scan.layout = shape_.layout;
  scan.planes = shape_.planes;
  scan.group = sizes_.heads.group();
  scan.n_kv_heads = sizes_.heads.n_kv_heads;
  scan.pieces = layers_[Size(layer)].pieces;
  scan.n_pieces = sizes_.n_heads();
  scan.max_tiles = sizes_.max_tiles();
  scan.n_channels = shape_.n_channels;
  scan.channels = chosen ? channels_.data() : nullptr;
  scan.q = q_.data();
  scan.lengths = sizes_.lengths;
  scan.sink = sink;
  ScanLabels(scan, stream);
}

ScanCost LabelIndex::Cost(cudaStream_t stream) const {
  const double blocks = CountBlocks(sizes_, stream);
  const double codes = layout::LabelBlockBytes(shape_.planes);
  ScanCost cost;
  cost.read_bits = shape_.n_channels * (shape_.planes + 16.0 / kBlockTokens);
  const std::int32_t width =
      shape_.layout == LabelLayout::kTokens ? shape_.table_width : shape_.n_channels;
  cost.scan_bytes = blocks * (width * codes + shape_.n_channels * 2.0);
  cost.link_bytes = on_host_ ? cost.scan_bytes : 0;
  return cost;
}

KeyIndex::KeyIndex(const IndexSizes& sizes, std::int32_t unit_tokens, std::int64_t key_stride,
                   const std::int32_t* n_keys, std::int32_t max_keys, bool fetch)
    : sizes_(sizes),
      unit_(unit_tokens),
      key_stride_(key_stride),
      n_keys_(n_keys),
      max_keys_(max_keys),
      one_row_(Filled(sizes.n_heads(), 1)) {
  if (fetch) {
    staged_.Reserve(Size(std::int64_t{sizes.n_heads()} * sizes.max_blocks * kBlockTokens *
                         sizes.heads.head_dim));
  }
}

void KeyIndex::Plan(std::int32_t /*layer*/, const float* q, cudaStream_t /*stream*/) { q_ = q; }

void KeyIndex::Fetch(std::int32_t layer, cudaStream_t stream) {
  const HostSegments& table = layers_[Size(layer)].table;
  if (table.segments == nullptr) return;
  const auto block = static_cast<std::int32_t>(kBlockTokens * sizeof(Half)) * sizes_.heads.head_dim;
  GatherRuns keys = RunsOf(sizes_, table, block, staged_.data(), 1);
  keys.n_rows = one_row_.data();
  Gather(keys, stream);
}

void KeyIndex::Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& /*rest*/,
                    cudaStream_t stream) {
  RowScores scores{};
  scores.head_dim = sizes_.heads.head_dim;
  scores.group = sizes_.heads.group();
  scores.n_kv_heads = sizes_.heads.n_kv_heads;
  scores.n_heads = sizes_.n_heads();
  scores.rows = layers_[Size(layer)].keys;
  scores.key_stride = key_stride_;
  scores.n_keys = n_keys_;
  scores.max_keys = max_keys_;
  scores.q = q_;
  scores.lengths = sizes_.lengths;
  scores.sink = sink;
  ScoreRows(scores, stream);
}

ScanCost KeyIndex::Cost(cudaStream_t stream) const {
  ScanCost cost;
  cost.read_bits = 16.0 * sizes_.heads.head_dim / unit_;
  cost.scan_bytes =
      CountBlocks(sizes_, stream) * kBlockTokens * sizes_.heads.head_dim * sizeof(Half);
  cost.link_bytes = link_bytes_;
  return cost;
}

}  // namespace fathom::cuda
