// SPDX-License-Identifier: MIT
#include "device/session_decode.h"

#include <optional>
#include <string>
#include <utility>

#include "backend/cuda/host_copy.h"
#include "device/session_attention.h"
#include "fathom/error.h"
#include "model/cuda/dense.h"
#include "model/cuda/device_weights.h"
#include "model/model_impl.h"

namespace fathom {
namespace {

using cuda::DenseOps;
using cuda::DeviceBuffer;
using cuda::DeviceWeights;
using cuda::Graph;
using cuda::PinnedBuffer;
using cuda::SessionAttention;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

class CudaSessionDecode final : public SessionDecode {
 public:
  CudaSessionDecode(std::shared_ptr<const Model> model, RowStore* rows, int n_threads)
      : model_(std::move(model)),
        weights_(std::static_pointer_cast<const DeviceWeights>(
            model_->impl().OnDevice([&] { return DeviceWeights::Load(*model_, n_threads); }))),
        dense_(weights_, 1),
        attention_(rows, n_threads),
        token_(1),
        q_(Size(weights_->shape().q_size())),
        k_(Size(weights_->shape().kv_size())),
        v_(Size(weights_->shape().kv_size())),
        out_(Size(weights_->shape().q_size())),
        logits_(Size(weights_->shape().n_vocab)),
        host_token_(1),
        host_logits_(Size(weights_->shape().n_vocab)) {
    dense_.Prepare(1, 1);
  }
  // What an error left on the stream must not outlive the buffers.
  ~CudaSessionDecode() override { cuda::Ignore(cudaStreamSynchronize(stream_.get())); }
  CudaSessionDecode(const CudaSessionDecode&) = delete;
  CudaSessionDecode& operator=(const CudaSessionDecode&) = delete;

  void Expect(Method& method) override {
    const StepSource* source = method.step_source();
    if (source != nullptr && source->Refusal().empty()) attention_.RegisterRows();
  }

  std::string Prepare(Method& method, std::int64_t n_tokens) override {
    stream_.Wait();  // an earlier step that failed may still use the buffers
    StepSource* source = method.step_source();
    return source == nullptr ? "the method has no steps on a device"
                             : attention_.Prepare(*source, n_tokens);
  }

  std::span<const float> Step(Method& method, Token token) override {
    if (token < 0 || token >= weights_->shape().n_vocab) {
      throw Error(ErrorCode::kUsage, "token " + std::to_string(token) +
                                         " is outside the vocabulary 0.." +
                                         std::to_string(weights_->shape().n_vocab - 1));
    }
    host_token_.data()[0] = token;
    Launch();
    stream_.Wait();
    attention_.Finish(*method.step_source());
    return {host_logits_.data(), host_logits_.size()};
  }

  void Forget() override { attention_.Forget(); }

 private:
  // A recorded step, good for one recipe of the attention.
  struct Recorded {
    std::uint64_t recipe = 0;
    std::optional<Graph> graph;  // none: its kernels have run once
  };

  // The first step of a recipe runs without a graph: what CUDA loads when it is first needed may
  // not be loaded while a stream is captured. Dense steps and those that scan take turns only where
  // a session is truncated, so that two are kept.
  void Launch() {
    const std::uint64_t recipe = attention_.recipe();
    Recorded* found = recorded_[0].recipe == recipe   ? &recorded_[0]
                      : recorded_[1].recipe == recipe ? &recorded_[1]
                                                      : nullptr;
    if (found == nullptr) {
      found = &recorded_[recorded_[0].recipe < recorded_[1].recipe ? 0 : 1];
      found->graph.reset();
      Record(stream_.get());
      found->recipe = recipe;
      return;
    }
    if (!found->graph) found->graph.emplace(stream_.get(), [&](cudaStream_t s) { Record(s); });
    found->graph->Launch(stream_.get());
  }

  void Record(cudaStream_t stream) {
    cuda::CopyToDevice(token_.data(), host_token_.data(), 1, stream);
    attention_.Begin(stream);
    dense_.Embed(token_.data(), 1, stream);
    const std::int32_t n_layers = weights_->shape().n_layers;
    for (std::int32_t layer = 0; layer < n_layers; ++layer) {
      dense_.BeforeAttention(layer, 1, attention_.position(), q_.data(), k_.data(), v_.data(),
                             stream);
      attention_.Layer(layer, q_.data(), k_.data(), v_.data(), out_.data(), stream);
      dense_.AfterAttention(layer, 1, out_.data(), stream);
    }
    dense_.Logits(0, 1, logits_.data(), stream);
    attention_.End(stream);
    cuda::CopyToHost(host_logits_.data(), logits_.data(), logits_.size(), stream);
  }

  std::shared_ptr<const Model> model_;
  std::shared_ptr<const DeviceWeights> weights_;
  DenseOps dense_;
  SessionAttention attention_;
  DeviceBuffer<Token> token_;
  DeviceBuffer<float> q_, k_, v_, out_, logits_;
  PinnedBuffer<Token> host_token_;
  PinnedBuffer<float> host_logits_;
  Recorded recorded_[2];
  cuda::Stream stream_;
};

}  // namespace

std::unique_ptr<SessionDecode> MakeSessionDecode(std::shared_ptr<const Model> model, RowStore* rows,
                                                 int n_threads) {
  return std::make_unique<CudaSessionDecode>(std::move(model), rows, n_threads);
}

}  // namespace fathom
