// SPDX-License-Identifier: MIT
// thumbnail: a coarse copy of every channel, scored for all tokens.
//
// rule=common: the first `planes` bits of every channel's 4-bit codes, (planes + 1/4) D bits: 288
// at 2 planes and D = 128. Tokens are chosen one by one. rule=ffd: the 2-bit system of FFD
// (ffd.cc), whose unit is the block of 128 tokens.
#include "method/channel_method.h"
#include "method/ffd.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

struct Config {
  SparseConfig sparse;
  bool ffd = false;
  std::int32_t planes = 2;
  BasisRule basis = BasisRule::kRaw;
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.ffd = options.Choice("rule", "common", {"common", "ffd"}) == "ffd";
  if (!config.ffd) {
    config.planes = static_cast<std::int32_t>(options.Int("planes", config.planes, 1, kPlanes));
  }
  config.basis = ReadBasis(options, "raw", /*centre_raw=*/false);
  // Scores of FFD are those of blocks: no estimate of a token's q.k, no residual.
  config.sparse = ReadSparseConfig(options, config.ffd ? nullptr : "off");
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  if (config.ffd) return MakeFfd(context, config.sparse, config.basis, options.Canonical());
  const StoredPart part = {context.rows->geometry().head_dim, config.planes};
  const auto all = [part](const HeadStats&) { return AllChannels(part.channels); };
  return MakeFixedChannels(
      context, {config.sparse, config.basis, /*abs_stats=*/false, LabelLayout::kTokens, part}, all,
      options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  return config.ffd ? FfdBytes(config.sparse, geometry, n_tokens)
                    : LabelIndexBytes(config.sparse, {geometry.head_dim, config.planes}, geometry,
                                      n_tokens);
}

}  // namespace

const MethodEntry kThumbnailEntry = {
    "thumbnail", "the first planes of every channel; rule=ffd: 2-bit codes, blocks of 128", Check,
    Make, IndexBytesOf};

}  // namespace fathom
