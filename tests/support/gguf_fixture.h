// SPDX-License-Identifier: MIT
// Small GGUF models with random weights, written by tests.
#pragma once

#include <ggml-cpp.h>
#include <ggml.h>
#include <gguf.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace fathom::testing {

// A directory of one test, removed at its end.
class ScratchDir {
 public:
  ScratchDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fathom-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;
  std::string File(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct TinyModel {
  std::string architecture = "llama";
  int n_layers = 2;
  int n_embd = 64;
  int n_heads = 4;
  int n_kv_heads = 2;
  int head_dim = 16;
  int n_ff = 96;
  int n_vocab = 0;  // 0: the size of the vocabulary
  bool tied = true;
  bool qkv_bias = false;
  bool other_biases = false;  // llama: attention output and feed-forward; qwen2: output
  bool rope_freqs = false;
  ggml_type type = GGML_TYPE_F32;
  std::string vocabulary_from;  // a GGUF file whose tokenizer is copied; empty: 256 bytes and some
                                // control tokens
  bool with_tokenizer = true;
  // Last changes to the metadata and to the tensors (name and shape), before anything is written.
  std::function<void(gguf_context*)> edit;
  std::function<void(std::vector<std::pair<std::string, std::vector<std::int64_t>>>&)> edit_tensors;
};

inline constexpr const char* kControlTokens[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

// The 256 byte tokens of a GPT-2 vocabulary: printable bytes stand for themselves, the others for
// U+0100 and up.
inline std::vector<std::string> ByteTokens() {
  std::vector<std::string> tokens;
  int shifted = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int code = printable ? byte : 256 + shifted++;
    if (code < 128) {
      tokens.emplace_back(1, static_cast<char>(code));
    } else {
      tokens.push_back(
          {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))});
    }
  }
  return tokens;
}

inline int SetTinyTokenizer(gguf_context* gguf) {
  std::vector<std::string> tokens = ByteTokens();
  tokens.emplace_back("he");
  std::vector<std::int32_t> types(tokens.size(), 1);
  for (const char* control : kControlTokens) {
    tokens.emplace_back(control);
    types.push_back(3);
  }
  std::vector<const char*> texts;
  for (const std::string& token : tokens) texts.push_back(token.c_str());
  const char* merges[] = {"h e"};
  gguf_set_val_str(gguf, "tokenizer.ggml.model", "gpt2");
  gguf_set_val_str(gguf, "tokenizer.ggml.pre", "qwen2");
  gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", texts.data(), texts.size());
  gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
  gguf_set_arr_str(gguf, "tokenizer.ggml.merges", merges, 1);
  gguf_set_val_u32(gguf, "tokenizer.ggml.eos_token_id", 259);
  gguf_set_val_u32(gguf, "tokenizer.ggml.bos_token_id", 257);
  gguf_set_val_bool(gguf, "tokenizer.ggml.add_bos_token", false);
  gguf_set_val_str(gguf, "tokenizer.chat_template",
                   "{{ '<|im_start|>' + message.role }}");  // enough to detect ChatML
  return static_cast<int>(tokens.size());
}

inline std::vector<std::pair<std::string, std::vector<std::int64_t>>> TinyTensors(
    const TinyModel& m, int n_vocab) {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> t;
  const int q = m.n_heads * m.head_dim;
  const int kv = m.n_kv_heads * m.head_dim;
  t.push_back({"token_embd.weight", {m.n_embd, n_vocab}});
  t.push_back({"output_norm.weight", {m.n_embd}});
  if (!m.tied) t.push_back({"output.weight", {m.n_embd, n_vocab}});
  if (m.other_biases && m.architecture == "qwen2") t.push_back({"output.bias", {n_vocab}});
  if (m.rope_freqs) t.push_back({"rope_freqs.weight", {m.head_dim / 2}});
  for (int l = 0; l < m.n_layers; ++l) {
    const std::string p = "blk." + std::to_string(l) + ".";
    t.push_back({p + "attn_norm.weight", {m.n_embd}});
    t.push_back({p + "attn_q.weight", {m.n_embd, q}});
    t.push_back({p + "attn_k.weight", {m.n_embd, kv}});
    t.push_back({p + "attn_v.weight", {m.n_embd, kv}});
    t.push_back({p + "attn_output.weight", {q, m.n_embd}});
    t.push_back({p + "ffn_norm.weight", {m.n_embd}});
    t.push_back({p + "ffn_gate.weight", {m.n_embd, m.n_ff}});
    t.push_back({p + "ffn_up.weight", {m.n_embd, m.n_ff}});
    t.push_back({p + "ffn_down.weight", {m.n_ff, m.n_embd}});
    if (m.qkv_bias) {
      t.push_back({p + "attn_q.bias", {q}});
      t.push_back({p + "attn_k.bias", {kv}});
      t.push_back({p + "attn_v.bias", {kv}});
    }
    if (m.other_biases && m.architecture == "llama") {
      t.push_back({p + "attn_output.bias", {m.n_embd}});
      t.push_back({p + "ffn_gate.bias", {m.n_ff}});
      t.push_back({p + "ffn_up.bias", {m.n_ff}});
      t.push_back({p + "ffn_down.bias", {m.n_embd}});
    }
    if (m.architecture == "qwen3") {
      t.push_back({p + "attn_q_norm.weight", {m.head_dim}});
      t.push_back({p + "attn_k_norm.weight", {m.head_dim}});
    }
  }
  return t;
}

// Random values of a sensible size for each kind of tensor.
inline std::vector<float> TinyValues(const std::string& name,
                                     const std::vector<std::int64_t>& shape, std::mt19937& rng) {
  std::int64_t count = 1;
  for (const std::int64_t n : shape) count *= n;
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  const bool is_norm = name.find("norm") != std::string::npos;
  const bool is_bias = name.find("bias") != std::string::npos;
  const float scale = is_bias ? 0.2F : 1.2F / std::sqrt(static_cast<float>(shape[0]));
  float factor = 1;
  for (float& v : values) {
    v = is_norm ? 1.0F + 0.1F * normal(rng) : scale * normal(rng);
    if (name == "token_embd.weight") v = normal(rng);
    if (name == "rope_freqs.weight")
      v = factor *= 1.2F;  // grows to the low frequencies, as in Llama 3
  }
  return values;
}

inline void SetTinyShape(gguf_context* gguf, const TinyModel& m) {
  const auto key = [&](const char* name) { return m.architecture + "." + name; };
  gguf_set_val_str(gguf, "general.architecture", m.architecture.c_str());
  gguf_set_val_str(gguf, "general.name", "tiny");
  gguf_set_val_u32(gguf, key("block_count").c_str(), static_cast<std::uint32_t>(m.n_layers));
  gguf_set_val_u32(gguf, key("context_length").c_str(), 512);
  gguf_set_val_u32(gguf, key("embedding_length").c_str(), static_cast<std::uint32_t>(m.n_embd));
  gguf_set_val_u32(gguf, key("feed_forward_length").c_str(), static_cast<std::uint32_t>(m.n_ff));
  gguf_set_val_u32(gguf, key("attention.head_count").c_str(),
                   static_cast<std::uint32_t>(m.n_heads));
  gguf_set_val_u32(gguf, key("attention.head_count_kv").c_str(),
                   static_cast<std::uint32_t>(m.n_kv_heads));
  gguf_set_val_u32(gguf, key("attention.key_length").c_str(),
                   static_cast<std::uint32_t>(m.head_dim));
  gguf_set_val_u32(gguf, key("attention.value_length").c_str(),
                   static_cast<std::uint32_t>(m.head_dim));
  gguf_set_val_f32(gguf, key("attention.layer_norm_rms_epsilon").c_str(), 1e-5F);
  gguf_set_val_f32(gguf, key("rope.freq_base").c_str(), 10000.0F);
}

// Copies all metadata of another file and returns the size of its vocabulary.
inline int CopyTokenizer(gguf_context* gguf, const std::string& path) {
  gguf_init_params params{};
  params.no_alloc = true;
  const gguf_context_ptr source(gguf_init_from_file(path.c_str(), params));
  if (!source) return 0;
  gguf_set_kv(gguf, source.get());
  return static_cast<int>(
      gguf_get_arr_n(source.get(), gguf_find_key(source.get(), "tokenizer.ggml.tokens")));
}

// Writes the model; false when the file could not be written.
inline bool WriteTinyModel(const TinyModel& m, const std::string& path) {
  const gguf_context_ptr gguf(gguf_init_empty());
  int n_vocab = 260;
  if (!m.vocabulary_from.empty()) {
    n_vocab = CopyTokenizer(gguf.get(), m.vocabulary_from);
  } else if (m.with_tokenizer) {
    n_vocab = SetTinyTokenizer(gguf.get());
  }
  if (m.n_vocab != 0) n_vocab = m.n_vocab;
  SetTinyShape(gguf.get(), m);
  if (m.edit) m.edit(gguf.get());
  auto tensors = TinyTensors(m, n_vocab);
  if (m.edit_tensors) m.edit_tensors(tensors);
  std::mt19937 rng(20260101);
  ggml_init_params params{};
  for (const auto& [name, shape] : tensors) {  // no type is larger than F32
    std::size_t elements = 1;
    for (const std::int64_t n : shape) elements *= static_cast<std::size_t>(n);
    params.mem_size += elements * sizeof(float) + ggml_tensor_overhead() + 64;
  }
  const ggml_context_ptr context(ggml_init(params));
  for (const auto& [name, shape] : tensors) {
    const bool quantize = shape.size() > 1;
    const ggml_type type = quantize ? m.type : GGML_TYPE_F32;
    ggml_tensor* tensor =
        ggml_new_tensor(context.get(), type, static_cast<int>(shape.size()), shape.data());
    ggml_set_name(tensor, name.c_str());
    const std::vector<float> values = TinyValues(name, shape, rng);
    const std::int64_t rows = static_cast<std::int64_t>(values.size()) / shape[0];
    ggml_quantize_chunk(type, values.data(), tensor->data, 0, rows, shape[0], nullptr);
    gguf_add_tensor(gguf.get(), tensor);
  }
  return gguf_write_to_file(gguf.get(), path.c_str(), /*only_meta=*/false);
}

}  // namespace fathom::testing
