// SPDX-License-Identifier: MIT
// A GGUF model: its metadata, tokenizer, chat template and samplers, and the forward pass with
// attention left out.
//
// Architectures llama, qwen2 and qwen3, all ggml weight types. Everything the file says about
// positions (rope base, frequency factors, linear and YaRN scaling) is honoured or refused; nothing
// is ignored.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fathom/types.h"

namespace fathom {

using Token = std::int32_t;

struct ModelInfo {
  std::string path;
  std::string name;          // general.name, may be empty
  std::string architecture;  // "llama", "qwen2", "qwen3"
  std::string weight_types;  // "Q8_0 (29), F32 (37)": types and number of tensors
  std::int64_t file_bytes = 0;
  // Matrices that are also kept in the layout of ggml's kernels for single tokens, once a Runner
  // exists: private memory beside the mapped file. 0 for types without such kernels here.
  std::int64_t repacked_bytes = 0;
  std::int64_t n_parameters = 0;
  std::int32_t n_layers = 0;
  std::int32_t n_embd = 0;
  std::int32_t n_ff = 0;
  std::int32_t n_vocab = 0;
  std::int32_t n_ctx_train = 0;  // longest context the model was made for
  HeadGeometry heads;
  bool has_qk_norm = false;
  bool has_qkv_bias = false;
  bool tied_output = false;
  std::string rope;  // "neox, base 1000000, yarn factor 4 from 32768" for people
};

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// Immutable after Open; safe to share between threads and sessions.
class Model {
 public:
  // Maps the file. Throws Error: kIo (missing, unreadable), kCorrupt (truncated, damaged, wrong
  // shapes), kUnsupported (architecture, rope type, tokenizer or feature not known, named in the
  // message).
  static std::shared_ptr<const Model> Open(const std::string& path);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelInfo& info() const;

  // 32 hexadecimal digits that tell models apart whose sessions must not be mixed: a hash of all
  // metadata of the file but its names and comments (so of tokenizer, shape and rope), and of
  // names, types, shapes and content of its tensors, of which the large ones are sampled: 64 pieces
  // of 4 KiB of each. Takes milliseconds; computed once. Thread-safe.
  const std::string& fingerprint() const;

  // Token ids of text. special: texts of control tokens in it become those tokens. Adds no BOS.
  // Bytes that are not UTF-8 are passed to the tokenizer, which decides what they become; they
  // never fail.
  std::vector<Token> Tokenize(std::string_view text, bool special) const;
  // The BOS token when the model wants one at the start, else -1.
  Token bos() const;
  bool IsEndOfGeneration(Token token) const;
  // Bytes of one token; may be a part of a UTF-8 character. Control tokens give "" unless special.
  std::string Piece(Token token, bool special = false) const;

  bool has_chat_template() const;
  // The prompt of a conversation as tokens, ready for the assistant's answer, BOS included where
  // wanted. Texts of control tokens inside messages stay plain text. Throws Error(kUnsupported)
  // when the template is not known.
  std::vector<Token> ChatTokens(std::span<const ChatMessage> messages) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  Model();
  std::unique_ptr<Impl> impl_;
};

// Attention of one layer for n positions: q [n][n_heads][D] and k [n][n_kv_heads][D] after RoPE, v
// [n][n_kv_heads][D]; writes out [n][n_heads][D].
using AttentionFn = std::function<void(std::int32_t layer, std::int64_t n, const float* q,
                                       const float* k, const float* v, float* out)>;

// Where the dense part of a forward pass runs: all of it but attention.
enum class Device {
  kCpu,   // by ggml, weights as they are in the file
  kCuda,  // on the first CUDA device, weights and activations rounded to bf16, sums in fp32
};

// The forward pass with attention supplied by the caller, which gets and fills host memory on every
// device. Holds buffers: one per session, not thread-safe. The model must outlive it.
class Runner {
 public:
  // Runners of a model share its weights on a device; the first one loads them. On one, buffers for
  // calls of max_tokens are made here; a longer call makes larger ones. Throws Error: kUsage
  // (n_threads), kUnsupported (this build, machine or model cannot use the device), kNoMemory (on
  // it).
  Runner(std::shared_ptr<const Model> model, int n_threads, Device device = Device::kCpu,
         std::int64_t max_tokens = 1);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Runs tokens at positions first, first + 1, ...; calls attention once per layer, in order.
  // Returns the logits [n_vocab] of the last token, valid until the next call, or an empty span
  // when want_logits is false. Throws what attention throws; Error(kUsage) for a token outside the
  // vocabulary.
  std::span<const float> Forward(std::span<const Token> tokens, std::int64_t first,
                                 const AttentionFn& attention, bool want_logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SamplingOptions {
  float temperature = 0;    // 0: greedy
  std::int32_t top_k = 40;  // 0: off
  float top_p = 0.95F;      // 1: off
  std::uint32_t seed = 0;
};

// Chooses tokens by libllama's samplers. Equal logits and seed give equal tokens. Not thread-safe.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  Token Sample(std::span<const float> logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Splits a stream of bytes at UTF-8 character borders: Push returns the whole characters that are
// complete, Flush the rest. Bytes that can never become a character pass through unchanged, so that
// nothing is held back for ever.
class Utf8Stream {
 public:
  std::string Push(std::string_view bytes);
  std::string Flush();

 private:
  std::string pending_;
};

}  // namespace fathom
