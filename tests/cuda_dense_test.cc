// SPDX-License-Identifier: MIT
// The dense operations on a CUDA device where no model is needed: greedy choices, and passes as
// graphs. tests/cuda_model_test.cc compares them with the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/cuda_backend.h"
#include "model/cuda/dense.h"
#include "support/error_of.h"

namespace fathom::test {
namespace {

class CudaDense : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = ProbeCuda();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

std::shared_ptr<const cuda::DeviceWeights> TinyWeights() {
  cuda::DenseShape shape;
  shape.n_layers = 1;
  shape.n_embd = shape.n_ff = 64;
  shape.n_vocab = 3001;
  shape.heads = {4, 2, 16};
  shape.tied_output = true;
  shape.rms_eps = 1e-6F;
  shape.rope.n_dims = 16;
  return cuda::DeviceWeights::Random(shape, 1);
}

TEST_F(CudaDense, GreedyTakesTheFirstOfTheBest) {
  cuda::DenseOps ops(TinyWeights(), 4);
  std::vector<float> logits(4 * 3001, -1.0F);
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  logits[2000] = logits[1500] = logits[2999] = 3;
  std::fill_n(logits.begin() + 3001, 3001, kNan);
  logits[2 * 3001 + 7] = kNan;
  logits[2 * 3001 + 9] = -0.0F;
  logits[2 * 3001 + 3000] = 0.0F;
  std::fill_n(logits.begin() + 3 * 3001, 3001, -std::numeric_limits<float>::infinity());
  logits[3 * 3001] = kNan;
  const cuda::Stream stream;
  const cuda::DeviceBuffer<float> device{std::span<const float>(logits)};
  const cuda::DeviceBuffer<std::int32_t> best(4);
  ops.Greedy(device.data(), 4, best.data(), stream.get());
  std::vector<std::int32_t> result(4);
  stream.Wait();
  cuda::Check(cudaMemcpy(result.data(), best.data(), 16, cudaMemcpyDeviceToHost), "cudaMemcpy");
  EXPECT_EQ(result, (std::vector<std::int32_t>{1500, 0, 9, 1}));
}

// A whole pass as a graph gives the bits of the same calls one by one.
TEST_F(CudaDense, PassesCanBeCaptured) {
  cuda::DenseShape shape = cuda::Qwen3_8B();
  shape.n_layers = 3;
  shape.n_embd = 512;
  shape.n_ff = 1024;
  shape.n_vocab = 5000;
  shape.heads = {8, 2, 64};
  shape.rope.n_dims = 64;
  constexpr int kMost = 6;
  cuda::DenseOps ops(cuda::DeviceWeights::Random(shape, 7), kMost);
  const cuda::Stream stream;
  const std::vector<std::int32_t> tokens = {17, 4999, 0, 5, 6, 7};
  const std::vector<std::int32_t> places = {5, 70000, 6, 0, 1, 2};
  const cuda::DeviceBuffer<std::int32_t> in{std::span<const std::int32_t>(tokens)};
  const cuda::DeviceBuffer<std::int32_t> positions{std::span<const std::int32_t>(places)};
  const cuda::DeviceBuffer<std::int32_t> best(kMost);
  const cuda::DeviceBuffer<float> q(kMost * 512), k(kMost * 128), v(kMost * 128);
  const cuda::DeviceBuffer<float> logits(kMost * 5000);
  const auto result = [&] {
    std::vector<float> host(kMost * 5000);
    stream.Wait();
    cuda::Check(
        cudaMemcpy(host.data(), logits.data(), host.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    return host;
  };
  for (const std::int32_t n : {1, 3, 6}) {  // by our kernel, and by cuBLASLt
    ops.Prepare(n, n);
    const auto pass = [&](cudaStream_t s) {
      ops.Embed(in.data(), n, s);
      for (std::int32_t layer = 0; layer < 3; ++layer) {
        ops.BeforeAttention(layer, n, positions.data(), q.data(), k.data(), v.data(), s);
        ops.AfterAttention(layer, n, q.data(), s);  // any vectors will do
      }
      ops.Logits(0, n, logits.data(), s);
      ops.Greedy(logits.data(), n, best.data(), s);
    };
    const auto clear = [&] {
      cuda::Check(cudaMemset(logits.data(), 0, logits.size() * sizeof(float)), "cudaMemset");
      cuda::Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    };
    clear();
    pass(stream.get());
    const std::vector<float> expected = result();
    cuda::Graph graph(stream.get(), pass);
    clear();
    graph.Launch(stream.get());
    EXPECT_EQ(result(), expected) << n;
    EXPECT_NE(expected[0], 0.0F);
  }
}

TEST_F(CudaDense, RefusesWhatItHasNoRoomOrKernelFor) {
  cuda::DenseShape vast = cuda::Qwen3_8B();
  vast.n_vocab = 2000000000;  // 30 TiB of embeddings and outputs
  std::string text = ErrorOf(ErrorCode::kNoMemory, [&] { cuda::DeviceWeights::Random(vast, 1); });
  EXPECT_NE(text.find("GiB of device memory"), std::string::npos) << text;
  EXPECT_NE(text.find("choose a smaller model"), std::string::npos) << text;
  cuda::DenseShape odd = cuda::Qwen3_8B();
  odd.n_ff = 12289;
  text = ErrorOf(ErrorCode::kUnsupported, [&] { cuda::DeviceWeights::Random(odd, 1); });
  EXPECT_NE(text.find("multiples of 8"), std::string::npos) << text;
  EXPECT_NE(text.find("4096 and 12289"), std::string::npos) << text;
  text = ErrorOf(ErrorCode::kUsage, [] { cuda::DenseOps(TinyWeights(), 0); });
  EXPECT_NE(text.find("0 rows"), std::string::npos) << text;
}

}  // namespace
}  // namespace fathom::test
