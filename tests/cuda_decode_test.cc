// SPDX-License-Identifier: MIT
// Sessions whose decode steps are made on the device, from the token to the logits, against the
// same sessions with attention on the CPU. The order of sums differs, and with it, rounded to bf16,
// what scans choose near their limits; cuda_session_steps.cc compares the attention itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fathom/fathom.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/temp_dir.h"
// Last: they say testing for a namespace of ours.
#include "support/gguf_fixture.h"
#include "support/model_files.h"

namespace fathom::testing {
namespace {

// Relative L2 of logits: of steps that attend to everything, and of those that scan.
constexpr double kSums = 0.01;
constexpr double kChoice = 0.1;

class CudaDecode : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const BackendInfo& info : ListBackends()) {
      if (info.name == "cuda" && !info.reason.empty()) GTEST_SKIP() << info.reason;
    }
  }
};

// Three layers of two KV heads, each of two query heads.
const std::shared_ptr<const Model>& Tiny() {
  static const std::shared_ptr<const Model> model = [] {
    TinyModel spec;
    spec.architecture = "qwen3";
    spec.n_layers = 3;
    spec.n_embd = 64;
    spec.head_dim = 64;
    const ScratchDir dir;  // the mapping outlives the name
    const std::string path = dir.File("model.gguf");
    EXPECT_TRUE(WriteTinyModel(spec, path));
    return Model::Open(path);
  }();
  return model;
}

SessionOptions Options(const std::string& method, const std::string& decode_attention) {
  SessionOptions options;
  options.ctx_size = 512;
  options.device = "cuda";
  options.decode_attention = decode_attention;
  options.method = method;
  options.n_threads = 2;
  return options;
}

// The same session twice, attending in either place.
class Both {
 public:
  explicit Both(const std::string& method)
      : device_(Tiny(), Options(method, "device")), cpu_(Tiny(), Options(method, "cpu")) {}

  template <typename Fn>
  void Each(const Fn& fn) {
    fn(device_);
    fn(cpu_);
  }
  // n tokens that have not been seen, as a prompt.
  void Prefill(std::int64_t n) {
    std::vector<Token> tokens;
    for (std::int64_t i = 0; i < n; ++i) tokens.push_back(Next());
    Each([&](Session& s) { s.Prefill(tokens); });
  }
  void Decode(int n, const std::string& where = "device") {
    for (int i = 0; i < n; ++i) {
      const Token token = Next();
      const std::int64_t sparse = device_.method().counters().sparse_calls;
      Each([&](Session& s) { s.Decode(token); });
      EXPECT_EQ(device_.decode_attention(), where);
      EXPECT_EQ(cpu_.decode_attention(), "cpu");
      const bool scans = device_.method().counters().sparse_calls > sparse;
      EXPECT_TRUE(test::Near(std::vector<float>(device_.logits().begin(), device_.logits().end()),
                             std::vector<float>(cpu_.logits().begin(), cpu_.logits().end()),
                             scans ? kChoice : kSums))
          << device_.n_tokens() << " tokens";
    }
  }
  Session& device() { return device_; }

 private:
  Token Next() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<Token>((state_ >> 33) % static_cast<std::uint64_t>(Tiny()->info().n_vocab));
  }

  Session device_, cpu_;
  std::uint64_t state_ = 7;
};

constexpr const char* kMethod = "fathom:k=100,min=128";

TEST_F(CudaDecode, FollowsASession) {
  Both both(kMethod);
  both.Decode(3);  // a session may begin with a step
  both.Prefill(200);
  both.Each([](Session& s) { s.BuildIndex(); });
  both.Decode(2);
  both.Prefill(48);
  both.Decode(6);  // 256 tokens end a block
  EXPECT_EQ(both.device().times().device_decode_tokens, 11);
  EXPECT_EQ(both.device().times().decode_tokens, 11);
  EXPECT_EQ(both.device().times().decode_attention_s, 0);
  EXPECT_GT(both.device().method().counters().mean_read_bits(), 10);

  both.Each([](Session& s) { s.Truncate(230); });
  both.Decode(3);
  both.Each([](Session& s) { s.SetMethod("dense"); });
  both.Decode(2);
  both.Each([](Session& s) {
    s.SetMethod("fathom:k=128,min=128,residual=off");
    s.BuildIndex();
  });
  both.Decode(2);
  both.Prefill(150);
  both.Each([](Session& s) { s.BuildIndex(); });  // made anew
  both.Decode(2);
}

TEST_F(CudaDecode, OtherMethodsAttendOnTheCpu) {
  Both both("sparq:k=100,min=128");
  both.Prefill(100);
  both.Decode(2);
  both.Prefill(100);
  both.Decode(2, "cpu: the device has no scan of it");
  both.Each([](Session& s) {
    s.SetMethod(kMethod);
    s.BuildIndex();
  });
  both.Decode(2);
}

TEST_F(CudaDecode, ABadTokenChangesNothing) {
  Both both(kMethod);
  both.Prefill(200);
  both.Decode(1);
  Session& session = both.device();
  const std::int64_t n = session.n_tokens();
  test::ErrorOf(ErrorCode::kUsage, [&] { session.Decode(Tiny()->info().n_vocab); });
  EXPECT_EQ(session.n_tokens(), n);
  both.Decode(2);
}

// A session that was prefilled by the CPU and kept goes on in both places as it would there.
TEST_F(CudaDecode, GoesOnFromDisk) {
  const test::TempDir dir;
  SessionFolder folder(dir.path() / "sessions");
  const auto model = Model::Open(BundledPath());
  const std::vector<Token> tokens = NovelTokens(*model, 520);
  SessionOptions options = Options("fathom:k=128,min=256", "device");
  options.ctx_size = 1024;
  options.device = "cpu";
  std::vector<Token> expected;
  {
    StoredSession stored(folder, "kept", model);
    const auto session = stored.Resume(options);
    session->Prefill(std::span(tokens).first(508));
    session->BuildIndex();
    stored.Save(*session);
    expected = Generate(*session, {9, {}}).tokens;
    EXPECT_EQ(session->decode_attention(), "cpu");
  }
  std::vector<Token> actual;
  for (const char* device : {"cuda", "cpu"}) {  // then over the rows that the device wrote
    options.device = device;
    StoredSession stored(folder, "kept", model);
    const auto session = stored.Resume(options);
    const auto more = Generate(*session, {actual.empty() ? 6 : 3, {}}).tokens;
    actual.insert(actual.end(), more.begin(), more.end());
    session->Decode(more.back());
    EXPECT_EQ(session->decode_attention(), options.device == "cpu" ? "cpu" : "device");
    EXPECT_GT(session->method().counters().sparse_calls, 0);
    stored.Save(*session);
  }
  EXPECT_EQ(actual, expected);
}

TEST(DecodeAttention, OtherPlacesAreRefused) {
  SessionOptions options;
  options.ctx_size = 64;
  options.decode_attention = "gpu";
  const std::string error = test::ErrorOf(ErrorCode::kUsage, [&] { Session(Tiny(), options); });
  EXPECT_NE(error.find("'gpu'; valid places: device, cpu"), std::string::npos) << error;
}

}  // namespace
}  // namespace fathom::testing
