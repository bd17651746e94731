// SPDX-License-Identifier: MIT
// landmark: the mean of every chunk of 8 keys, in fp16, scored exactly; a token inherits the score
// of its chunk. 32 bytes per token and 256 read bits at D = 128.
//
// rule=common: each query head chooses its own tokens, nothing is kept beside k.
// rule=author (ShadowKV, Sun et al., arXiv 2410.21465): one set per KV head, the best of the heads'
//   largest softmax over landmarks, and 48 outlier chunks that are always attended beside k: those
//   with the smallest minimum cosine between landmark and keys, chosen once, when the index is
//   made, among the chunks before the window. Outliers leave the softmax. Where k - 36 is no
//   multiple of the chunk the last chunk is attended in part; places that an outlier leaves because
//   the protocol keeps its tokens anyway go to the next best.
// Not taken over: keys rebuilt from a low-rank factor of the pre-RoPE keys (rows are exact here, so
// its 40 bytes per token are not counted either), the local part of 32 to 95 tokens beside k
// (window and tail take its place), generated tokens kept for good (finished blocks join the
// index).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/half.h"
#include "base/parallel.h"
#include "method/chunk_table.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kMaxOutliers = 1 << 16;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Config {
  SparseConfig sparse;
  bool author = false;
  std::int32_t chunk = 8;
  std::int64_t outliers = 0;
  BasisRule basis = BasisRule::kRaw;
};

void Mean(const float* x, const ChunkShape& shape, float* entry) {
  std::fill_n(entry, shape.head_dim, 0.0F);
  for (std::int32_t i = 0; i < shape.chunk; ++i) {
    for (std::int32_t j = 0; j < shape.head_dim; ++j) entry[j] += *x++;
  }
  for (std::int32_t j = 0; j < shape.head_dim; ++j) {
    entry[j] /= static_cast<float>(shape.chunk);
  }
}

// The smallest cosine between the mean of a chunk's keys and one of them. keys: [chunk][D]. A chunk
// with a NaN is no outlier: 2.
float LeastCosine(const std::vector<float>& keys, const ChunkShape& shape,
                  std::vector<float>* mean) {
  constexpr double kSmallestNorm = 1e-8;  // a zero vector has the cosine 0 to all
  Mean(keys.data(), shape, mean->data());
  double mean_square = 0;
  for (const float m : *mean) mean_square += static_cast<double>(m) * m;
  double least = 2;
  for (std::size_t i = 0; i < keys.size(); i += mean->size()) {
    double dot = 0, square = 0;
    for (std::size_t j = 0; j < mean->size(); ++j) {
      dot += static_cast<double>(keys[i + j]) * (*mean)[j];
      square += static_cast<double>(keys[i + j]) * keys[i + j];
    }
    const double cosine = dot / std::max(std::sqrt(square * mean_square), kSmallestNorm);
    if (std::isnan(cosine)) return 2;
    least = std::min(least, cosine);
  }
  return static_cast<float>(least);
}

class LandmarkMethod final : public SparseMethod {
 public:
  LandmarkMethod(const MethodContext& context, const Config& config, std::string spec)
      : SparseMethod(context, config.sparse, std::move(spec)),
        author_(config.author),
        n_outliers_(config.outliers),
        table_(context, {config.chunk, 1, context.rows->geometry().head_dim}, config.basis, Mean),
        outliers_(Size(n_layers()) * Size(geometry().n_kv_heads)) {}

 protected:
  double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index, const float* q,
                    const LayerScores& out) override {
    const std::size_t n_heads = Size(geometry().n_heads);
    mapped_.resize(n_heads * Size(geometry().head_dim));
    chunk_scores_.resize(n_heads * Size(n_index / table_.shape().chunk));
    table_.MapQueries(layer, q, mapped_.data(), out.offset);
    table_.Score(layer, 0, n_index, mapped_.data(), chunk_scores_.data());
    if (author_) LeaveWindowOut(n_tokens, n_index);
    table_.Spread(chunk_scores_.data(), n_index, out.scores, out.stride);
    if (n_outliers_ > 0) KeepOutliers(layer, n_index, out);
    return table_.shape().ReadBits() * geometry().n_kv_heads;
  }

  GroupRule group_rule() const override {
    return author_ ? GroupRule::kMaxSoftmax : GroupRule::kPerHead;
  }
  std::int64_t ExtraKept() const override { return n_outliers_ * table_.shape().chunk; }

  void BuildAll(std::int64_t n_tokens) override {
    std::vector<std::int32_t> fresh;
    for (std::int32_t layer = 0; layer < n_layers(); ++layer) {
      if (table_.built_tokens(layer) == 0) fresh.push_back(layer);
    }
    table_.BuildAll(n_tokens);
    for (const std::int32_t layer : fresh) ChooseOutliers(layer);
  }
  void ExtendIndex(std::int32_t layer, std::int64_t n_tokens) override {
    const bool fresh = table_.built_tokens(layer) == 0;
    table_.Extend(layer, n_tokens);
    if (fresh) ChooseOutliers(layer);
  }
  void TruncateIndex(std::int64_t n_tokens) override { table_.Truncate(n_tokens); }
  // The outliers' numbers are a list of fixed length beside the table.
  std::int64_t IndexMemory() const override {
    std::int64_t lists = 0;
    for (std::int32_t layer = 0; layer < n_layers(); ++layer) {
      if (table_.built_tokens(layer) > 0) lists += geometry().n_kv_heads;
    }
    return table_.MemoryBytes() + lists * n_outliers_ * std::int64_t{sizeof(std::int32_t)};
  }

 private:
  std::vector<std::int32_t>& Outliers(std::int32_t layer, std::int64_t kv_head) {
    return outliers_[Size(layer) * Size(geometry().n_kv_heads) + Size(kv_head)];
  }

  // By the keys themselves, whatever the basis. Ties: the smaller chunk.
  void ChooseOutliers(std::int32_t layer) {
    if (n_outliers_ == 0) return;
    const ChunkShape& shape = table_.shape();
    const std::int64_t n_tokens = table_.built_tokens(layer);
    const std::int64_t n_chunks =
        std::min(n_tokens / kBlockTokens * kBlockTokens, n_tokens - kWindow) / shape.chunk;
    ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t kv) {
      const Half* row = context_.rows->rows(layer, static_cast<std::int32_t>(kv));
      const std::size_t dim = Size(shape.head_dim);
      std::vector<float> keys(Size(shape.chunk) * dim), mean(dim), cosine(Size(n_chunks));
      for (float& c : cosine) {
        for (std::size_t i = 0; i < keys.size(); i += dim, row += 2 * dim) {
          ConvertHalfToFloat(row, shape.head_dim, keys.data() + i);
        }
        c = LeastCosine(keys, shape, &mean);
      }
      std::vector<std::int32_t>& chosen = Outliers(layer, kv);
      chosen.resize(cosine.size());
      std::iota(chosen.begin(), chosen.end(), 0);
      const std::size_t keep = std::min(Size(n_outliers_), chosen.size());
      std::partial_sort(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(keep),
                        chosen.end(), [&](std::int32_t a, std::int32_t b) {
                          const float x = cosine[Size(a)], y = cosine[Size(b)];
                          return x < y || (x == y && a < b);
                        });
      chosen.resize(keep);
    });
  }

  // The author's index ends before the local part: what is attended anyway must not weigh in the
  // softmax over landmarks.
  void LeaveWindowOut(std::int64_t n_tokens, std::int64_t n_index) {
    const std::int64_t chunk = table_.shape().chunk;
    const std::int64_t n_chunks = n_index / chunk;
    const std::int64_t first = (std::min(n_index, n_tokens - kWindow) + chunk - 1) / chunk;
    for (std::int32_t h = 0; h < geometry().n_heads; ++h) {
      std::fill(chunk_scores_.begin() + h * n_chunks + first,
                chunk_scores_.begin() + (h + 1) * n_chunks, -kInfinity);
    }
  }

  void KeepOutliers(std::int32_t layer, std::int64_t n_index, const LayerScores& out) {
    const std::int32_t chunk = table_.shape().chunk;
    const std::int32_t group = geometry().group();
    for (std::int32_t kv = 0; kv < geometry().n_kv_heads; ++kv) {
      for (const std::int32_t c : Outliers(layer, kv)) {
        const std::int64_t token = std::int64_t{c} * chunk;
        if (token >= n_index) continue;
        for (std::int32_t h = kv * group; h < (kv + 1) * group; ++h) {
          std::fill_n(out.scores + h * out.stride + token, chunk, kInfinity);
        }
      }
    }
  }

  const bool author_;
  const std::int64_t n_outliers_;
  ChunkTable table_;
  // [n_layers][n_kv_heads] chunks; those of a layer without a table are old and chosen anew with
  // it.
  std::vector<std::vector<std::int32_t>> outliers_;
  std::vector<float> mapped_;        // [n_heads][D]
  std::vector<float> chunk_scores_;  // [n_heads][chunks]
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.author = options.Choice("rule", "common", {"common", "author"}) == "author";
  config.chunk = ReadChunk(options, "chunk", "8");
  config.outliers = options.Int("outliers", config.author ? 48 : 0, 0, kMaxOutliers);
  config.basis = ReadBasis(options, "raw", /*centre_raw=*/false);
  config.sparse = ReadSparseConfig(options, "off");
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  return std::make_unique<LandmarkMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  if (n_tokens < kBlockTokens) return 0;
  return SparseIndexBytes(config.sparse, geometry, n_tokens,
                          ChunkShape{config.chunk, 1, geometry.head_dim}.Bytes(n_tokens) +
                              config.outliers * std::int64_t{sizeof(std::int32_t)});
}

}  // namespace

const MethodEntry kLandmarkEntry = {"landmark", "chunks of tokens by their mean key", Check, Make,
                                    IndexBytesOf};

}  // namespace fathom
