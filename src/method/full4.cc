// SPDX-License-Identifier: MIT
// full4: all 4 planes of all channels of the common store, 4.25 D bits. What the store's quantizer
// loses by itself, with no bit saved.
#include "method/channel_method.h"

namespace fathom {
namespace {

struct Config {
  SparseConfig sparse;
  BasisRule basis = BasisRule::kRaw;
};

Config ReadConfig(OptionReader& options) {
  Config config;
  config.basis = ReadBasis(options, "raw", /*centre_raw=*/false);
  config.sparse = ReadSparseConfig(options, "off");
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  const auto depth = [](const HeadStats& stats) {
    return std::vector<std::uint8_t>(stats.variance.size(), kPlanes);
  };
  const StoredPart all = {context.rows->geometry().head_dim, kPlanes};
  return MakeFixedPlanes(context, {config.sparse, config.basis, /*abs_stats=*/false, all, depth},
                         options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  return PlaneIndexBytes(config.sparse, {geometry.head_dim, kPlanes}, geometry, n_tokens);
}

}  // namespace

const MethodEntry kFull4Entry = {"full4", "all 4 planes of all channels of the common store", Check,
                                 Make, IndexBytesOf};

}  // namespace fathom
