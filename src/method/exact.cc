// SPDX-License-Identifier: MIT
// exact: the true top-k by q.k over the keys at full precision. What every scan tries to match. A
// change of basis keeps exact scores: `basis` is accepted, so that it can be given to all methods
// alike, and changes nothing.
#include "method/plane_method.h"

namespace fathom {
namespace {

class ExactMethod final : public SparseMethod {
 public:
  using SparseMethod::SparseMethod;

 protected:
  double ScoreLayer(std::int32_t layer, std::int64_t /*n_tokens*/, std::int64_t n_index,
                    const float* q, const LayerScores& out) override {
    const HeadGeometry& heads = geometry();
    heads_.resize(static_cast<std::size_t>(heads.n_kv_heads));
    for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) {
      heads_[static_cast<std::size_t>(h)] = {
          context_.rows->rows(layer, h), q + h * heads.group() * heads.head_dim,
          out.scores + h * heads.group() * out.stride, out.stride};
    }
    context_.backend->Score({heads.head_dim, heads.group(), n_index, heads_});
    return 16.0 * heads.head_dim * heads.n_kv_heads;  // the whole fp16 key
  }

 private:
  std::vector<ScoreHead> heads_;
};

SparseConfig ReadConfig(OptionReader& options) {
  ReadBasis(options, "raw", false);
  const SparseConfig config = ReadSparseConfig(options, "off");
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const SparseConfig config = ReadConfig(options);
  return std::make_unique<ExactMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  return SparseIndexBytes(ReadConfig(options), geometry, n_tokens, 0);
}

}  // namespace

const MethodEntry kExactEntry = {"exact", "top-k by the exact scores of all keys", Check, Make,
                                 IndexBytesOf};

}  // namespace fathom
