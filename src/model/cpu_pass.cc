// SPDX-License-Identifier: MIT
#include <algorithm>
#include <numeric>
#include <utility>

#include "model/forward_pass.h"
#include "model/model_impl.h"
#include "model/stage_graph.h"

namespace fathom {
namespace {

class CpuPass final : public ForwardPass {
 public:
  CpuPass(std::shared_ptr<const Model> model, int n_threads)
      : model_(std::move(model)), weights_(model_->impl().GraphWeights()), n_threads_(n_threads) {}

  std::span<const float> Run(std::span<const Token> tokens, std::int64_t first,
                             const AttentionFn& attention, bool want_logits) override {
    const auto n = static_cast<std::int64_t>(tokens.size());
    StageGraphs& graphs = GraphsFor(n);
    std::copy(tokens.begin(), tokens.end(), graphs.tokens());
    std::iota(graphs.positions(), graphs.positions() + n, static_cast<std::int32_t>(first));
    const std::int32_t n_layers = model_->info().n_layers;
    for (std::int32_t layer = 0; layer < n_layers; ++layer) {
      graphs.Run(layer, work_);
      attention(layer, n, graphs.q(), graphs.k(), graphs.v(), graphs.attention());
    }
    if (!want_logits) return {};
    graphs.Run(n_layers, work_);
    return {graphs.logits(), static_cast<std::size_t>(model_->info().n_vocab)};
  }

 private:
  // Graphs for n tokens. Those for one token are kept for ever, and one set for another n: prompts
  // come in chunks of equal size.
  StageGraphs& GraphsFor(std::int64_t n) {
    std::unique_ptr<StageGraphs>& slot = n == 1 ? one_ : many_;
    if (!slot || slot->n_tokens() != n) {
      slot.reset();  // before the new one, to bound the memory
      slot = std::make_unique<StageGraphs>(model_->impl().hparams, weights_, n, n_threads_);
    }
    return *slot;
  }

  std::shared_ptr<const Model> model_;
  const Weights& weights_;
  int n_threads_;
  WorkBuffer work_;
  std::unique_ptr<StageGraphs> one_;
  std::unique_ptr<StageGraphs> many_;
};

}  // namespace

std::unique_ptr<ForwardPass> MakeCpuPass(std::shared_ptr<const Model> model, int n_threads) {
  return std::make_unique<CpuPass>(std::move(model), n_threads);
}

}  // namespace fathom
