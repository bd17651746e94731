// SPDX-License-Identifier: MIT
// quest (Tang et al., arXiv 2406.10774): per page of 16 tokens the least and the largest value of
// every key channel, in fp16; a page's score is the largest q.k that a key within those bounds
// could have, sum_j max(q_j min_j, q_j max_j). 32 bytes per token and 256 read bits at D = 128.
//
// rule=common: tokens inherit their page's bound and compete as those of any method do.
// rule=author: whole pages, min(max(3, k / page), pages) of them per query head, beside the sinks,
//   window and tail that the protocol keeps. A chosen page that reaches into those leaves places to
//   the next best page, which then is attended in part; else no page is.
// Not taken over: the first two layers decode densely in the author's evaluation (dense=2 does it);
// there nothing is always kept, while the author's kernels always keep the last page.
// In a rotated basis the bounds are those of the mapped keys, rounded to nearest.
#include <algorithm>
#include <limits>
#include <utility>

#include "method/chunk_table.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

constexpr std::int32_t kMinimum = 0, kMaximum = 1;  // the vectors of an entry
constexpr std::int64_t kLeastPages = 3;             // of rule=author

struct Config {
  SparseConfig sparse;
  bool author = false;
  std::int32_t page = 16;
  BasisRule basis = BasisRule::kRaw;
};

// NaN keys are passed over: a bound of the others remains.
void Bounds(const float* x, const ChunkShape& shape, float* entry) {
  const std::int32_t dim = shape.head_dim;
  float* low = entry + kMinimum * dim;
  float* high = entry + kMaximum * dim;
  std::fill_n(low, dim, std::numeric_limits<float>::infinity());
  std::fill_n(high, dim, -std::numeric_limits<float>::infinity());
  for (std::int32_t i = 0; i < shape.chunk; ++i, x += dim) {
    for (std::int32_t j = 0; j < dim; ++j) {
      low[j] = std::min(low[j], x[j]);
      high[j] = std::max(high[j], x[j]);
    }
  }
}

class QuestMethod final : public SparseMethod {
 public:
  QuestMethod(const MethodContext& context, const Config& config, std::string spec)
      : SparseMethod(context, config.sparse, std::move(spec)),
        author_(config.author),
        table_(context, {config.page, 2, context.rows->geometry().head_dim}, config.basis, Bounds) {
  }

 protected:
  double ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/, std::int64_t n_index,
                    const float* q, const LayerScores& out) override {
    const auto n_heads = static_cast<std::size_t>(geometry().n_heads);
    const std::size_t n = n_heads * static_cast<std::size_t>(n_index / table_.shape().chunk);
    mapped_.resize(n_heads * static_cast<std::size_t>(geometry().head_dim));
    part_.resize(mapped_.size());
    low_.resize(n);
    high_.resize(n);
    table_.MapQueries(layer, q, mapped_.data(), out.offset);
    // A negative q_j has its largest product with the minimum, a positive one with the maximum.
    std::ranges::transform(mapped_, part_.begin(), [](float x) { return std::min(x, 0.0F); });
    table_.Score(layer, kMinimum, n_index, part_.data(), low_.data());
    std::ranges::transform(mapped_, part_.begin(), [](float x) { return std::max(x, 0.0F); });
    table_.Score(layer, kMaximum, n_index, part_.data(), high_.data());
    for (std::size_t i = 0; i < n; ++i) high_[i] += low_[i];
    table_.Spread(high_.data(), n_index, out.scores, out.stride);
    return table_.shape().ReadBits() * geometry().n_kv_heads;
  }

  std::int64_t ExtraKept() const override {
    if (!author_) return 0;
    const std::int64_t page = table_.shape().chunk;
    return std::max(kLeastPages, config_.k / page) * page - (config_.k - kAlwaysKept);
  }

  void BuildAll(std::int64_t n_tokens) override { table_.BuildAll(n_tokens); }
  void ExtendIndex(std::int32_t layer, std::int64_t n_tokens) override {
    table_.Extend(layer, n_tokens);
  }
  void TruncateIndex(std::int64_t n_tokens) override { table_.Truncate(n_tokens); }
  std::int64_t IndexMemory() const override { return table_.MemoryBytes(); }

 private:
  const bool author_;
  ChunkTable table_;
  std::vector<float> mapped_, part_;  // [n_heads][D] queries, and those of one sign
  std::vector<float> low_, high_;     // [n_heads][pages]
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.author = options.Choice("rule", "common", {"common", "author"}) == "author";
  config.page = ReadChunk(options, "page", "16");
  config.basis = ReadBasis(options, "raw", /*centre_raw=*/false);
  config.sparse = ReadSparseConfig(options);
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  return std::make_unique<QuestMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  if (n_tokens < config.sparse.min) return 0;
  return ChunkShape{config.page, 2, geometry.head_dim}.Bytes(n_tokens);
}

}  // namespace

const MethodEntry kQuestEntry = {"quest", "pages by an upper bound of q.k from channel extremes",
                                 Check, Make, IndexBytesOf};

}  // namespace fathom
