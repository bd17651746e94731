// SPDX-License-Identifier: MIT
// The hyperparameters of a model, read from GGUF metadata: everything that is there is used or
// refused, so that no model runs in a way its file does not say.
#pragma once

#include <cstdint>
#include <string>

#include "fathom/types.h"
#include "model/gguf_file.h"

namespace fathom {

enum class Architecture : std::uint8_t { kLlama, kQwen2, kQwen3 };

// Arguments of ggml_rope_ext, computed as libllama 0.5.0 does with default context parameters.
struct RopeParams {
  std::int32_t mode = 0;        // GGML_ROPE_TYPE_NORMAL or _NEOX
  std::int32_t n_dims = 0;      // rotated channels of a head; the others pass through
  std::int32_t n_ctx_orig = 0;  // context before YaRN stretched it
  float freq_base = 10000.0F;
  float freq_scale = 1.0F;  // 1 / scaling factor
  float ext_factor = 0.0F;  // 1 with YaRN, else 0
  float attn_factor = 1.0F;
  float beta_fast = 32.0F;
  float beta_slow = 1.0F;
};

struct HParams {
  Architecture architecture = Architecture::kLlama;
  std::string architecture_name;
  std::int32_t n_layers = 0;
  std::int32_t n_embd = 0;
  std::int32_t n_ff = 0;
  std::int32_t n_ctx_train = 0;
  HeadGeometry heads;
  float rms_eps = 0;
  RopeParams rope;
  std::string rope_text;  // for people; without the frequency factors, which are a tensor

  std::int64_t q_size() const { return std::int64_t{heads.n_heads} * heads.head_dim; }
  std::int64_t kv_size() const { return std::int64_t{heads.n_kv_heads} * heads.head_dim; }
};

// Throws Error: kUnsupported (architecture or feature, named), kCorrupt (missing or impossible
// value).
HParams ReadHParams(const GgufFile& file);

}  // namespace fathom
