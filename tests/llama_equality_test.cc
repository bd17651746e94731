// SPDX-License-Identifier: MIT
// The forward pass against libllama's own, on the bundled model and on random models of every
// supported kind.
#include <gtest/gtest.h>

#include "support/gguf_fixture.h"
#include "support/llama_equality.h"

namespace fathom::testing {
namespace {

TEST(LlamaEquality, BundledModelIsIdentical) { ExpectIdentical(BundledPath(), {}); }

TEST(LlamaEquality, BundledModelWithPlainAttention) { ExpectClose(BundledPath(), {}, 0.01); }

// Random models: logits at several positions, after chunks of several sizes.
struct RandomCase {
  std::string name;
  TinyModel model;
  double bound;
};

void PrintTo(const RandomCase& c, std::ostream* out) { *out << c.name; }

TinyModel Wide(const std::string& architecture, ggml_type type) {
  TinyModel m;
  m.architecture = architecture;
  m.n_embd = 256;
  m.head_dim = 64;
  m.n_ff = 512;
  m.type = type;
  m.vocabulary_from = BundledPath();
  return m;
}

std::vector<RandomCase> RandomCases() {
  std::vector<RandomCase> cases;
  TinyModel llama3 = Wide("llama", GGML_TYPE_F32);
  llama3.rope_freqs = true;
  llama3.edit = [](gguf_context* g) { gguf_set_val_f32(g, "llama.rope.freq_base", 500000.0F); };
  cases.push_back({"LlamaRopeFreqsTiedF32", llama3, 1e-3});
  TinyModel linear = Wide("llama", GGML_TYPE_F32);
  linear.tied = false;
  linear.other_biases = true;
  linear.qkv_bias = true;
  linear.edit = [](gguf_context* g) {
    gguf_set_val_str(g, "llama.rope.scaling.type", "linear");
    gguf_set_val_f32(g, "llama.rope.scaling.factor", 4.0F);
  };
  cases.push_back({"LlamaLinearBiasesUntiedF32", linear, 1e-3});
  TinyModel old_linear = Wide("llama", GGML_TYPE_F32);
  old_linear.edit = [](gguf_context* g) { gguf_set_val_f32(g, "llama.rope.scale_linear", 2.0F); };
  cases.push_back({"LlamaScaleLinearF32", old_linear, 1e-3});
  TinyModel qwen2 = Wide("qwen2", GGML_TYPE_F32);
  qwen2.qkv_bias = true;
  qwen2.tied = false;
  qwen2.other_biases = true;
  cases.push_back({"Qwen2BiasesUntiedF32", qwen2, 1e-3});
  TinyModel qwen3 = Wide("qwen3", GGML_TYPE_F32);
  qwen3.edit = [](gguf_context* g) {
    gguf_set_val_str(g, "qwen3.rope.scaling.type", "yarn");
    gguf_set_val_f32(g, "qwen3.rope.scaling.factor", 4.0F);
    gguf_set_val_u32(g, "qwen3.rope.scaling.original_context_length", 128);
  };
  cases.push_back({"Qwen3YarnTiedF32", qwen3, 1e-3});
  TinyModel yarn = Wide("llama", GGML_TYPE_F32);
  yarn.edit = [](gguf_context* g) {
    gguf_set_val_str(g, "llama.rope.scaling.type", "yarn");
    gguf_set_val_f32(g, "llama.rope.scaling.factor", 0.5F);
    gguf_set_val_f32(g, "llama.rope.scaling.attn_factor", 1.3F);
  };
  cases.push_back({"LlamaYarnAttnFactorF32", yarn, 1e-3});
  TinyModel none = Wide("qwen2", GGML_TYPE_F32);
  none.edit = [](gguf_context* g) {
    gguf_set_val_str(g, "qwen2.rope.scaling.type", "none");
    gguf_set_val_f32(g, "qwen2.rope.scaling.factor", 4.0F);
  };
  cases.push_back({"Qwen2ScalingNoneF32", none, 1e-3});
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                               GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K,
                               GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL}) {
    TinyModel quantized = Wide("qwen3", type);
    quantized.tied = type != GGML_TYPE_Q4_K;
    cases.push_back({std::string("Qwen3_") + ggml_type_name(type), quantized, 0.02});
  }
  return cases;
}

class RandomModels : public ::testing::TestWithParam<RandomCase> {};

TEST_P(RandomModels, LogitsEqualLibllama) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel(GetParam().model, path));
  const auto model = Model::Open(path);
  std::vector<Token> tokens;
  for (int i = 0; i < 256; ++i)
    tokens.push_back(i * 2654435761U % static_cast<unsigned>(model->info().n_vocab));
  LlamaReference reference(path, 512, GGML_TYPE_F32);
  ASSERT_TRUE(reference.ok());
  ASSERT_TRUE(reference.Decode(tokens, /*all=*/true));
  DenseAttention attention(model->info(), DenseAttention::CacheType::kF32);
  Session session(model, attention.Fn());
  double worst = 0;
  for (const std::size_t n : {100, 1, 1, 33, 100, 1, 20}) {
    const auto at = static_cast<std::size_t>(session.position);
    const std::span<const float> logits = session.Feed(std::span(tokens).subspan(at, n));
    const double error =
        RelativeL2(logits, reference.Logits(static_cast<int>(session.position) - 1));
    EXPECT_LT(error, GetParam().bound) << "at token " << session.position - 1;
    worst = std::max(worst, error);
  }
  RecordProperty("relative_l2", std::to_string(worst));
  std::cout << "[ measured ] largest relative L2 " << worst << "; rope: " << model->info().rope
            << "\n";
}

INSTANTIATE_TEST_SUITE_P(Kinds, RandomModels, ::testing::ValuesIn(RandomCases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace fathom::testing
