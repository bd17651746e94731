// SPDX-License-Identifier: MIT
// How a document and a question become the tokens of a prompt.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/model.h"

namespace fathom::cli {

// Text without the white space at its end.
std::string_view TrimEnd(std::string_view text);

// Whether prompts are made with the model's chat template. A model without one is mentioned on
// standard error unless no_chat asked for that.
bool UseChat(const Model& model, bool no_chat);

// One prompt per question: the document first, the question after an empty line, in one user
// message of the chat template (chat) or as plain text that begins with the model's first token.
// No document or an empty question leaves that part out. Throws Error(kUsage) for a prompt without
// tokens, Error(kUnsupported) for a chat template this build cannot render.
std::vector<std::vector<Token>> BuildPrompts(const Model& model, const std::string& document,
                                             const std::vector<std::string>& questions, bool chat);

// The first n tokens of a text file ("-": standard input), the BOS included where the model wants
// one. Throws Error(kUsage) where it has fewer, Error(kIo).
std::vector<Token> ReadTokens(const Model& model, const std::string& file, std::int64_t n);

// Tokens that all prompts begin with, at least one short of the shortest, so that each prompt has
// something left to feed.
std::int64_t SharedTokens(const std::vector<std::vector<Token>>& prompts);

// How many tokens of `prompt`, which BuildPrompts made of document and question, do not depend on
// the question.
std::int64_t DocumentTokens(const Model& model, const std::string& document,
                            const std::string& question, bool chat,
                            const std::vector<Token>& prompt);

}  // namespace fathom::cli
