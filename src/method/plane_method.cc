// SPDX-License-Identifier: MIT
#include "method/plane_method.h"

#include <utility>

#include "base/parallel.h"
#include "plan/sums.h"

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

void PlaneMethod::PlanHead(std::int64_t kv_head) {
  const std::int32_t group = geometry().group();
  const std::int32_t dim = geometry().head_dim;
  const auto head = static_cast<std::int32_t>(kv_head);
  const Basis& basis = index_.head(query_.layer, head).index.basis();
  HeadRead& read = reads_[static_cast<std::size_t>(kv_head)];
  const float* q = query_.q + kv_head * group * dim;
  read.q.resize(static_cast<std::size_t>(group * dim));
  read.noise.assign(static_cast<std::size_t>(group), 0.0F);
  basis.MapQueries(q, group, read.q.data());
  PlanRead(query_.layer, head, &read);
  for (std::int32_t g = 0; g < group; ++g) {
    const float* head_q = q + g * dim;
    query_.out.offset[kv_head * group + g] =
        static_cast<float>(SumInLanes(static_cast<std::size_t>(dim), [&](std::size_t d) {
          return static_cast<double>(head_q[d]) * basis.center[d];
        }));
    query_.out.noise[kv_head * group + g] = read.noise[static_cast<std::size_t>(g)];
  }
}

double PlaneMethod::ReadBits() const {
  double bits = 0;
  for (const HeadRead& read : reads_) bits += read.read_bits;
  return bits;
}

double PlaneMethod::ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/,
                               std::int64_t /*n_index*/, const float* q, const LayerScores& out) {
  const std::int32_t group = geometry().group();
  query_ = {layer, q, out};
  ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(),
              [this](std::int64_t h) { PlanHead(h); });
  for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) {
    const HeadRead& read = reads_[static_cast<std::size_t>(h)];
    scan_[static_cast<std::size_t>(h)] = {
        index_.head(layer, h).index.segments(), read.tables, read.q.data(), read.depth.data(),
        out.scores + h * group * out.stride,    out.stride};
  }
  const IndexShape& shape = index_.shape();
  context_.backend->Scan(
      {shape.codec, geometry().head_dim, group, shape.segment_blocks, shape.mean_bits, scan_});
  return ReadBits();
}

void PlaneMethod::PrepareRank(std::int32_t layer, const float* q, const LayerScores& out,
                              RankArgs* args, std::span<RankHead> heads) {
  query_ = {layer, q, out};
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const HeadIndex& index = index_.head(layer, static_cast<std::int32_t>(h)).index;
    reads_[h].tables.resize(index.codecs().size());
    heads[h].segments = index.segments();
    heads[h].tables = reads_[h].tables;
  }
  args->planner = this;
  args->segment_blocks = index_.shape().segment_blocks;
  args->mean_bits = index_.shape().mean_bits;
}

}  // namespace fathom
