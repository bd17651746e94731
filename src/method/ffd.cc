// SPDX-License-Identifier: MIT
// What is stored: per 128 tokens and channel scale = max|k| / 1.5, per key channel a 2-bit code
// worth (c - 1.5) scale, that is +-scale/2 or +-3 scale/2. The score of a token is its product with
// these values; 2 D + 32 D / 128 bits are read (288 at D = 128).
//
// The authors' selection: per query head, threshold = largest score of the first and the last full
// block, minus delta. A block survives for the KV head when any head's largest score in it reaches
// that head's threshold, and then all heads attend all its tokens. So the number of tokens follows
// from the query and does not fit a given k. Under the common protocol blocks are ranked by
//   max_h (block maximum_h - threshold_h),
// the order in which blocks die as delta shrinks, and are taken whole until k is filled; the last
// one gives its first tokens. delta is the same for every head, so it cancels from the ranking and
// is no option here. (In the authors' code the scores carry log2(e) and delta does not: delta = 5
// is 5 ln 2 = 3.47 in units of the softmax's argument, dropping blocks below 2^-5 of the maximum,
// where their text says e^-5.)
//
// Further differences: the authors attend surviving blocks with 2 bits + an fp8 residual that take
// the place of the fp16 key, here with the rows; they attend the unfinished block of 128 tokens
// whole, here the half of it that is a finished block of 64 is chosen first and counts in k. Scales
// are fp32 there, fp16 here once codes are made (relative error 2^-11); read bits and bytes are
// counted with theirs.
#include "method/ffd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/half.h"
#include "base/parallel.h"
#include "fathom/label_table.h"
#include "method/head_stats.h"
#include "method/table_method.h"
#include "store/codec_fit.h"

namespace fathom {
namespace {

constexpr std::int32_t kPair = kFfdBlock / kBlockTokens;  // blocks of 64 that share a scale
constexpr std::int32_t kFfdBits = 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Codes and scales, without the residual, which takes the place of the key.
std::int64_t CodeBytes(std::int64_t dim, std::int64_t n_blocks) {
  return n_blocks / kPair * (kFfdBlock * dim * 2 / 8 + 4 * dim);
}

// A label of 2 bits means (c - 1.5) a / 2: with a = 2 scale that is FFD's value.
class FfdMethod final : public TableMethod {
 public:
  FfdMethod(const MethodContext& context, const SparseConfig& config, BasisRule basis,
            const std::string& spec)
      : TableMethod(context, config, spec),
        basis_(basis),
        heads_(n_slots()),
        q_(Size(geometry().n_heads) * Size(geometry().head_dim)),
        margin_(Size(geometry().n_kv_heads)),
        top_(margin_.size()),
        scan_(margin_.size()) {}

 protected:
  void StartHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) override {
    Head& head = heads_[Slot(layer, kv_head)];
    head.basis = MeasureHead(context_, layer, kv_head, n_tokens, basis_, /*abs=*/false).basis;
    head.table = LabelTable({LabelLayout::kTokens, kFfdBits, geometry().head_dim});
  }

  void ExtendHead(std::int32_t layer, std::int32_t kv_head, std::int64_t first,
                  std::int64_t n_blocks) override {
    Head& head = heads_[Slot(layer, kv_head)];
    const int dim = geometry().head_dim;
    const std::int64_t n_pairs = n_blocks / kPair;
    head.table.Truncate(std::min(head.table.n_blocks(), first / kPair * kPair));
    BlockReader reader(context_.rows->rows(layer, kv_head), head.basis);
    std::vector<float> x(Size(kFfdBlock) * Size(dim));
    for (std::int64_t pair = head.table.n_blocks() / kPair; pair < n_pairs; ++pair) {
      for (std::int64_t b = 0; b < kPair; ++b) {
        std::copy_n(reader.Load(pair * kPair + b), kBlockTokens * dim,
                    x.data() + b * kBlockTokens * dim);
      }
      PackPair(x.data(), &head.table);
    }
  }

  void CutHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_blocks) override {
    heads_[Slot(layer, kv_head)].table.Truncate(n_blocks / kPair * kPair);
  }

  std::int64_t StoredBytes(std::int64_t n_blocks) const override {
    return CodeBytes(geometry().head_dim, n_blocks);
  }

  double ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/, std::int64_t n_index,
                    const float* q, const LayerScores& out) override {
    const std::int64_t dim = geometry().head_dim;
    const std::int64_t group = geometry().group();
    for (std::size_t h = 0; h < scan_.size(); ++h) {
      const Head& head = heads_[Slot(layer, static_cast<std::int32_t>(h))];
      const std::size_t at = h * Size(group * dim);
      head.basis.MapQueries(q + at, group, q_.data() + at);
      scan_[h] = {head.table.segments(),
                  geometry().head_dim,
                  nullptr,
                  q_.data() + at,
                  out.scores + static_cast<std::int64_t>(h) * group * out.stride,
                  out.stride};
    }
    context_.backend->ScanLabels(
        {LabelLayout::kTokens, kFfdBits, geometry().group(), LabelTable::kSegmentBlocks, scan_});
    ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(),
                [&](std::int64_t h) { RankBlocks(Size(h), n_index); });
    return (2.0 + 32.0 / kFfdBlock) * static_cast<double>(dim) * geometry().n_kv_heads;
  }

 private:
  struct Head {
    Basis basis;
    LabelTable table;
  };

  // x: [128][D] in the basis.
  void PackPair(const float* x, LabelTable* table) const {
    const std::size_t dim = Size(geometry().head_dim);
    std::vector<std::uint8_t> codes(kPair * dim * kBlockTokens);
    std::vector<Half> scales(dim);
    for (std::size_t j = 0; j < dim; ++j) {
      float top = 0;
      for (std::size_t i = 0; i < kFfdBlock; ++i) top = std::max(top, std::fabs(x[i * dim + j]));
      const float scale = top / 1.5F;
      for (std::size_t i = 0; i < kFfdBlock; ++i) {
        const std::size_t row = i / kBlockTokens * dim + j;
        codes[row * kBlockTokens + i % kBlockTokens] =
            static_cast<std::uint8_t>(FfdCode(x[i * dim + j], scale));
      }
      scales[j] = FloatToHalf(std::min(2 * scale, 65504.0F));
    }
    for (std::size_t b = 0; b < kPair; ++b) {
      table->Append(codes.data() + b * dim * kBlockTokens, scales.data());
    }
  }

  // Turns scores of tokens into those of their blocks of 128, the same for all heads of the group.
  void RankBlocks(std::size_t kv_head, std::int64_t n_index) {
    const std::int64_t group = geometry().group();
    const std::int64_t n_pairs = n_index / kFfdBlock;
    float* scores = scan_[kv_head].scores;
    const std::int64_t stride = scan_[kv_head].stride;
    std::vector<float>& margin = margin_[kv_head];
    std::vector<float>& top = top_[kv_head];
    margin.assign(Size(n_pairs), -kInfinity);
    top.resize(Size(n_pairs));
    for (std::int64_t g = 0; g < group; ++g) {
      for (std::int64_t b = 0; b < n_pairs; ++b) {
        const float* score = scores + g * stride + b * kFfdBlock;
        float largest = -kInfinity;  // NaN scores are passed over
        for (int i = 0; i < kFfdBlock; ++i) largest = score[i] > largest ? score[i] : largest;
        top[Size(b)] = largest;
      }
      if (n_pairs == 0) continue;
      const float probe = std::max(top.front(), top.back());
      for (std::size_t b = 0; b < top.size(); ++b) {
        margin[b] = std::max(margin[b], top[b] - probe);
      }
    }
    for (std::int64_t g = 0; g < group; ++g) {
      float* score = scores + g * stride;
      for (std::int64_t b = 0; b < n_pairs; ++b) {
        std::fill_n(score + b * kFfdBlock, kFfdBlock, margin[Size(b)]);
      }
      std::fill(score + n_pairs * kFfdBlock, score + n_index, kInfinity);
    }
  }

  const BasisRule basis_;
  std::vector<Head> heads_;                       // [n_layers][n_kv_heads]
  std::vector<float> q_;                          // [n_heads][D] queries in the basis
  std::vector<std::vector<float>> margin_, top_;  // [n_kv_heads][blocks of 128]
  std::vector<LabelScanHead> scan_;
};

}  // namespace

int FfdCode(float k, float scale) {
  if (scale == 0.0F) return 2;
  const float code = std::nearbyint(k / scale + 1.5F);
  return code > 0 ? static_cast<int>(std::min(code, 3.0F)) : 0;
}

std::unique_ptr<Method> MakeFfd(const MethodContext& context, const SparseConfig& config,
                                BasisRule basis, const std::string& spec) {
  return std::make_unique<FfdMethod>(context, config, basis, spec);
}

std::int64_t FfdBytes(const SparseConfig& config, HeadGeometry geometry, std::int64_t n_tokens) {
  return n_tokens < config.min ? 0 : CodeBytes(geometry.head_dim, n_tokens / kBlockTokens);
}

}  // namespace fathom
