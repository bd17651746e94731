// SPDX-License-Identifier: MIT
#include <limits>
#include <string>
#include <utility>

#include "fathom/error.h"
#include "fathom/model.h"
#include "model/forward_pass.h"

namespace fathom {
namespace {

constexpr int kMaxThreads = 512;  // GGML_MAX_N_THREADS

std::unique_ptr<ForwardPass> MakePass(std::shared_ptr<const Model> model, int n_threads,
                                      Device device, std::int64_t max_tokens) {
  if (device == Device::kCpu) return MakeCpuPass(std::move(model), n_threads);
#ifdef FATHOM_CUDA
  return MakeCudaPass(std::move(model), n_threads, max_tokens);
#else
  static_cast<void>(max_tokens);
  throw Error(ErrorCode::kUnsupported,
              "device 'cuda': this build has no CUDA; build with -DFATHOM_CUDA=ON, or use device "
              "'cpu'");
#endif
}

}  // namespace

struct Runner::Impl {
  Impl(const std::shared_ptr<const Model>& model, int n_threads, Device device,
       std::int64_t max_tokens)
      : n_vocab(model->info().n_vocab), pass(MakePass(model, n_threads, device, max_tokens)) {}

  void CheckCall(std::span<const Token> tokens, std::int64_t first,
                 const AttentionFn& attention) const {
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

  std::int32_t n_vocab;
  std::unique_ptr<ForwardPass> pass;
};

Runner::Runner(std::shared_ptr<const Model> model, int n_threads, Device device,
               std::int64_t max_tokens) {
  if (!model) throw Error(ErrorCode::kUsage, "a runner needs a model");
  if (n_threads < 1 || n_threads > kMaxThreads) {
    throw Error(ErrorCode::kUsage,
                std::to_string(n_threads) + " threads; use 1 to " + std::to_string(kMaxThreads));
  }
  impl_ = std::make_unique<Impl>(model, n_threads, device, max_tokens);
}

Runner::~Runner() = default;

std::span<const float> Runner::Forward(std::span<const Token> tokens, std::int64_t first,
                                       const AttentionFn& attention, bool want_logits) {
  impl_->CheckCall(tokens, first, attention);
  return impl_->pass->Run(tokens, first, attention, want_logits);
}

}  // namespace fathom
