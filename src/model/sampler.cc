// SPDX-License-Identifier: MIT
#include <llama-cpp.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fathom/error.h"
#include "fathom/model.h"
#include "model/ggml_runtime.h"

namespace fathom {
namespace {

void CheckOptions(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    throw Error(ErrorCode::kUsage, "temperature " + std::to_string(options.temperature) +
                                       "; use 0 (greedy) or a positive number");
  }
  if (options.top_k < 0) {
    throw Error(ErrorCode::kUsage,
                "top_k " + std::to_string(options.top_k) + "; use 0 (off) or a positive number");
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw Error(ErrorCode::kUsage,
                "top_p " + std::to_string(options.top_p) + "; use a value in (0, 1], 1 is off");
  }
}

llama_sampler_ptr MakeChain(const SamplingOptions& options) {
  llama_sampler_ptr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
  const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(chain.get(), sampler); };
  if (options.temperature == 0) {
    add(llama_sampler_init_greedy());  // of equal logits it takes the smallest id
    return chain;
  }
  if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
  if (options.top_p < 1) add(llama_sampler_init_top_p(options.top_p, /*min_keep=*/1));
  add(llama_sampler_init_temp(options.temperature));
  // LLAMA_DEFAULT_SEED asks libllama for a random seed; ours is always the caller's.
  const bool is_magic = options.seed == LLAMA_DEFAULT_SEED;
  add(llama_sampler_init_dist(is_magic ? options.seed - 1 : options.seed));
  return chain;
}

}  // namespace

struct Sampler::Impl {
  llama_sampler_ptr chain;
  std::vector<llama_token_data> candidates;  // kept, to allocate once
};

Sampler::Sampler(const SamplingOptions& options) : impl_(std::make_unique<Impl>()) {
  InitGgml();
  CheckOptions(options);
  impl_->chain = MakeChain(options);
}

Sampler::~Sampler() = default;

Token Sampler::Sample(std::span<const float> logits) {
  if (logits.empty()) {
    throw Error(ErrorCode::kUsage, "no logits to sample from; ask Forward for them");
  }
  std::vector<llama_token_data>& candidates = impl_->candidates;
  candidates.resize(logits.size());
  float best = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      throw Error(ErrorCode::kInternal, "the logit of token " + std::to_string(i) +
                                            " is not a number; the model file may be damaged");
    }
    best = std::max(best, logits[i]);
    candidates[i] = {static_cast<llama_token>(i), logits[i], 0.0F};
  }
  if (!std::isfinite(best)) {
    throw Error(ErrorCode::kInternal,
                "the largest logit is not finite; the model file may be damaged");
  }
  llama_token_data_array array = {candidates.data(), candidates.size(), /*selected=*/-1,
                                  /*sorted=*/false};
  llama_sampler_apply(impl_->chain.get(), &array);
  if (array.selected < 0 || array.selected >= static_cast<std::int64_t>(array.size)) {
    throw Error(ErrorCode::kInternal, "libllama's sampler chose no token");
  }
  const Token token = array.data[array.selected].id;
  llama_sampler_accept(impl_->chain.get(), token);
  return token;
}

}  // namespace fathom
