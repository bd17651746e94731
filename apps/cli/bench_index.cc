// SPDX-License-Identifier: MIT
#include "bench_index.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>

#include "fathom/plan.h"

namespace fathom::cli {

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
    for (const HeadIndex& head : heads_) layer.push_back(Copy(head.segments()));
  }
}

// Segments made at once are one piece of memory that begins with the first one's planes.
std::vector<SegmentView> IndexCopies::Copy(std::span<const SegmentView> segments) {
  const auto* from = reinterpret_cast<const std::byte*>(segments.front().planes);
  const auto bytes = static_cast<std::size_t>(shape().SegmentBytes()) * segments.size();
  std::byte* to = memory_.emplace_back(bytes).data();
  std::memcpy(to, from, bytes);
  const auto moved = [&](const auto* p) {
    return reinterpret_cast<decltype(p)>(to + (reinterpret_cast<const std::byte*>(p) - from));
  };
  std::vector<SegmentView> copies(segments.begin(), segments.end());
  for (SegmentView& copy : copies) {
    assert(std::as_bytes(std::span(copy.side, 1)).data() < from + bytes);
    copy.planes = moved(copy.planes);
    copy.side = moved(copy.side);
  }
  return copies;
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
               std::int32_t group, const LayerRead& read, const ScanOutput& out) {
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
    heads[h].stride = n_tokens;
    if (out.scores != nullptr) {
      heads[h].scores = out.scores + first * static_cast<std::size_t>(n_tokens);
      continue;
    }
    if (out.sums == nullptr) continue;
    heads[h].sums = out.sums + first * static_cast<std::size_t>(n_tokens);
    heads[h].base_stride = n_tokens / kBlockTokens;
    heads[h].base = out.base + first * static_cast<std::size_t>(heads[h].base_stride);
  }
  backend.Scan({shape.codec, shape.head_dim, group, shape.segment_blocks, shape.mean_bits, heads});
}

void Selected::Resize(const HeadGeometry& heads, std::int64_t n_tokens, std::int64_t keep) {
  const std::int64_t most =
      kAlwaysKept + std::min(heads.group() * keep, n_tokens - std::int64_t{kAlwaysKept});
  n_attended.resize(static_cast<std::size_t>(heads.n_kv_heads));
  tokens.resize(n_attended.size() * static_cast<std::size_t>(most));
  mask.resize(tokens.size());
}

void RankLayer(const Backend& backend, const IndexCopies& index, std::int64_t layer,
               std::int32_t group, std::int64_t keep, const LayerRead& read, Selected* out) {
  const IndexShape& shape = index.shape();
  const std::int64_t n_tokens = index.head(0).n_tokens();
  const auto n_kv_heads = static_cast<std::int32_t>(index.n_kv_heads());
  out->Resize({n_kv_heads * group, n_kv_heads, shape.head_dim}, n_tokens, keep);
  std::vector<RankHead> heads(index.n_kv_heads());
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].segments = index.segments(layer, h);
    heads[h].tables = read.tables[h];
    heads[h].tokens = out->tokens.data() + h * out->capacity();
    heads[h].mask = out->mask.data() + h * out->capacity();
    heads[h].n_attended = &out->n_attended[h];
  }
  backend.Rank({shape.head_dim, group, shape.segment_blocks, shape.mean_bits, kSinks,
                n_tokens - kWindow, n_tokens, keep, 0, heads});
}

}  // namespace fathom::cli
