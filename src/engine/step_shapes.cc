// SPDX-License-Identifier: MIT
#include "fathom/step_bench.h"

namespace fathom {

std::vector<StepShape> KnownStepShapes() {
  const auto shape = [](const char* name, std::int32_t n_layers, std::int32_t n_embd,
                        std::int32_t n_ff, std::int32_t n_vocab, HeadGeometry heads,
                        bool has_qk_norm) {
    return StepShape{name, n_layers, n_embd, n_ff, n_vocab, heads, has_qk_norm};
  };
  return {shape("qwen3-8b", 36, 4096, 12288, 151936, {32, 8, 128}, true),
          shape("llama-3.1-8b", 32, 4096, 14336, 128256, {32, 8, 128}, false),
          shape("qwen2.5-7b", 28, 3584, 18944, 152064, {28, 4, 128}, false),
          shape("smoke", 2, 256, 512, 1024, {8, 2, 64}, true)};
}

}  // namespace fathom
