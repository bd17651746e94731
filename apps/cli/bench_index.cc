// SPDX-License-Identifier: MIT
#include "bench_index.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "fathom/plan.h"

namespace fathom::cli {
namespace {

constexpr std::size_t kLine = 64;  // bytes; segments start at one

std::size_t PlaneBytes(const IndexShape& shape) {
  return static_cast<std::size_t>(shape.head_dim) * kPlanes *
         static_cast<std::size_t>(shape.segment_blocks) * sizeof(std::uint64_t);
}

}  // namespace

IndexCopies::IndexCopies(const IndexShape& shape, const RowStore& rows, std::int64_t n_tokens,
                         std::span<const Basis> bases, std::int64_t n_layers,
                         const Backend& backend) {
  heads_.reserve(bases.size());
  for (const Basis& basis : bases) {
    const auto kv_head = static_cast<std::int32_t>(heads_.size());
    heads_.emplace_back(shape, basis);
    heads_.back().Build(rows.rows(0, kv_head), n_tokens / kBlockTokens, backend);
  }
  views_.resize(static_cast<std::size_t>(n_layers));
  for (auto& layer : views_) {
    for (const HeadIndex& head : heads_) {
      auto& views = layer.emplace_back();
      views.reserve(head.segments().size());
      for (const SegmentView& segment : head.segments()) views.push_back(Copy(segment));
    }
  }
}

SegmentView IndexCopies::Copy(const SegmentView& segment) {
  const auto bytes = static_cast<std::size_t>(shape().SegmentBytes());
  const std::size_t planes = PlaneBytes(shape());
  const std::size_t side = (planes + kLine - 1) / kLine * kLine;
  const std::size_t all = (side + bytes - planes + kLine - 1) / kLine * kLine;
  memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(kLine, all)));
  std::byte* data = memory_.back().get();
  if (data == nullptr) throw std::bad_alloc();
  std::memcpy(data, segment.planes, planes);
  std::memcpy(data + side, segment.side, bytes - planes);
  SegmentView copy = segment;
  copy.planes = reinterpret_cast<const std::uint64_t*>(data);
  copy.side = reinterpret_cast<const std::uint8_t*>(data + side);
  return copy;
}

LayerRead PlanMeanRead(const IndexCopies& index, std::int32_t group, const float* q, double bits) {
  const IndexShape& shape = index.shape();
  LayerRead read;
  read.q = q;
  read.tables.resize(index.n_kv_heads());
  const auto n = static_cast<double>(index.n_kv_heads());
  for (std::size_t h = 0; h < index.n_kv_heads(); ++h) {
    const HeadIndex& head = index.head(h);
    const float* head_q = q + h * static_cast<std::size_t>(group * shape.head_dim);
    const DistortionHull hull(head.Distortions(), shape.mean_bits);
    const MeasuredPlan plan = PlanMeasured(head_q, group, hull, bits);
    for (const MeanCodec& codec : head.codecs()) {
      BuildScanTable({shape.head_dim, group, shape.mean_bits, head_q, plan.level.data(),
                      codec.mean_step.data(), codec.weight.data()},
                     &read.tables[h].emplace_back());
    }
    read.read_bits += plan.read_bits / n;
    for (const std::uint8_t level : plan.level) read.planes += level > 1 ? (level - 1) / n : 0;
  }
  return read;
}

LayerRead PlanPaperRead(const IndexCopies& index, std::int32_t group, const float* q,
                        std::span<const double> variance, double budget) {
  const auto dim = static_cast<std::size_t>(index.shape().head_dim);
  LayerRead read;
  read.q = q;
  const auto n = static_cast<double>(index.n_kv_heads());
  for (std::size_t h = 0; h < index.n_kv_heads(); ++h) {
    const float* head_q = q + h * static_cast<std::size_t>(group) * dim;
    read.depth.push_back(PlanPaper(head_q, group, variance.subspan(h * dim, dim), budget).depth);
    const auto& depth = read.depth.back();
    read.read_bits += PaperReadBits(depth) / n;
    read.planes += std::accumulate(depth.begin(), depth.end(), 0.0) / n;
  }
  return read;
}

void ScanLayer(const Backend& backend, const IndexCopies& index, std::int64_t layer,
               std::int32_t group, const LayerRead& read, float* scores) {
  const IndexShape& shape = index.shape();
  const std::int64_t n_tokens = index.head(0).n_tokens();
  std::vector<ScanHead> heads(index.n_kv_heads());
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const std::size_t first = h * static_cast<std::size_t>(group);
    heads[h].segments = index.segments(layer, h);
    if (shape.codec == Codec::kMean) {
      heads[h].tables = read.tables[h];
    } else {
      heads[h].q = read.q + first * static_cast<std::size_t>(shape.head_dim);
      heads[h].depth = read.depth[h].data();
    }
    heads[h].scores = scores + first * static_cast<std::size_t>(n_tokens);
    heads[h].stride = n_tokens;
  }
  backend.Scan({shape.codec, shape.head_dim, group, shape.segment_blocks, shape.mean_bits, heads});
}

}  // namespace fathom::cli
