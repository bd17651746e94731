// SPDX-License-Identifier: MIT
#include "model/tokenizer.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "model/ggml_runtime.h"

namespace fathom {
namespace {

constexpr const char* kTokensKey = "tokenizer.ggml.tokens";

}  // namespace

Tokenizer::Tokenizer(const GgufFile& file) {
  CheckVocabulary(file);
  const LogCapture log;
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  model_.reset(llama_model_load_from_file(file.path().c_str(), params));
  if (!model_) {
    throw file.MakeError(ErrorCode::kUnsupported,
                         "libllama cannot load the tokenizer (" + log.Text("no details") + ")");
  }
  vocab_ = llama_model_get_vocab(model_.get());
  n_tokens_ = llama_vocab_n_tokens(vocab_);
  chat_template_ = file.Text("tokenizer.chat_template").value_or("");
  CollectControlTokens();
}

// libllama asserts, which ends the process, on what is refused here.
void Tokenizer::CheckVocabulary(const GgufFile& file) const {
  const std::string kind = file.Text("tokenizer.ggml.model").value_or("");
  if (kind != "gpt2" && kind != "llama") {
    throw file.MakeError(ErrorCode::kUnsupported,
                         "tokenizer " + Quoted(kind) +
                             " ('tokenizer.ggml.model') is not "
                             "supported; known are gpt2 (BPE) and llama (SentencePiece)");
  }
  const std::int64_t n = file.ArraySize(kTokensKey, GGUF_TYPE_STRING);
  if (n < 1 || n > std::numeric_limits<std::int32_t>::max()) {
    throw file.MakeError(ErrorCode::kCorrupt,
                         "key 'tokenizer.ggml.tokens' is missing or empty; "
                         "convert the model again");
  }
  std::unordered_set<std::string> seen;
  for (std::int64_t i = 0; i < n; ++i) {
    std::string text = file.ArrayText(kTokensKey, i);
    if (text.empty()) text = "[EMPTY_" + std::to_string(i) + "]";  // libllama's name for it
    if (!seen.insert(text).second) {
      throw file.MakeError(ErrorCode::kCorrupt, "the vocabulary holds token " + Quoted(text) +
                                                    " twice; convert the model again");
    }
  }
  if (const std::int64_t types = file.ArraySize("tokenizer.ggml.token_type", GGUF_TYPE_INT32);
      types >= 0 && types < n) {
    throw file.MakeError(ErrorCode::kCorrupt, "key 'tokenizer.ggml.token_type' has " +
                                                  std::to_string(types) + " entries for " +
                                                  std::to_string(n) + " tokens");
  }
}

void Tokenizer::CollectControlTokens() {
  constexpr int kControl = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
  for (Token id = 0; id < n_tokens_; ++id) {
    if ((llama_vocab_get_attr(vocab_, id) & kControl) == 0) continue;
    control_tokens_.push_back({llama_vocab_get_text(vocab_, id), id});
  }
  std::stable_sort(control_tokens_.begin(), control_tokens_.end(),
                   [](const auto& a, const auto& b) { return a.text.size() > b.text.size(); });
}

std::vector<Token> Tokenizer::Tokenize(std::string_view text, bool special) const {
  // One token has at least one byte, but a SentencePiece text gets a space in front.
  constexpr std::size_t kMaxBytes = std::numeric_limits<std::int32_t>::max() - 64;
  if (text.size() > kMaxBytes) {
    throw Error(ErrorCode::kUsage, "text of " + std::to_string(text.size()) + " bytes, at most " +
                                       std::to_string(kMaxBytes) + " can be tokenized at once");
  }
  std::vector<Token> tokens(text.size() + 64);
  try {
    const LogCapture log;
    std::int32_t count = 0;
    for (int attempt = 0; attempt < 2; ++attempt) {
      count = llama_tokenize(vocab_, text.data(), static_cast<std::int32_t>(text.size()),
                             tokens.data(), static_cast<std::int32_t>(tokens.size()),
                             /*add_special=*/false, special);
      if (count >= 0) break;
      if (count == std::numeric_limits<std::int32_t>::min()) break;
      tokens.resize(static_cast<std::size_t>(-count));  // normalization made the text longer
    }
    if (count < 0) throw Error(ErrorCode::kInternal, "libllama cannot tokenize this text");
    tokens.resize(static_cast<std::size_t>(count));
  } catch (const std::out_of_range&) {
    throw Error(ErrorCode::kCorrupt,
                "the vocabulary of the model has no tokens for some single bytes of this text");
  }
  return tokens;
}

Token Tokenizer::bos() const {
  return llama_vocab_get_add_bos(vocab_) ? llama_vocab_bos(vocab_) : -1;
}

void Tokenizer::CheckToken(Token token) const {
  if (token >= 0 && token < n_tokens_) return;
  throw Error(ErrorCode::kUsage, "token " + std::to_string(token) +
                                     " is outside the vocabulary 0.." +
                                     std::to_string(n_tokens_ - 1));
}

bool Tokenizer::IsEndOfGeneration(Token token) const {
  CheckToken(token);
  return llama_vocab_is_eog(vocab_, token);
}

std::string Tokenizer::Piece(Token token, bool special) const {
  CheckToken(token);
  std::string piece(64, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::int32_t size = llama_token_to_piece(
        vocab_, token, piece.data(), static_cast<std::int32_t>(piece.size()), 0, special);
    piece.resize(static_cast<std::size_t>(size < 0 ? -size : size));
    if (size >= 0) break;
  }
  return piece;
}

}  // namespace fathom
