// SPDX-License-Identifier: MIT
// The forward pass of a Runner with the dense part on a CUDA device. Attention is the caller's and
// works on host memory: q, k and v of a layer come over in one copy, its output goes back in
// another.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "backend/cuda/buffer.h"
#include "backend/cuda/cuda_backend.h"
#include "fathom/error.h"
#include "model/cuda/dense.h"
#include "model/cuda/device_weights.h"
#include "model/cuda/pinned_buffer.h"
#include "model/forward_pass.h"
#include "model/model_impl.h"

namespace fathom {
namespace {

using cuda::Check;
using cuda::DenseOps;
using cuda::DenseShape;
using cuda::DeviceBuffer;
using cuda::DeviceWeights;
using cuda::PinnedBuffer;

constexpr std::int32_t kMostRows = 1
                                   << 20;  // of a call: counts of rows and grids stay far from 2^31

// An array in device memory and its image in page-locked host memory.
template <typename T>
struct Mirrored {
  explicit Mirrored(std::int64_t n)
      : device(static_cast<std::size_t>(n)), host(static_cast<std::size_t>(n)) {}
  void ToDevice(std::int64_t n, cudaStream_t stream) const {
    Check(cudaMemcpyAsync(device.data(), host.data(), static_cast<std::size_t>(n) * sizeof(T),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync to the device");
  }
  void ToHost(std::int64_t n, cudaStream_t stream) const {
    Check(cudaMemcpyAsync(host.data(), device.data(), static_cast<std::size_t>(n) * sizeof(T),
                          cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync to the host");
  }

  DeviceBuffer<T> device;
  PinnedBuffer<T> host;
};

// Everything whose size follows the number of rows of a call.
struct Rows {
  Rows(const std::shared_ptr<const DeviceWeights>& weights, std::int32_t n)
      : ops(weights, n),
        tokens(2 * std::int64_t{n}),
        qkv(n * weights->shape().qkv_size()),
        attention(n * weights->shape().q_size()),
        logits(weights->shape().n_vocab) {}

  // Device memory that they take.
  static std::size_t Bytes(const DenseShape& shape, std::int32_t n) {
    const std::int64_t numbers =
        n * (2 + shape.qkv_size() + shape.q_size()) + std::int64_t{shape.n_vocab};
    return DenseOps::Bytes(shape, n) + static_cast<std::size_t>(numbers) * sizeof(float);
  }

  DenseOps ops;
  Mirrored<std::int32_t> tokens;  // n tokens, then their positions
  Mirrored<float> qkv;            // q, k, v of n rows each
  Mirrored<float> attention;
  Mirrored<float> logits;  // of one row
};

class CudaPass final : public ForwardPass {
 public:
  CudaPass(std::shared_ptr<const Model> model, int n_threads, std::int64_t max_tokens)
      : model_(std::move(model)),
        weights_(std::static_pointer_cast<const DeviceWeights>(
            model_->impl().OnDevice([&] { return DeviceWeights::Load(*model_, n_threads); }))) {
    RowsFor(std::max<std::int64_t>(max_tokens, 1));
  }
  // What an error left on the stream must not outlive the buffers.
  ~CudaPass() override { cuda::Ignore(cudaStreamSynchronize(stream_.get())); }
  CudaPass(const CudaPass&) = delete;
  CudaPass& operator=(const CudaPass&) = delete;

  std::span<const float> Run(std::span<const Token> tokens, std::int64_t first,
                             const AttentionFn& attention, bool want_logits) override {
    stream_.Wait();  // an earlier call that failed may still use the buffers
    Rows& rows = RowsFor(static_cast<std::int64_t>(tokens.size()));
    const auto n = static_cast<std::int32_t>(tokens.size());
    std::copy(tokens.begin(), tokens.end(), rows.tokens.host.data());
    std::iota(rows.tokens.host.data() + n, rows.tokens.host.data() + 2 * n,
              static_cast<std::int32_t>(first));
    rows.tokens.ToDevice(2 * std::int64_t{n}, stream_.get());
    rows.ops.Embed(rows.tokens.device.data(), n, stream_.get());
    const std::int32_t n_layers = weights_->shape().n_layers;
    for (std::int32_t layer = 0; layer < n_layers; ++layer) {
      RunLayer(rows, layer, n, attention, layer == n_layers - 1, want_logits);
    }
    if (!want_logits) return {};
    rows.ops.Logits(n - 1, 1, rows.logits.device.data(), stream_.get());
    rows.logits.ToHost(weights_->shape().n_vocab, stream_.get());
    stream_.Wait();
    return {rows.logits.host.data(), rows.logits.host.size()};
  }

 private:
  // Buffers for n rows or more.
  Rows& RowsFor(std::int64_t n) {
    if (n > kMostRows) {
      throw Error(ErrorCode::kUsage, std::to_string(n) +
                                         " tokens at once; on a CUDA device at most " +
                                         std::to_string(kMostRows));
    }
    if (!rows_ || rows_->ops.max_rows() < n) {
      rows_.reset();  // before the new ones, to bound the memory
      const auto count = static_cast<std::int32_t>(n);
      cuda::CheckDeviceMemory(Rows::Bytes(weights_->shape(), count),
                              "the activations of " + std::to_string(n) + " tokens at once",
                              "pass fewer tokens per call, or use device 'cpu'");
      rows_ = std::make_unique<Rows>(weights_, count);
    }
    return *rows_;
  }

  void RunLayer(Rows& rows, std::int32_t layer, std::int32_t n, const AttentionFn& attention,
                bool is_last, bool want_logits) {
    const cudaStream_t stream = stream_.get();
    const DenseShape& shape = weights_->shape();
    const std::int64_t k_at = n * shape.q_size();
    const std::int64_t v_at = k_at + n * shape.kv_size();
    float* qkv = rows.qkv.device.data();
    rows.ops.BeforeAttention(layer, n, rows.tokens.device.data() + n, qkv, qkv + k_at, qkv + v_at,
                             stream);
    rows.qkv.ToHost(n * shape.qkv_size(), stream);
    stream_.Wait();
    const float* q = rows.qkv.host.data();
    attention(layer, n, q, q + k_at, q + v_at, rows.attention.host.data());
    if (!is_last) {
      rows.attention.ToDevice(n * shape.q_size(), stream);
      rows.ops.AfterAttention(layer, n, rows.attention.device.data(), stream);
    } else if (want_logits) {  // of the last row alone: the others need no feed-forward any more
      const std::int64_t at = (n - 1) * shape.q_size();
      float* last = rows.attention.device.data() + at;
      Check(cudaMemcpyAsync(last, rows.attention.host.data() + at,
                            static_cast<std::size_t>(shape.q_size()) * sizeof(float),
                            cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync to the device");
      rows.ops.AfterAttention(layer, 1, last, stream, n - 1);
    }
  }

  std::shared_ptr<const Model> model_;
  std::shared_ptr<const DeviceWeights> weights_;
  std::unique_ptr<Rows> rows_;
  cuda::Stream stream_;
};

}  // namespace

std::unique_ptr<ForwardPass> MakeCudaPass(std::shared_ptr<const Model> model, int n_threads,
                                          std::int64_t max_tokens) {
  const std::string reason = ProbeCuda();
  if (!reason.empty()) {
    throw Error(ErrorCode::kUnsupported,
                "device 'cuda' cannot be used on this machine: " + reason + "; use device 'cpu'");
  }
  return std::make_unique<CudaPass>(std::move(model), n_threads, max_tokens);
}

}  // namespace fathom
