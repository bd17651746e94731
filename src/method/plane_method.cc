// SPDX-License-Identifier: MIT
#include "method/plane_method.h"

#include <utility>

#include "base/parallel.h"

namespace fathom {

BasisRule ReadBasis(OptionReader& options, std::string_view fallback, bool centre_raw) {
  const std::string basis = options.Choice("basis", fallback, {"raw", "klt", "balanced"});
  if (basis == "klt") return BasisRule::kKlt;
  if (basis == "balanced") return BasisRule::kBalanced;
  return centre_raw ? BasisRule::kCentred : BasisRule::kRaw;
}

PlaneMethod::PlaneMethod(const MethodContext& context, SparseConfig config, LayerIndexOptions index,
                         std::string spec)
    : SparseMethod(context, config, std::move(spec)),
      index_(context, index),
      reads_(static_cast<std::size_t>(geometry().n_kv_heads)),
      scan_(reads_.size()) {}

double PlaneMethod::PlanHeads(std::int32_t layer, const float* q, const LayerScores& out) {
  const std::int32_t group = geometry().group();
  const std::int32_t dim = geometry().head_dim;
  ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t h) {
    const auto kv_head = static_cast<std::int32_t>(h);
    const Basis& basis = index_.head(layer, kv_head).index.basis();
    HeadRead& read = reads_[static_cast<std::size_t>(h)];
    const float* head_q = q + h * group * dim;
    read.q.resize(static_cast<std::size_t>(group * dim));
    read.noise.assign(static_cast<std::size_t>(group), 0.0F);
    basis.MapQueries(head_q, group, read.q.data());
    PlanHead(layer, kv_head, &read);
    for (std::int32_t g = 0; g < group; ++g) {
      double offset = 0;
      for (std::int32_t d = 0; d < dim; ++d) {
        offset +=
            static_cast<double>(head_q[g * dim + d]) * basis.center[static_cast<std::size_t>(d)];
      }
      out.offset[h * group + g] = static_cast<float>(offset);
      out.noise[h * group + g] = read.noise[static_cast<std::size_t>(g)];
    }
  });
  double bits = 0;
  for (const HeadRead& read : reads_) bits += read.read_bits;
  return bits;
}

double PlaneMethod::ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/,
                               std::int64_t /*n_index*/, const float* q, const LayerScores& out) {
  const std::int32_t group = geometry().group();
  const double bits = PlanHeads(layer, q, out);
  for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) {
    const HeadRead& read = reads_[static_cast<std::size_t>(h)];
    scan_[static_cast<std::size_t>(h)] = {
        index_.head(layer, h).index.segments(), read.tables, read.q.data(), read.depth.data(),
        out.scores + h * group * out.stride,    out.stride};
  }
  const IndexShape& shape = index_.shape();
  context_.backend->Scan(
      {shape.codec, geometry().head_dim, group, shape.segment_blocks, shape.mean_bits, scan_});
  return bits;
}

double PlaneMethod::PlanRank(std::int32_t layer, const float* q, const LayerScores& out,
                             RankArgs* args, std::span<RankHead> heads) {
  const double bits = PlanHeads(layer, q, out);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].segments = index_.head(layer, static_cast<std::int32_t>(h)).index.segments();
    heads[h].tables = reads_[h].tables;
  }
  args->segment_blocks = index_.shape().segment_blocks;
  args->mean_bits = index_.shape().mean_bits;
  return bits;
}

}  // namespace fathom
