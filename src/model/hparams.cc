// SPDX-License-Identifier: MIT
#include "model/hparams.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string_view>

#include "model/ggml_runtime.h"

namespace fathom {
namespace {

constexpr std::int64_t kMaxLayers = 512;     // libllama's own limit
constexpr std::int64_t kMaxWidth = 1 << 20;  // of n_embd and n_ff: far above any model
constexpr std::int64_t kMaxHeads = 4096;

// Values of a metadata key under which it changes nothing in the graph built here.
struct NeutralKey {
  std::string_view name;  // after "<architecture>."
  double neutral;
};

// Keys that some converters write for these architectures although the feature is off. Any other
// value asks for a computation that this graph does not do.
constexpr std::array kNeutralKeys = {
    NeutralKey{"expert_count", 0}, NeutralKey{"expert_used_count", 0},
    NeutralKey{"expert_group_count", 0}, NeutralKey{"expert_shared_count", 0},
    NeutralKey{"logit_scale", 1}, NeutralKey{"embedding_scale", 1}, NeutralKey{"residual_scale", 1},
    NeutralKey{"final_logit_softcapping", 0}, NeutralKey{"attn_logit_softcapping", 0},
    NeutralKey{"pooling_type", 0}, NeutralKey{"nextn_predict_layers", 0},
    NeutralKey{"attention.causal", 1}, NeutralKey{"attention.clamp_kqv", 0},
    NeutralKey{"attention.max_alibi_bias", 0},
    NeutralKey{"attention.layer_norm_epsilon", std::numeric_limits<double>::quiet_NaN()},  // any
    // libllama reads these for other architectures only and runs ours with the values below.
    NeutralKey{"rope.scaling.yarn_attn_factor", 1}, NeutralKey{"rope.scaling.yarn_beta_fast", 32},
    NeutralKey{"rope.scaling.yarn_beta_slow", 1}, NeutralKey{"rope.scaling.yarn_log_multiplier", 0},
    NeutralKey{"rope.scaling.finetuned", std::numeric_limits<double>::quiet_NaN()},  // any
};

// Keys below attention. and rope. that ReadHParams itself uses.
constexpr std::array<std::string_view, 14> kReadKeys = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",
};

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.7g", value);
  return text;
}

class Reader {
 public:
  explicit Reader(const GgufFile& file) : file_(file) {}

  HParams Read() {
    ReadArchitecture();
    CheckKeys();
    ReadShape();
    ReadHeads();
    ReadRope();
    return h_;
  }

 private:
  std::string Key(std::string_view name) const {
    return h_.architecture_name + "." + std::string(name);
  }

  Error Unsupported(const std::string& what) const {
    return file_.MakeError(ErrorCode::kUnsupported, what);
  }

  // The value of a key, checked against [low, high].
  std::int32_t InRange(const std::string& key, std::optional<std::int64_t> value, std::int64_t low,
                       std::int64_t high) const {
    if (!value) {
      throw file_.MakeError(ErrorCode::kCorrupt,
                            "key " + Quoted(key) + " is missing; convert the model again");
    }
    if (*value < low || *value > high) {
      throw file_.MakeError(ErrorCode::kCorrupt,
                            "key " + Quoted(key) + " is " + std::to_string(*value) + ", outside " +
                                std::to_string(low) + ".." + std::to_string(high));
    }
    return static_cast<std::int32_t>(*value);
  }

  float Positive(std::string_view name, double fallback) const {
    const std::string key = Key(name);
    const double value = file_.Number(key).value_or(fallback);
    if (!(value > 0) || !std::isfinite(static_cast<float>(value))) {
      throw file_.MakeError(ErrorCode::kCorrupt, "key " + Quoted(key) + " is " + NumberText(value) +
                                                     ", must be positive");
    }
    return static_cast<float>(value);
  }

  void ReadArchitecture() {
    const auto name = file_.Text("general.architecture");
    if (!name) {
      throw file_.MakeError(ErrorCode::kCorrupt,
                            "key 'general.architecture' is missing; convert the model again");
    }
    h_.architecture_name = *name;
    if (*name == "llama") {
      h_.architecture = Architecture::kLlama;
    } else if (*name == "qwen2") {
      h_.architecture = Architecture::kQwen2;
    } else if (*name == "qwen3") {
      h_.architecture = Architecture::kQwen3;
    } else {
      throw Unsupported("architecture " + Quoted(*name) +
                        " is not supported; known are llama, qwen2, qwen3");
    }
  }

  // Refuses what would be ignored otherwise.
  void CheckKeys() const {
    const std::string prefix = h_.architecture_name + ".";
    for (const std::string& key : file_.Keys()) {
      if (key.compare(0, prefix.size(), prefix) != 0) continue;
      const std::string_view name = std::string_view(key).substr(prefix.size());
      bool known = false;
      for (const std::string_view read : kReadKeys) known = known || read == name;
      for (const NeutralKey& entry : kNeutralKeys) {
        if (entry.name != name) continue;
        known = true;
        if (std::isnan(entry.neutral)) continue;
        const double value = name == "attention.causal" ? *file_.Flag(key) : *file_.Number(key);
        // A zero scale means "not set" to libllama.
        if (value == entry.neutral || (value == 0 && name.ends_with("_scale"))) continue;
        throw Unsupported("key " + Quoted(key) + " is " + NumberText(value) +
                          ", which this version cannot compute; only " + NumberText(entry.neutral) +
                          " is supported");
      }
      const bool matters = name.starts_with("attention.") || name.starts_with("rope.");
      if (matters && !known) {
        throw Unsupported("key " + Quoted(key) +
                          " is not known to this version and would change the result");
      }
    }
  }

  void ReadShape() {
    const auto integer = [&](std::string_view name, std::int64_t high) {
      const std::string key = Key(name);
      return InRange(key, file_.UniformInteger(key), 1, high);
    };
    h_.n_layers = integer("block_count", kMaxLayers);
    h_.n_embd = integer("embedding_length", kMaxWidth);
    h_.n_ff = integer("feed_forward_length", kMaxWidth);
    h_.n_ctx_train = integer("context_length", std::numeric_limits<std::int32_t>::max());
    const std::string eps = Key("attention.layer_norm_rms_epsilon");
    if (!file_.Number(eps)) {
      throw file_.MakeError(ErrorCode::kCorrupt,
                            "key " + Quoted(eps) + " is missing; convert the model again");
    }
    h_.rms_eps = Positive("attention.layer_norm_rms_epsilon", 0);
    const std::string window_key = Key("attention.sliding_window");
    const auto window = file_.Integer(window_key);
    if (window && *window > 0 && *window < h_.n_ctx_train) {
      throw Unsupported("key " + Quoted(window_key) + " is " + std::to_string(*window) +
                        ": sliding-window attention is not supported");
    }
  }

  void ReadHeads() {
    const std::string heads_key = Key("attention.head_count");
    const std::string kv_key = Key("attention.head_count_kv");
    const auto n_heads = file_.UniformInteger(heads_key);
    h_.heads.n_heads = InRange(heads_key, n_heads, 1, kMaxHeads);
    const auto n_kv = file_.UniformInteger(kv_key);
    h_.heads.n_kv_heads = InRange(kv_key, n_kv ? n_kv : n_heads, 1, h_.heads.n_heads);
    if (h_.heads.n_heads % h_.heads.n_kv_heads != 0) {
      throw file_.MakeError(ErrorCode::kCorrupt, Quoted(heads_key) + " " +
                                                     std::to_string(h_.heads.n_heads) +
                                                     " is not a multiple of " + Quoted(kv_key) +
                                                     " " + std::to_string(h_.heads.n_kv_heads));
    }
    if (h_.heads.group() > kMaxGroup) {
      throw Unsupported(std::to_string(h_.heads.group()) + " query heads per KV head, at most " +
                        std::to_string(kMaxGroup) + " are supported");
    }
    const std::string key_key = Key("attention.key_length");
    const std::string value_key = Key("attention.value_length");
    const std::int64_t even_share = h_.n_embd / h_.heads.n_heads;
    const std::int64_t key_length = file_.UniformInteger(key_key).value_or(even_share);
    const std::int64_t value_length = file_.UniformInteger(value_key).value_or(even_share);
    if (key_length != value_length) {
      throw Unsupported("attention.key_length " + std::to_string(key_length) +
                        " and attention.value_length " + std::to_string(value_length) +
                        " differ; only equal lengths are supported");
    }
    if (key_length < 16 || key_length > kMaxHeadDim || key_length % 16 != 0) {
      throw Unsupported("attention.key_length (head_dim) is " + std::to_string(key_length) +
                        "; supported are multiples of 16 up to " + std::to_string(kMaxHeadDim));
    }
    h_.heads.head_dim = static_cast<std::int32_t>(key_length);
  }

  void ReadRope() {
    RopeParams& rope = h_.rope;
    const bool is_llama = h_.architecture == Architecture::kLlama;
    rope.mode = is_llama ? GGML_ROPE_TYPE_NORMAL : GGML_ROPE_TYPE_NEOX;
    const std::string dims_key = Key("rope.dimension_count");
    const auto dims = file_.Integer(dims_key);
    rope.n_dims = InRange(dims_key, dims ? dims : h_.heads.head_dim, 2, h_.heads.head_dim);
    if (rope.n_dims % 2 != 0) {
      throw file_.MakeError(
          ErrorCode::kCorrupt,
          "key " + Quoted(dims_key) + " is " + std::to_string(rope.n_dims) + ", must be even");
    }
    rope.freq_base = Positive("rope.freq_base", 10000.0);
    const std::string original_key = Key("rope.scaling.original_context_length");
    const auto original = file_.Integer(original_key);
    rope.n_ctx_orig = h_.n_ctx_train;
    if (original.value_or(0) != 0) {
      rope.n_ctx_orig =
          InRange(original_key, original, 1, std::numeric_limits<std::int32_t>::max());
    }
    ReadScaling();
  }

  void ReadScaling() {
    RopeParams& rope = h_.rope;
    const std::string type_key = Key("rope.scaling.type");
    const std::string type = file_.Text(type_key).value_or("linear");
    if (type != "none" && type != "linear" && type != "yarn") {
      throw Unsupported("key " + Quoted(type_key) + " is " + Quoted(type) +
                        "; known rope scaling types are none, linear, yarn");
    }
    // An absent or zero factor means unscaled; scale_linear is the older name.
    const std::string_view factor_name = file_.Number(Key("rope.scaling.factor"))
                                             ? std::string_view("rope.scaling.factor")
                                             : std::string_view("rope.scale_linear");
    const bool has_factor = file_.Number(Key(factor_name)).value_or(0) != 0;
    const float factor = has_factor ? Positive(factor_name, 1) : 1.0F;
    rope.freq_scale = type == "none" ? 1.0F : 1.0F / factor;
    rope.ext_factor = type == "yarn" ? 1.0F : 0.0F;
    const std::string ext_key = Key("rope.scaling.yarn_ext_factor");
    if (const auto ext = file_.Number(ext_key); ext && *ext >= 0 && *ext != rope.ext_factor) {
      throw Unsupported("key " + Quoted(ext_key) + " is " + NumberText(*ext) + "; only " +
                        NumberText(rope.ext_factor) + " is supported with rope scaling " + type);
    }
    if (rope.ext_factor != 0) {
      // ggml multiplies by 1 + 0.1 ln(factor) itself, also below 1, where YaRN does not: the rest.
      const float inverse = 1.0F / rope.freq_scale;
      const float magnitude = inverse <= 1.0F ? 1.0F : 0.1F * std::log(inverse) + 1.0F;
      rope.attn_factor = magnitude * (1.0F / (1.0F + 0.1F * std::log(inverse)));
    }
    const float extra = Positive("rope.scaling.attn_factor", 1);
    rope.attn_factor *= extra;
    DescribeRope(type, factor, extra);
  }

  void DescribeRope(const std::string& type, float factor, float extra) {
    const RopeParams& rope = h_.rope;
    std::string& text = h_.rope_text;
    text = rope.mode == GGML_ROPE_TYPE_NEOX ? "neox" : "norm";
    text += ", base " + NumberText(rope.freq_base);
    if (rope.n_dims != h_.heads.head_dim) {
      text += ", " + std::to_string(rope.n_dims) + " of " + std::to_string(h_.heads.head_dim) +
              " channels";
    }
    if (type == "yarn") {
      text += ", yarn factor " + NumberText(factor) + " from " + std::to_string(rope.n_ctx_orig);
    } else if (type == "linear" && factor != 1.0F) {
      text += ", linear factor " + NumberText(factor);
    }
    if (extra != 1.0F) text += ", attention factor " + NumberText(extra);
  }

  const GgufFile& file_;
  HParams h_;
};

}  // namespace

HParams ReadHParams(const GgufFile& file) { return Reader(file).Read(); }

}  // namespace fathom
