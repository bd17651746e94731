// SPDX-License-Identifier: MIT
// Session on the bundled model: prefill and decode agree, truncation forgets, methods can be
// swapped, memory is accounted.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "fathom/fathom.h"
#include "support/compare.h"

namespace fathom {
namespace {

const std::string kFolder = std::string(FATHOM_SOURCE_DIR) + "/models/";

// Relative L2 between logits of computations that differ in rounding alone. ggml quantizes
// activations to 8 bits, so that a difference in the last bit of a sum can move an activation by
// 1/127 of its block's maximum; `ref` and `cpu` attention differ by 2 % on this model for that
// reason alone.
constexpr double kNoise = 0.05;

class SessionTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_model = Model::Open(kFolder + "fathom-recall-15m-q8_0.gguf");
    std::ifstream file(kFolder + "questions/single-needle-4k.txt", std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    novel = shared_model->Tokenize(text, false);
    ASSERT_GT(novel.size(), 3000U);
  }
  static void TearDownTestSuite() { shared_model.reset(); }

  static Session NewSession(const std::string& method = "dense", std::int64_t ctx = 4096,
                            std::int32_t chunk = 512) {
    SessionOptions options;
    options.ctx_size = ctx;
    options.method = method;
    options.chunk = chunk;
    return Session(shared_model, options);
  }
  static std::span<const Token> First(std::size_t n) { return std::span(novel).first(n); }
  static std::vector<float> Copy(std::span<const float> x) { return {x.begin(), x.end()}; }

  static std::shared_ptr<const Model> shared_model;
  static std::vector<Token> novel;
};
std::shared_ptr<const Model> SessionTest::shared_model;
std::vector<Token> SessionTest::novel;

TEST_F(SessionTest, DecodeEqualsPrefill) {
  Session prefilled = NewSession();
  prefilled.Prefill(First(700));
  Session decoded = NewSession();
  decoded.Prefill(First(600));
  for (std::size_t i = 600; i < 700; ++i) decoded.Decode(novel[i]);
  EXPECT_TRUE(test::Near(Copy(decoded.logits()), Copy(prefilled.logits()), kNoise));
}

TEST_F(SessionTest, ChunkSizeDoesNotMatter) {
  Session reference = NewSession();
  reference.Prefill(First(300));
  for (const std::int32_t chunk : {1, 7, 64, 299, 300, 301}) {
    Session session = NewSession("dense", 512, chunk);
    session.Prefill(First(300));
    EXPECT_TRUE(test::Near(Copy(session.logits()), Copy(reference.logits()), kNoise)) << chunk;
  }
}

TEST_F(SessionTest, PrefillInPiecesEqualsAtOnce) {
  Session whole = NewSession();
  whole.Prefill(First(520));
  Session pieces = NewSession();
  pieces.Prefill(First(512));
  pieces.Prefill(First(520).subspan(512));
  EXPECT_TRUE(test::Near(Copy(pieces.logits()), Copy(whole.logits()), kNoise));
}

TEST_F(SessionTest, TruncateForgets) {
  for (const char* spec :
       {"dense", "exact:k=128", "fathom:bits=28,k=128", "fathom:preset=paper,budget=48,k=128"}) {
    Session session = NewSession(spec);
    session.Prefill(First(2000));
    session.BuildIndex();
    const auto answer = [&] {
      session.Prefill(First(2100).subspan(2000));
      return Generate(session, {80, {}}).tokens;
    };
    const auto first = answer();
    session.Truncate(2000);
    EXPECT_EQ(answer(), first) << spec;
    EXPECT_EQ(session.n_tokens(), 2100 + static_cast<std::int64_t>(first.size()) - 1) << spec;
  }
}

TEST_F(SessionTest, SetMethodIndexesTheSameRows) {
  Session session = NewSession("fathom:bits=28,k=128");
  session.Prefill(First(2000));
  session.BuildIndex();
  const auto first = Generate(session, {8, {}}).tokens;
  session.Truncate(1999);
  session.SetMethod("dense");
  session.SetMethod("fathom:bits=28,k=128");
  session.BuildIndex();
  session.Decode(novel[1999]);
  EXPECT_GT(session.method().MemoryBytes(), 0);
  EXPECT_THROW(session.SetMethod("fathom:k=3"), Error);
  EXPECT_EQ(
      session.method().spec(),
      "fathom:preset=own,bits=28,budgets=flat,store=mean,meanbits=4,weights=lsq,"
      "range=measured,plan=common,basis=raw,k=128,min=1024,dense=0,residual=block,values=all");
}

TEST_F(SessionTest, SparseWithAllTokensEqualsDense) {
  std::vector<float> dense;
  for (const char* spec : {"dense", "exact:k=4096", "fathom:bits=28,k=4096", "random:k=4096"}) {
    Session session = NewSession(spec);
    session.Prefill(First(1500));
    session.BuildIndex();
    for (std::size_t i = 1500; i < 1520; ++i) session.Decode(novel[i]);
    if (dense.empty()) dense = Copy(session.logits());
    EXPECT_EQ(Copy(session.logits()), dense) << spec;
  }
}

TEST_F(SessionTest, SparseIsNearDenseAndRandomIsNot) {
  const auto logits = [&](const char* spec) {
    Session session = NewSession(spec);
    session.Prefill(First(3000));
    session.BuildIndex();
    for (std::size_t i = 3000; i < 3010; ++i) session.Decode(novel[i]);
    EXPECT_GT(session.method().counters().sparse_calls, 0) << spec;
    return Copy(session.logits());
  };
  Session session = NewSession("dense");
  session.Prefill(First(3010));
  const auto dense = Copy(session.logits());
  const auto error = [&](const std::vector<float>& x) {
    return test::Compare(std::span<const float>(x), std::span<const float>(dense)).relative_l2;
  };
  const double fathom = error(logits("fathom:bits=28,k=512"));
  const double exact = error(logits("exact:k=512"));
  const double random = error(logits("random:k=512"));
  EXPECT_LT(fathom, 0.2);
  EXPECT_LT(fathom, 2 * exact + 0.02);
  EXPECT_GT(random, 2 * fathom);
}

TEST_F(SessionTest, MemoryIsTheClosedForm) {
  Session session = NewSession("fathom:bits=28,k=512");
  session.Prefill(First(2000));
  session.BuildIndex();
  EXPECT_EQ(session.rows().MemoryBytes(), 6 * 2 * 2000 * 2 * 128 * 2);
  // 31 finished blocks take one segment of 64 blocks in each of 6 layers and 2 KV heads.
  // The residual adds fp16 mean values of each finished block.
  EXPECT_EQ(session.method().MemoryBytes(),
            6 * 2 * (64 * 128 * 4 * 8 + 64 * 128 / 2) + 6 * 2 * 31 * 128 * 2);
}

TEST_F(SessionTest, ContextIsALimitWithARemedy) {
  Session session = NewSession("dense", 64);
  try {
    session.Prefill(First(65));
    FAIL() << "65 tokens fitted a context of 64";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_STREQ(
        error.what(),
        "65 tokens do not fit the context of 64 by 1; use -c 65 or more, or shorten the input");
  }
  EXPECT_EQ(session.n_tokens(), 0);
  session.Prefill(First(64));
  EXPECT_THROW(session.Decode(novel[64]), Error);
  const Generation generation = Generate(session, {10, {}});
  EXPECT_EQ(generation.stop, StopReason::kContext);
  EXPECT_EQ(generation.tokens.size(), 1U);
}

TEST_F(SessionTest, CancelledPrefillKeepsWholeChunks) {
  Session session = NewSession("dense", 4096, 128);
  EXPECT_THROW(
      session.Prefill(First(1000), [](std::int64_t done, std::int64_t) { return done < 300; }),
      Error);
  EXPECT_EQ(session.n_tokens(), 384);
  session.Prefill(First(1000).subspan(384));
  Session whole = NewSession("dense", 4096, 128);
  whole.Prefill(First(1000));
  EXPECT_TRUE(test::Near(Copy(session.logits()), Copy(whole.logits()), kNoise));
}

TEST_F(SessionTest, OptionsOutOfRangeAreRefused) {
  const auto code = [](const SessionOptions& options) {
    try {
      const Session session(shared_model, options);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  SessionOptions options;
  options.ctx_size = -1;
  EXPECT_EQ(code(options), ErrorCode::kUsage);
  options = {};
  options.chunk = 0;
  EXPECT_EQ(code(options), ErrorCode::kUsage);
  options = {};
  options.ctx_size = std::int64_t{1} << 28;
  EXPECT_EQ(code(options), ErrorCode::kNoMemory);
  options = {};
  options.backend = "cpu/sse9";
  EXPECT_EQ(code(options), ErrorCode::kUsage);
  options = {};
  options.method = "fathom:k=1";
  EXPECT_EQ(code(options), ErrorCode::kUsage);
}

}  // namespace
}  // namespace fathom
