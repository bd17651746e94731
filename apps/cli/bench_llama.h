// SPDX-License-Identifier: MIT
// libllama's own decode, as its users would run it: the rival of `fathom bench decode`.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "fathom/model.h"

namespace fathom::cli {

class LlamaRival {
 public:
  // f16 KV cache. Throws Error when libllama cannot load the model or make the context.
  LlamaRival(const std::string& model_path, std::int64_t n_ctx, bool flash_attention,
             int n_threads);
  ~LlamaRival();
  LlamaRival(const LlamaRival&) = delete;
  LlamaRival& operator=(const LlamaRival&) = delete;

  std::string name() const;
  std::int64_t n_tokens() const { return n_tokens_; }
  // Appends tokens, 512 at a time, and computes the logits of the last.
  void Append(std::span<const Token> tokens);
  void Truncate(std::int64_t n_tokens);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  bool flash_attention_;
  std::int64_t n_tokens_ = 0;
};

}  // namespace fathom::cli
