// SPDX-License-Identifier: MIT
// streaming (StreamingLLM, Xiao et al., arXiv 2309.17453): the sinks and the newest tokens,
// whatever the query; no index, no scan, 0 bits. What lies in between is never seen again: a floor
// that shows which questions need more than their end.
//
// Positions are the true ones here; the author numbers tokens by their place in the cache. Like
// every method this one attends what is not yet in a finished block beside k: the newest k - 36 +
// (tokens after the candidates) tokens, of which there are k - 4 when the tail is no longer than
// the window. Without keys to score, `basis` is accepted, so that it can be given to all methods
// alike, and changes nothing.
#include <algorithm>

#include "method/plane_method.h"

namespace fathom {
namespace {

class StreamingMethod final : public SparseMethod {
 public:
  using SparseMethod::SparseMethod;

 protected:
  // One for as many of the newest candidates as there are places, nothing for the others: the same
  // set for all heads of a group, so one selection per KV head is enough.
  double ScoreLayer(std::int32_t /*layer*/, std::int64_t n_tokens, std::int64_t n_index,
                    const float* /*q*/, const LayerScores& out) override {
    const std::int64_t last = std::min(n_index, n_tokens - kWindow);
    const std::int64_t keep = config_.k - kAlwaysKept;
    for (std::int32_t h = 0; h < geometry().n_heads; ++h) {
      std::fill_n(out.scores + h * out.stride, n_index, 0.0F);
    }
    for (std::int32_t kv = 0; kv < geometry().n_kv_heads; ++kv) {
      float* scores = out.scores + kv * geometry().group() * out.stride;
      std::fill_n(scores + last - keep, keep, 1.0F);
    }
    return 0;
  }
  GroupRule group_rule() const override { return GroupRule::kSumScores; }
};

SparseConfig ReadConfig(OptionReader& options) {
  ReadBasis(options, "raw", false);
  const SparseConfig config = ReadSparseConfig(options);
  options.Finish();
  return config;
}

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const SparseConfig config = ReadConfig(options);
  return std::make_unique<StreamingMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry /*geometry*/,
                          std::int64_t /*n_tokens*/) {
  Check(options);
  return 0;
}

}  // namespace

const MethodEntry kStreamingEntry = {"streaming", "sinks and the newest tokens, without a scan",
                                     Check, Make, IndexBytesOf};

}  // namespace fathom
