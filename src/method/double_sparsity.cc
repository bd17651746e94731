// SPDX-License-Identifier: MIT
// double-sparsity: a fixed choice of c channels per head ("label channels"), scored for all tokens.
// Yang et al., "Post-Training Sparse Attention with Double Sparsity".
//
// rule=common: channels of largest E|q_j| E|k_j| per KV head, read at 4 planes from the common
// store: 4.25 c bits. Without queries, of largest E|k_j|.
//
// rule=author: labels of their own, in fp16 (16 c bits) or 4 bits with a scale and a minimum per
// token (4 c + 32 bits; query labels are coded likewise), channels by one of the authors' orders:
//   k   mean |k_j|, per KV head (their default)
//   q   mean |q_j|, per query head
//   qk  mean |q_j k_j| of the same token, per query head
// With q and qk every query head has labels of its own, so that stored bytes and read bits grow by
// the group. What differs from the authors' code:
//  - they rank q and k before the rotary embedding, we after it, where the store is; qk is after it
//    in both. Their statistics are of calibration texts, ours of the session unless a file is
//    given; per-query-head orders always come from the session's sampled queries, and are by k
//    without any;
//  - their qk statistics keep only the last block of text (a wrong dictionary key); ours keep all;
//  - scores are in units of q.k and not divided by sqrt(c): the same ranking;
//  - layers 0 and 1 are dense in theirs: give dense=2. Their k has no sinks and no window.
#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "method/channel_method.h"
#include "method/label_method.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

enum class Order { kKeys, kQueries, kProducts };

struct Config {
  SparseConfig sparse;
  bool author = false;
  std::int32_t c = 32;
  BasisRule basis = BasisRule::kRaw;
  Order order = Order::kKeys;
  LabelCode code = LabelCode::kFourBit;
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.c = static_cast<std::int32_t>(options.Int("c", config.c, 1, kMaxHeadDim));
  config.author = options.Choice("rule", "common", {"common", "author"}) == "author";
  if (config.author) {
    const std::string order = options.Choice("order", "k", {"k", "q", "qk"});
    config.order = order == "k" ? Order::kKeys : order == "q" ? Order::kQueries : Order::kProducts;
    if (options.Choice("labels", "4bit", {"4bit", "fp16"}) == "fp16") {
      config.code = LabelCode::kHalf;
    }
  }
  config.basis = ReadBasis(options, "raw", /*centre_raw=*/false);
  config.sparse = ReadSparseConfig(options, "off");
  options.Finish();
  return config;
}

bool AllZero(const std::vector<double>& x) {
  return std::ranges::all_of(x, [](double v) { return v == 0.0; });
}

// Sums over the sampled queries of |q_j| or |q_j k_j| of one query head, in the table's basis;
// zeros without samples.
std::vector<double> SampledSums(const LabelRequest& request, std::int32_t head, Order order) {
  const HeadGeometry& geometry = request.context.rows->geometry();
  const std::int64_t dim = geometry.head_dim;
  const Basis& basis = request.stats.basis;
  std::vector<double> sum(static_cast<std::size_t>(dim));
  if (request.context.queries == nullptr) return sum;
  const QuerySamples& samples =
      (*request.context.queries)[static_cast<std::size_t>(request.layer)].samples;
  const Half* rows = request.context.rows->rows(request.layer, request.kv_head);
  std::vector<float> q(sum.size()), key(sum.size()), k(sum.size(), 1.0F);
  for (std::int64_t i = 0; i < samples.size(); ++i) {
    const std::int64_t position = samples.positions()[static_cast<std::size_t>(i)];
    if (position >= request.n_tokens) break;  // ascending: no key there any more
    basis.MapQueries(samples.query(i) + head * dim, 1, q.data());
    if (order == Order::kProducts) {
      ConvertHalfToFloat(rows + position * 2 * dim, dim, key.data());
      basis.MapKeys(key.data(), 1, k.data());
    }
    for (std::size_t j = 0; j < sum.size(); ++j) {
      sum[j] += std::fabs(static_cast<double>(q[j]) * k[j]);
    }
  }
  return sum;
}

std::vector<std::vector<std::int32_t>> AuthorChannels(const LabelRequest& request, Order order,
                                                      std::int32_t c) {
  const std::int32_t group = request.context.rows->geometry().group();
  std::vector<std::vector<std::int32_t>> sets(
      order == Order::kKeys ? 1 : static_cast<std::size_t>(group));
  for (std::size_t set = 0; set < sets.size(); ++set) {
    std::vector<double> weight = request.stats.abs_key;
    if (order != Order::kKeys) {
      const auto head = request.kv_head * group + static_cast<std::int32_t>(set);
      std::vector<double> sums = SampledSums(request, head, order);
      if (!AllZero(sums)) weight = std::move(sums);
    }
    TopChannels(weight, c, &sets[set]);
  }
  return sets;
}

LabelConfig Labels(const Config& config) {
  LabelConfig labels;
  labels.sparse = config.sparse;
  labels.basis = config.basis;
  labels.abs_stats = true;
  labels.n_channels = config.c;
  labels.code = config.code;
  labels.per_query_head = config.order != Order::kKeys;
  labels.channels = [order = config.order, c = config.c](const LabelRequest& request) {
    return AuthorChannels(request, order, c);
  };
  return labels;
}

StoredPart CommonPart(const Config& config, HeadGeometry geometry) {
  return {std::min(config.c, geometry.head_dim), kPlanes};
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  if (config.author) return MakeLabelMethod(context, Labels(config), options.Canonical());
  const auto channels = [c = config.c](const HeadStats& stats) {
    return LargestChannels(stats, c);
  };
  return MakeFixedChannels(context,
                           {config.sparse, config.basis, /*abs_stats=*/true, LabelLayout::kTokens,
                            CommonPart(config, context.rows->geometry())},
                           channels, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  return config.author
             ? LabelBytes(Labels(config), geometry, n_tokens)
             : LabelIndexBytes(config.sparse, CommonPart(config, geometry), geometry, n_tokens);
}

}  // namespace

const MethodEntry kDoubleSparsityEntry = {
    "double-sparsity",
    "c fixed channels per head; rule=author adds order=k|q|qk and labels=4bit|fp16", Check, Make,
    IndexBytesOf};

}  // namespace fathom
