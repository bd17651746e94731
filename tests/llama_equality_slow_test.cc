// SPDX-License-Identifier: MIT
// The forward pass against libllama's own: a longer prompt, and larger models where their files are
// present.
#include "support/llama_equality.h"

namespace fathom::testing {
namespace {

TEST(LlamaEqualitySlow, BundledModelIsIdentical) {
  ExpectIdentical(BundledPath(), {.n_prompt = 4096});
}

// libllama's flash attention parts from its own plain attention by 0.015 here.
TEST(LlamaEqualitySlow, BundledModelWithPlainAttention) {
  ExpectClose(BundledPath(), {.n_prompt = 4096}, 0.02);
}

TEST(LlamaEqualitySlow, SmolLm2IsIdentical) {
  ExpectIdentical(ModelPath("SmolLM2-135M-Instruct-Q4_1.gguf"), {});
}

// Q4_K has repacked kernels, which round differently: ours run in calls of one token only.
TEST(LlamaEqualitySlow, Qwen25CoderPromptIsIdentical) {
  ExpectIdentical(ModelPath("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
                  {.n_prompt = 512, .n_greedy = 0, .repack = false});
}

TEST(LlamaEqualitySlow, Qwen25CoderTokensAreIdentical) {
  ExpectIdentical(ModelPath("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
                  {.n_prompt = 48, .n_greedy = 32, .chunk = 1, .repack = true});
}

}  // namespace
}  // namespace fathom::testing
