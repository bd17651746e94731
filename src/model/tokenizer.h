// SPDX-License-Identifier: MIT
// Tokenizer and chat template of a GGUF model, by libllama.
#pragma once

#include <llama-cpp.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/model.h"
#include "model/gguf_file.h"

namespace fathom {

class Tokenizer {
 public:
  // Loads the vocabulary only. Throws Error: kUnsupported (kind of tokenizer), kCorrupt (damaged).
  explicit Tokenizer(const GgufFile& file);

  std::int32_t n_tokens() const { return n_tokens_; }
  std::vector<Token> Tokenize(std::string_view text, bool special) const;
  Token bos() const;
  bool IsEndOfGeneration(Token token) const;
  std::string Piece(Token token, bool special) const;
  bool has_chat_template() const { return !chat_template_.empty(); }
  std::vector<Token> ChatTokens(std::span<const ChatMessage> messages) const;

 private:
  void CheckVocabulary(const GgufFile& file) const;
  void CheckToken(Token token) const;
  void CollectControlTokens();
  std::string RenderTemplate(std::span<const ChatMessage> messages,
                             std::span<const std::string> contents) const;
  std::size_t ControlTokenAt(std::string_view text, std::size_t position) const;
  std::vector<Token> TokenizeChat(
      std::string_view text, std::span<const std::pair<std::size_t, std::size_t>> contents) const;

  // A control token and its text, longest texts first: libllama matches them in this order.
  struct ControlToken {
    std::string text;
    Token id;
  };

  llama_model_ptr model_;
  const llama_vocab* vocab_ = nullptr;
  std::int32_t n_tokens_ = 0;
  std::string chat_template_;
  std::vector<ControlToken> control_tokens_;
};

}  // namespace fathom
