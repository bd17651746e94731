// SPDX-License-Identifier: MIT
// Runs a model by Fathom and by libllama side by side.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fathom/model.h"
#include "support/dense_attention.h"
#include "support/ggml_attention.h"
#include "support/llama_reference.h"
#include "support/model_files.h"

namespace fathom::testing {

inline constexpr int kThreads = 2;
inline constexpr std::size_t kChunk = 512;

// A runner with its position; the attention is the caller's.
struct Session {
  Session(std::shared_ptr<const Model> model, AttentionFn fn, std::size_t chunk_size = kChunk)
      : attention(std::move(fn)), runner(std::move(model), kThreads), chunk(chunk_size) {}

  std::span<const float> Feed(std::span<const Token> tokens) {
    std::span<const float> logits;
    while (!tokens.empty()) {
      const std::size_t n = std::min(chunk, tokens.size());
      logits = runner.Forward(tokens.first(n), position, attention, n == tokens.size());
      position += static_cast<std::int64_t>(n);
      tokens = tokens.subspan(n);
    }
    return logits;
  }

  AttentionFn attention;
  Runner runner;
  std::size_t chunk;  // tokens per call of Forward
  std::int64_t position = 0;
};

inline Token Best(std::span<const float> logits) {
  return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The distance between the two largest logits.
inline float Margin(std::span<const float> logits) {
  std::vector<float> sorted(logits.begin(), logits.end());
  std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
  return sorted[0] - sorted[1];
}

inline double Deviation(std::span<const float> a, std::span<const float> b) {
  double squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) squares += std::pow(double{a[i]} - b[i], 2);
  return std::sqrt(squares / static_cast<double>(a.size()));
}

struct CompareOptions {
  std::size_t n_prompt = 512;
  int n_greedy = 128;
  std::size_t chunk = kChunk;  // tokens per call, of both
  bool repack = true;          // libllama's weights; ours are repacked in calls of one token only
};

// What came out of feeding both with the prompt and then with libllama's greedy choices.
struct Comparison {
  double prompt_error = 0;    // relative L2 of the logits after the prompt
  double worst_error = 0;     // the same, largest over prompt and generated tokens
  int first_difference = -1;  // generated token at which our own greedy choice differs
  float margin = 0;           // between libllama's two best logits there
  double deviation = 0;       // root mean square difference of the two models' logits there
};

inline Comparison Compare(const std::string& path, const CompareOptions& options,
                          const std::function<AttentionFn(const ModelInfo&)>& make_attention) {
  Comparison result;
  const auto model = Model::Open(path);
  const std::vector<Token> prompt = NovelTokens(*model, options.n_prompt);
  LlamaReference reference(path, static_cast<int>(options.n_prompt) + options.n_greedy + 8,
                           GGML_TYPE_F16, options.repack);
  EXPECT_TRUE(reference.ok());
  if (!reference.ok()) return result;
  for (std::size_t at = 0; at < prompt.size(); at += options.chunk) {
    const std::size_t n = std::min(options.chunk, prompt.size() - at);
    EXPECT_TRUE(reference.Decode(std::span(prompt).subspan(at, n)));
  }
  Session session(model, make_attention(model->info()), options.chunk);
  std::span<const float> ours = session.Feed(prompt);
  result.prompt_error = result.worst_error = RelativeL2(ours, reference.Logits());
  for (int i = 0; i < options.n_greedy; ++i) {
    const Token token = Best(reference.Logits());
    if (Best(ours) != token && result.first_difference < 0) {
      result.first_difference = i;
      result.margin = Margin(reference.Logits());
      result.deviation = Deviation(ours, reference.Logits());
    }
    EXPECT_TRUE(reference.Decode(std::span(&token, 1)));
    ours = session.Feed(std::span(&token, 1));
    result.worst_error = std::max(result.worst_error, RelativeL2(ours, reference.Logits()));
  }
  std::cout << "[ measured ] relative L2 of the logits: " << result.prompt_error << " after "
            << options.n_prompt << " tokens, at most " << result.worst_error << " over "
            << options.n_greedy << " more\n";
  return result;
}

// With libllama's own attention operations nothing may differ.
inline void ExpectIdentical(const std::string& path, const CompareOptions& options) {
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is absent: scripts/get-model fetches it";
  }
  std::unique_ptr<GgmlAttention> attention;
  const Comparison c = Compare(path, options, [&](const ModelInfo& info) {
    attention =
        std::make_unique<GgmlAttention>(info, options.n_prompt + options.n_greedy + 8, kThreads);
    return attention->Fn();
  });
  EXPECT_LT(c.worst_error, 1e-6);
  EXPECT_EQ(c.first_difference, -1);
}

// With another attention the 8-bit activations of quantized models amplify the last bits,
// differently on each processor. Where the two part, their best logits must be as close as that
// noise makes them: within 6 of its standard deviations, the difference of two logits having the
// square root of 2 of one.
inline void ExpectClose(const std::string& path, const CompareOptions& options, double bound) {
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is absent: scripts/get-model fetches it";
  }
  std::unique_ptr<DenseAttention> attention;
  const Comparison c = Compare(path, options, [&](const ModelInfo& info) {
    attention = std::make_unique<DenseAttention>(info, DenseAttention::CacheType::kF16);
    return attention->Fn();
  });
  EXPECT_LT(c.prompt_error, bound);
  EXPECT_LT(c.worst_error, 3 * bound);
  if (c.first_difference >= 0) {
    EXPECT_LT(c.margin, 6 * std::sqrt(2.0) * c.deviation)
        << "parted at generated token " << c.first_difference;
  }
}

}  // namespace fathom::testing
