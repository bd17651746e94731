// SPDX-License-Identifier: MIT
// The product against libllama: a session decoding densely and libllama with its plain attention
// get the same prompt and then libllama's greedy tokens.
//
// Their attentions round differently (ours is fp32; libllama rounds queries and probabilities to
// fp16), and models with quantized weights amplify that: activations are rounded to 8 bits, so the
// last bit of a sum can move one by 1/127 of its block's maximum. How much is libllama's own
// affair, so it is the yardstick: its flash attention against its plain attention, in the same run.
// That everything but attention is equal bit for bit is the promise of llama_equality_test.
#include <gtest/gtest.h>

#include <cmath>

#include "fathom/session.h"
#include "support/llama_equality.h"

namespace fathom::testing {
namespace {

constexpr int kGreedy = 128;

// Root mean square of the difference of two logit vectors.
double RmsDifference(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

// strict: no greedy choice may differ at all, as measured for the bundled model.
void CompareSession(const std::string& file, std::size_t n_prompt, bool strict = false) {
  const std::string path = ModelPath(file);
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is absent: scripts/get-model fetches it";
  }
  const auto model = Model::Open(path);
  const std::vector<Token> prompt = NovelTokens(*model, n_prompt);
  const int n_ctx = static_cast<int>(n_prompt) + kGreedy + 8;
  LlamaReference plain(path, n_ctx, GGML_TYPE_F16);
  LlamaReference flash(path, n_ctx, GGML_TYPE_F16, true, true);
  ASSERT_TRUE(plain.ok() && flash.ok());
  for (std::size_t at = 0; at < prompt.size(); at += kChunk) {
    const auto chunk = std::span(prompt).subspan(at, std::min(kChunk, prompt.size() - at));
    ASSERT_TRUE(plain.Decode(chunk) && flash.Decode(chunk));
  }
  SessionOptions options;
  options.ctx_size = n_ctx;
  options.method = "dense";
  options.n_threads = kThreads;
  fathom::Session session(model, options);
  session.Prefill(prompt);

  const double prompt_error = RelativeL2(session.logits(), plain.Logits());
  const double prompt_yardstick = RelativeL2(flash.Logits(), plain.Logits());
  double mean_error = prompt_error / (kGreedy + 1);
  double mean_yardstick = prompt_yardstick / (kGreedy + 1);
  int differ = 0;
  for (int i = 0; i < kGreedy; ++i) {
    const Token token = Best(plain.Logits());
    if (Best(session.logits()) != token) {
      ++differ;
      // Two logits closer than libllama's own attentions are from each other (3 sigma) are a tie.
      const double tie = std::max(0.05, 3 * RmsDifference(flash.Logits(), plain.Logits()));
      EXPECT_LT(Margin(plain.Logits()), tie) << "parted at generated token " << i;
    }
    ASSERT_TRUE(plain.Decode(std::span(&token, 1)) && flash.Decode(std::span(&token, 1)));
    session.Decode(token);
    mean_error += RelativeL2(session.logits(), plain.Logits()) / (kGreedy + 1);
    mean_yardstick += RelativeL2(flash.Logits(), plain.Logits()) / (kGreedy + 1);
  }
  std::cout << "[ measured ] " << file << ", " << n_prompt << " tokens: relative L2 of the logits "
            << prompt_error << " after the prompt, mean " << mean_error << " over " << kGreedy
            << " more (libllama's flash attention: " << prompt_yardstick << ", mean "
            << mean_yardstick << "); " << differ << " of " << kGreedy << " greedy choices differ\n";
  if (strict) {
    EXPECT_EQ(differ, 0);
  }
  EXPECT_LT(mean_error, std::max(0.01, 1.25 * mean_yardstick));
}

TEST(SessionLlama, Bundled512) { CompareSession("fathom-recall-15m-q8_0.gguf", 512, true); }
TEST(SessionLlamaSlow, Bundled4096) { CompareSession("fathom-recall-15m-q8_0.gguf", 4096, true); }
TEST(SessionLlamaSlow, SmolLm2At512) { CompareSession("SmolLM2-135M-Instruct-Q4_1.gguf", 512); }
TEST(SessionLlamaSlow, SmolLm2At4096) { CompareSession("SmolLM2-135M-Instruct-Q4_1.gguf", 4096); }
TEST(SessionLlamaSlow, Qwen25CoderAt512) {
  CompareSession("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 512);
}
TEST(SessionLlamaSlow, Qwen25CoderAt4096) {
  CompareSession("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 4096);
}

}  // namespace
}  // namespace fathom::testing
