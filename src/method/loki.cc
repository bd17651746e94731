// SPDX-License-Identifier: MIT
// loki: the first r principal components of the keys, scored for all tokens. Singhania et al.,
// "Loki: Low-rank Keys for Efficient Sparse Attention".
//
// rule=common: centred keys in the KLT basis, whose axes are ordered by score variance (key
// variance times query energy), the first r of them kept and read in 4 bits: 4.25 r
// bits. A stronger order and a cheaper read than the original. A raw basis has no order of its own:
// there the r channels of largest Var_j (E|q_j|)^2 are taken, or of largest variance without
// queries.
//
// rule=author: axes ordered by explained variance alone, r coordinates in fp16: 16 r bits. The
// authors keep the rotated key instead of the key, so that their scan costs no extra memory: 0
// bytes are counted. Our rows stay as they are, since a rotation changes no exact score, and the
// process holds a table of the r coordinates beside them. What differs from the authors' code:
//  - the table is centred, theirs is not: a constant per query, the same ranking;
//  - statistics are of the session's own keys unless a file is given, theirs of calibration texts;
//  - their k may be a fraction of the tokens; it has no sinks and no window; their evaluation
//    sparsifies the prefill, too;
//  - the balanced basis, which they do not have, has channels of equal variance in an order of its
//    own, which is kept.
#include <algorithm>
#include <numeric>

#include "method/channel_method.h"
#include "method/label_method.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

struct Config {
  SparseConfig sparse;
  bool author = false;
  std::int32_t r = 32;
  BasisRule basis = BasisRule::kKlt;
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.r = static_cast<std::int32_t>(options.Int("r", config.r, 1, kMaxHeadDim));
  config.author = options.Choice("rule", "common", {"common", "author"}) == "author";
  config.basis = ReadBasis(options, "klt", /*centre_raw=*/false);
  config.sparse = ReadSparseConfig(options, "off");
  options.Finish();
  return config;
}

// r channels of HeadStats.
std::vector<std::int32_t> Channels(const HeadStats& stats, const Config& config) {
  const std::size_t dim = stats.variance.size();
  const bool ordered =
      config.basis == BasisRule::kBalanced || (config.basis == BasisRule::kKlt && !config.author);
  std::vector<std::int32_t> channels;
  if (ordered) {
    channels.resize(std::min(dim, static_cast<std::size_t>(config.r)));
    std::iota(channels.begin(), channels.end(), 0);
    return channels;
  }
  std::vector<double> weight = stats.variance;
  const bool has_queries = std::ranges::any_of(stats.abs_query, [](double q) { return q != 0.0; });
  if (!config.author && has_queries) {
    for (std::size_t j = 0; j < dim; ++j) weight[j] *= stats.abs_query[j] * stats.abs_query[j];
  }
  TopChannels(weight, config.r, &channels);
  return channels;
}

LabelConfig Labels(const Config& config) {
  LabelConfig labels;
  labels.sparse = config.sparse;
  labels.basis = config.basis;
  labels.n_channels = config.r;
  labels.stored_beside_key = false;
  labels.channels = [config](const LabelRequest& request) {
    return std::vector<std::vector<std::int32_t>>{Channels(request.stats, config)};
  };
  return labels;
}

StoredPart CommonPart(const Config& config, HeadGeometry geometry) {
  return {std::min(config.r, geometry.head_dim), kPlanes};
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  if (config.author) return MakeLabelMethod(context, Labels(config), options.Canonical());
  const auto channels = [config](const HeadStats& stats) { return Channels(stats, config); };
  return MakeFixedChannels(
      context,
      {config.sparse, config.basis, /*abs_stats=*/config.basis == BasisRule::kRaw,
       LabelLayout::kTokens, CommonPart(config, context.rows->geometry())},
      channels, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  return config.author
             ? LabelBytes(Labels(config), geometry, n_tokens)
             : LabelIndexBytes(config.sparse, CommonPart(config, geometry), geometry, n_tokens);
}

}  // namespace

const MethodEntry kLokiEntry = {
    "loki", "the first r principal components of the keys; rule=author: in fp16, by variance",
    Check, Make, IndexBytesOf};

}  // namespace fathom
