// SPDX-License-Identifier: MIT
// full4: 4 bits of all channels, 4.25 D bits. What the common quantizer loses by itself, with no
// bit saved.
#include "method/channel_method.h"
#include "method/plane_method.h"

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
  const StoredPart part = {context.rows->geometry().head_dim, kPlanes};
  const auto all = [part](const HeadStats&) { return AllChannels(part.channels); };
  return MakeFixedChannels(
      context, {config.sparse, config.basis, /*abs_stats=*/false, LabelLayout::kTokens, part}, all,
      options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  return LabelIndexBytes(config.sparse, {geometry.head_dim, kPlanes}, geometry, n_tokens);
}

}  // namespace

const MethodEntry kFull4Entry = {"full4", "4 bits of all channels", Check, Make, IndexBytesOf};

}  // namespace fathom
