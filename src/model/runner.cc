// SPDX-License-Identifier: MIT
#include <limits>
#include <numeric>
#include <string>

#include "fathom/error.h"
#include "fathom/model.h"
#include "model/model_impl.h"
#include "model/stage_graph.h"

namespace fathom {
namespace {

constexpr int kMaxThreads = 512;  // GGML_MAX_N_THREADS

}  // namespace

struct Runner::Impl {
  Impl(std::shared_ptr<const Model> m, int threads)
      : model(std::move(m)), weights(model->impl().GraphWeights()), n_threads(threads) {}

  // Graphs for n tokens. Those for one token are kept for ever, and one set for another n: prompts
  // come in chunks of equal size.
  StageGraphs& GraphsFor(std::int64_t n) {
    std::unique_ptr<StageGraphs>& slot = n == 1 ? one : many;
    if (!slot || slot->n_tokens() != n) {
      slot.reset();  // before the new one, to bound the memory
      slot = std::make_unique<StageGraphs>(model->impl().hparams, weights, n, n_threads);
    }
    return *slot;
  }

  void CheckCall(std::span<const Token> tokens, std::int64_t first,
                 const AttentionFn& attention) const {
    const std::int32_t n_vocab = model->info().n_vocab;
    constexpr std::int64_t kMaxPosition = std::numeric_limits<std::int32_t>::max();
    const auto n = static_cast<std::int64_t>(tokens.size());
    if (n == 0) throw Error(ErrorCode::kUsage, "a forward pass needs at least one token");
    if (!attention) throw Error(ErrorCode::kUsage, "a forward pass needs an attention function");
    if (first < 0 || n > kMaxPosition || first > kMaxPosition - n) {
      throw Error(ErrorCode::kUsage, "positions " + std::to_string(first) + " to " +
                                         std::to_string(first + n - 1) +
                                         " are outside 0 to 2147483646");
    }
    for (const Token token : tokens) {
      if (token < 0 || token >= n_vocab) {
        throw Error(ErrorCode::kUsage, "token " + std::to_string(token) +
                                           " is outside the vocabulary 0.." +
                                           std::to_string(n_vocab - 1));
      }
    }
  }

  std::shared_ptr<const Model> model;
  const Weights& weights;
  int n_threads;
  WorkBuffer work;
  std::unique_ptr<StageGraphs> one;
  std::unique_ptr<StageGraphs> many;
};

Runner::Runner(std::shared_ptr<const Model> model, int n_threads) {
  if (!model) throw Error(ErrorCode::kUsage, "a runner needs a model");
  if (n_threads < 1 || n_threads > kMaxThreads) {
    throw Error(ErrorCode::kUsage,
                std::to_string(n_threads) + " threads; use 1 to " + std::to_string(kMaxThreads));
  }
  impl_ = std::make_unique<Impl>(std::move(model), n_threads);
}

Runner::~Runner() = default;

std::span<const float> Runner::Forward(std::span<const Token> tokens, std::int64_t first,
                                       const AttentionFn& attention, bool want_logits) {
  Impl& impl = *impl_;
  impl.CheckCall(tokens, first, attention);
  const auto n = static_cast<std::int64_t>(tokens.size());
  StageGraphs& graphs = impl.GraphsFor(n);
  std::copy(tokens.begin(), tokens.end(), graphs.tokens());
  std::iota(graphs.positions(), graphs.positions() + n, static_cast<std::int32_t>(first));
  const std::int32_t n_layers = impl.model->info().n_layers;
  for (std::int32_t layer = 0; layer < n_layers; ++layer) {
    graphs.Run(layer, impl.work);
    attention(layer, n, graphs.q(), graphs.k(), graphs.v(), graphs.attention());
  }
  if (!want_logits) return {};
  graphs.Run(n_layers, impl.work);
  return {graphs.logits(), static_cast<std::size_t>(impl.model->info().n_vocab)};
}

}  // namespace fathom
