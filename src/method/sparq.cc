// SPDX-License-Identifier: MIT
// sparq: every query reads the channels in which it is largest. Ribar et al., "SparQ Attention:
// Bandwidth-Efficient LLM Inference".
//
// rule=common: per KV head the r channels of largest sum_h |q_hj|, read in 4 bits from a table of
// all: 4.25 r bits; each head its own winners. channels=head: every query head scores with its
// own r channels of largest |q_hj|; the union over the group is read and counted.
//
// rule=author: the keys' own fp16, 16 r bits, from a second, channel-major copy of the keys
// (counted: 2 D bytes per token). Channels as above. Scores carry the authors' temperature: q_C.k_C
// / sqrt(D |q_C|_1 / |q|_1), with |q|_1 = 0 or |q_C|_1 = 0 giving scores of 0. One set of tokens
// for the group, by the sum of its heads' scores. realloc=on: out = w attention + (1 - w) mean
// value, w = the selected tokens' share of the softmax of the scores. What differs from the
// authors' code:
//  - k counts the sinks, which they do not keep, and the window; their current token is free;
//  - the mean value is that of the finished blocks: at most 63 of the newest tokens are not in it;
//  - where a basis other than raw is asked for, a table of rotated keys takes the place of the
//  copy.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/half.h"
#include "base/parallel.h"
#include "method/channel_method.h"
#include "method/head_stats.h"
#include "method/plane_method.h"
#include "method/table_method.h"
#include "store/codec_fit.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Config {
  SparseConfig sparse;
  bool author = false;
  bool per_head = false;  // channels
  std::int32_t r = 32;
  BasisRule basis = BasisRule::kRaw;
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.r = static_cast<std::int32_t>(options.Int("r", config.r, 1, kMaxHeadDim));
  config.author = options.Choice("rule", "common", {"common", "author"}) == "author";
  bool realloc = false;
  if (config.author) {
    realloc = options.Choice("realloc", "on", {"on", "off"}) == "on";
  } else {
    config.per_head = options.Choice("channels", "group", {"group", "head"}) == "head";
  }
  config.basis = ReadBasis(options, "raw", /*centre_raw=*/false);
  // The authors' reallocation is their residual.
  config.sparse = ReadSparseConfig(options, config.author ? nullptr : "off");
  if (realloc) config.sparse.residual = ResidualRule::kMean;
  options.Finish();
  return config;
}

// Channels of largest sum |q_j| over heads first .. last - 1. q: [..][D].
struct ChannelChoice {
  std::vector<double> weight;
  std::vector<std::int32_t> channels;

  void Choose(const float* q, std::int32_t first, std::int32_t last, std::size_t dim,
              std::int32_t r) {
    weight.assign(dim, 0.0);
    for (std::size_t h = Size(first); h < Size(last); ++h) {
      for (std::size_t j = 0; j < dim; ++j) weight[j] += std::fabs(q[h * dim + j]);
    }
    TopChannels(weight, r, &channels);
  }
};

// Zeros the channels of q [D] that are not listed; channels ascending.
void KeepChannels(const std::vector<std::int32_t>& channels, std::size_t dim, float* q) {
  std::size_t next = 0;
  for (const std::int32_t channel : channels) {
    while (next < Size(channel)) q[next++] = 0;
    ++next;
  }
  while (next < dim) q[next++] = 0;
}

class Sparq final : public ChannelMethod {
 public:
  Sparq(const MethodContext& context, const Config& config, const std::string& spec)
      : ChannelMethod(context,
                      {config.sparse,
                       config.basis,
                       /*abs_stats=*/false,
                       LabelLayout::kChannels,
                       {context.rows->geometry().head_dim, kPlanes}},
                      spec),
        r_(config.r),
        per_head_(config.per_head),
        choice_(Size(geometry().n_kv_heads)) {}

 protected:
  std::vector<std::int32_t> TableChannels(const HeadStats& stats) const override {
    return AllChannels(static_cast<std::int64_t>(stats.variance.size()));
  }

  void PlanRead(std::int32_t kv_head, const Head& head, ChannelRead* read, float* noise) override {
    const std::size_t dim = Size(geometry().head_dim);
    const std::int32_t group = geometry().group();
    ChannelChoice& choice = choice_[Size(kv_head)];
    read->channels.clear();
    if (!per_head_) choice.Choose(read->mapped.data(), 0, group, dim, r_);
    for (std::int32_t g = 0; g < group; ++g) {
      float* q = read->mapped.data() + Size(g) * dim;
      if (per_head_) choice.Choose(read->mapped.data(), g, g + 1, dim, r_);
      noise[g] = Noise(head.stats, q, choice.channels);
      if (per_head_) {
        KeepChannels(choice.channels, dim, q);
        read->channels.insert(read->channels.end(), choice.channels.begin(), choice.channels.end());
      }
    }
    if (!per_head_) read->channels = choice.channels;
    std::ranges::sort(read->channels);
    read->channels.erase(std::ranges::unique(read->channels).begin(), read->channels.end());
  }

 private:
  const std::int32_t r_;
  const bool per_head_;
  std::vector<ChannelChoice> choice_;  // [n_kv_heads] scratch
};

// The authors' own system.
class SparqAuthor final : public TableMethod {
 public:
  SparqAuthor(const MethodContext& context, const Config& config, const std::string& spec)
      : TableMethod(context, config.sparse, spec),
        r_(config.r),
        basis_(config.basis),
        heads_(n_slots()),
        q_(Size(geometry().n_heads) * Size(geometry().head_dim)),
        choice_(Size(geometry().n_kv_heads)),
        score_(choice_.size()) {}

 protected:
  GroupRule group_rule() const override { return GroupRule::kSumScores; }
  bool fixed_residual() const override { return true; }

  void StartHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) override {
    if (raw()) return;
    heads_[Slot(layer, kv_head)].basis =
        MeasureHead(context_, layer, kv_head, n_tokens, basis_, /*abs=*/false).basis;
  }

  void ExtendHead(std::int32_t layer, std::int32_t kv_head, std::int64_t first,
                  std::int64_t n_blocks) override {
    if (raw()) return;
    Head& head = heads_[Slot(layer, kv_head)];
    const std::int64_t floats = std::int64_t{kBlockTokens} * geometry().head_dim;
    head.table.resize(Size(n_blocks * floats));
    BlockReader reader(context_.rows->rows(layer, kv_head), head.basis);
    for (std::int64_t b = first; b < n_blocks; ++b) {
      ConvertFloatToHalf(reader.Load(b), floats, head.table.data() + b * floats);
    }
  }

  std::int64_t StoredBytes(std::int64_t n_blocks) const override {
    return CopyBytes(geometry().head_dim, n_blocks);
  }

  double ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/, std::int64_t n_index,
                    const float* q, const LayerScores& out) override {
    const std::int64_t dim = geometry().head_dim;
    const std::int64_t group = geometry().group();
    ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t h) {
      const auto kv_head = static_cast<std::int32_t>(h);
      const Head& head = heads_[Slot(layer, kv_head)];
      float* mapped = q_.data() + h * group * dim;
      raw() ? void(std::copy_n(q + h * group * dim, group * dim, mapped))
            : head.basis.MapQueries(q + h * group * dim, group, mapped);
      MaskQueries(mapped, &choice_[Size(h)]);
      score_[Size(h)] = {raw() ? context_.rows->rows(layer, kv_head) : head.table.data(), mapped,
                         out.scores + h * group * out.stride, out.stride};
    });
    context_.backend->Score(
        {geometry().head_dim, geometry().group(), n_index, score_, raw() ? 2 * dim : dim});
    return 16.0 * std::min(r_, geometry().head_dim) * geometry().n_kv_heads;
  }

  // The selected tokens' sum of exp in the softmax of the scores: what the rest is measured by.
  void SelectedLse(std::int32_t layer, std::int64_t n_tokens, const float* /*q*/,
                   const LayerScores& scores, std::span<float> lse) override {
    const std::int64_t group = geometry().group();
    ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t h) {
      const auto kv_head = static_cast<std::int32_t>(h);
      ChannelChoice& scratch = choice_[Size(h)];
      ScoreTail(layer, kv_head, n_tokens);
      const std::int64_t n_index = n_tokens / kBlockTokens * kBlockTokens;
      const AttendedTokens chosen = attended(kv_head);
      for (std::int64_t g = 0; g < group; ++g) {
        const float* score = scores.scores + (h * group + g) * scores.stride;
        std::vector<double>& s = scratch.weight;
        s.resize(chosen.tokens.size());
        double top = -std::numeric_limits<double>::infinity();
        for (std::size_t i = 0; i < s.size(); ++i) {
          const std::int64_t token = chosen.tokens[i];
          s[i] = scale() *
                 static_cast<double>(token < n_index
                                         ? score[token]
                                         : heads_[Slot(layer, kv_head)]
                                               .tail[Size(g * kBlockTokens + token - n_index)]);
          top = std::max(top, s[i]);
        }
        double sum = 0;
        for (const double x : s) sum += std::exp(x - top);
        lse[Size(h * group + g)] = static_cast<float>(top + std::log(sum));
      }
    });
  }

 public:
  static std::int64_t CopyBytes(std::int64_t dim, std::int64_t n_blocks) {
    return n_blocks * kBlockTokens * dim * std::int64_t{sizeof(Half)};
  }

 private:
  struct Head {
    Basis basis;              // unless raw
    std::vector<Half> table;  // [n][D] keys in the basis, unless raw
    std::vector<float> tail;  // [group][64] scores of the tokens behind the finished blocks
  };

  bool raw() const { return basis_ == BasisRule::kRaw; }

  // Leaves the chosen channels of the group's queries, times the temperature without 1/sqrt(D).
  void MaskQueries(float* q, ChannelChoice* choice) const {
    const std::size_t dim = Size(geometry().head_dim);
    choice->Choose(q, 0, geometry().group(), dim, r_);
    for (std::int32_t g = 0; g < geometry().group(); ++g, q += dim) {
      double all = 0, chosen = 0;
      for (std::size_t j = 0; j < dim; ++j) all += std::fabs(q[j]);
      for (const std::int32_t c : choice->channels) chosen += std::fabs(q[c]);
      KeepChannels(choice->channels, dim, q);
      if (!(chosen > 0)) continue;
      const auto factor = static_cast<float>(std::sqrt(all / chosen));
      for (const std::int32_t c : choice->channels) q[c] *= factor;
    }
  }

  void ScoreTail(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) {
    Head& head = heads_[Slot(layer, kv_head)];
    const std::int64_t dim = geometry().head_dim;
    const std::int64_t group = geometry().group();
    const std::int64_t n_index = n_tokens / kBlockTokens * kBlockTokens;
    const Half* rows = context_.rows->rows(layer, kv_head);
    head.tail.resize(Size(group * kBlockTokens));
    float key[kMaxHeadDim], mapped[kMaxHeadDim];
    for (std::int64_t i = n_index; i < n_tokens; ++i) {
      ConvertHalfToFloat(rows + i * 2 * dim, dim, key);
      if (!raw()) head.basis.MapKeys(key, 1, mapped);
      const float* k = raw() ? key : mapped;
      for (std::int64_t g = 0; g < group; ++g) {
        const float* q = q_.data() + (kv_head * group + g) * dim;
        float dot = 0;
        for (std::int64_t d = 0; d < dim; ++d) dot += q[d] * k[d];
        head.tail[Size(g * kBlockTokens + i - n_index)] = dot;
      }
    }
  }

  const std::int32_t r_;
  const BasisRule basis_;
  std::vector<Head> heads_;            // [n_layers][n_kv_heads]
  std::vector<float> q_;               // [n_heads][D] masked queries of this step, in the basis
  std::vector<ChannelChoice> choice_;  // [n_kv_heads] scratch
  std::vector<ScoreHead> score_;
};

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  if (config.author) return std::make_unique<SparqAuthor>(context, config, options.Canonical());
  return std::make_unique<Sparq>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  if (!config.author) {
    return LabelIndexBytes(config.sparse, {geometry.head_dim, kPlanes}, geometry, n_tokens);
  }
  return n_tokens < config.sparse.min
             ? 0
             : SparqAuthor::CopyBytes(geometry.head_dim, n_tokens / kBlockTokens);
}

}  // namespace

const MethodEntry kSparqEntry = {
    "sparq", "the r channels in which the query is largest; rule=author: fp16, one set, realloc",
    Check, Make, IndexBytesOf};

}  // namespace fathom
