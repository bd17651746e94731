// SPDX-License-Identifier: MIT
#include "prompts.h"

#include "common.h"

#include <algorithm>
#include <cstdio>

#include "fathom/error.h"

namespace fathom::cli {
namespace {

std::vector<Token> ChatPrompt(const Model& model, const std::string& text) {
  const ChatMessage message{"user", text};
  try {
    return model.ChatTokens({&message, 1});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    throw Error(error.code(), std::string(error.what()) + " with --no-chat");
  }
}

// Text as it is, which ends in the question. Control tokens (a hand-made chat format) are honoured
// in the question only: a document's text stays text.
std::vector<Token> PlainPrompt(const Model& model, const std::string& text,
                               const std::string& question) {
  const std::vector<Token> special = model.Tokenize(question, true);
  std::vector<Token> tokens;
  if (special == model.Tokenize(question, false)) {
    tokens = model.Tokenize(text, false);
  } else {
    tokens = model.Tokenize(text.substr(0, text.size() - question.size()), false);
    tokens.insert(tokens.end(), special.begin(), special.end());
  }
  if (model.bos() >= 0) tokens.insert(tokens.begin(), model.bos());
  return tokens;
}

}  // namespace

std::string_view TrimEnd(std::string_view text) {
  const auto end = text.find_last_not_of(" \t\r\n");
  return text.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

bool UseChat(const Model& model, bool no_chat) {
  const bool chat = !no_chat && model.has_chat_template();
  if (!chat && !no_chat) {
    std::fprintf(stderr,
                 "fathom: the model has no chat template; continuing the text as with --no-chat\n");
  }
  return chat;
}

std::vector<std::vector<Token>> BuildPrompts(const Model& model, const std::string& document,
                                             const std::vector<std::string>& questions, bool chat) {
  std::vector<std::vector<Token>> prompts;
  for (const std::string& question : questions) {
    // Exactly one empty line stands before a question; without one a plain continuation must see
    // the document to its last byte.
    std::string text = question.empty() ? document : std::string(TrimEnd(document));
    if (!text.empty() && !question.empty()) text += "\n\n";
    text += question;
    prompts.push_back(chat ? ChatPrompt(model, text) : PlainPrompt(model, text, question));
    if (prompts.back().empty())
      throw Error(ErrorCode::kUsage, "the prompt has no tokens; give some text");
  }
  return prompts;
}

std::vector<Token> ReadTokens(const Model& model, const std::string& file, std::int64_t n) {
  std::vector<Token> tokens = model.Tokenize(ReadText(file), false);
  if (model.bos() >= 0) tokens.insert(tokens.begin(), model.bos());
  const auto have = static_cast<std::int64_t>(tokens.size());
  if (have < n) {
    throw Error(ErrorCode::kUsage, "'" + file + "' has " + Grouped(have) +
                                       " tokens, fewer than the " + Grouped(n) +
                                       " of -c; give a longer text or a smaller -c");
  }
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

std::int64_t SharedTokens(const std::vector<std::vector<Token>>& prompts) {
  auto shared = static_cast<std::ptrdiff_t>(prompts.front().size()) - 1;
  for (const auto& prompt : prompts) {
    const auto end =
        std::min<std::ptrdiff_t>(shared, static_cast<std::ptrdiff_t>(prompt.size()) - 1);
    shared = std::mismatch(prompt.begin(), prompt.begin() + end, prompts.front().begin()).first -
             prompt.begin();
  }
  return shared;
}

std::int64_t DocumentTokens(const Model& model, const std::string& document,
                            const std::string& question, bool chat,
                            const std::vector<Token>& prompt) {
  // A question that begins in another way, behind the end of the document: tokens depend on text
  // nearby alone. Where that is not so after all, behind all of it.
  constexpr std::size_t kEnd = 4096;  // bytes
  const std::string other = question.starts_with('1') ? "?" : "1";
  std::size_t from = document.size() > kEnd ? document.size() - kEnd : 0;
  while (from > 0 && from < document.size() &&
         (static_cast<unsigned char>(document[from]) & 0xC0) == 0x80) {
    ++from;
  }
  for (;; from = 0) {
    const auto both = BuildPrompts(model, document.substr(from), {question, other}, chat);
    const auto rest = static_cast<std::int64_t>(both.front().size()) - SharedTokens(both);
    const bool same = static_cast<std::size_t>(rest) <= prompt.size() &&
                      std::equal(prompt.end() - rest, prompt.end(), both.front().end() - rest);
    if (same || from == 0) return static_cast<std::int64_t>(prompt.size()) - rest;
  }
}

}  // namespace fathom::cli
