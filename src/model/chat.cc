// SPDX-License-Identifier: MIT
// Conversations as tokens. The template is rendered with a placeholder for every message, so that
// we know which bytes of the prompt are the template's and which are a message's: control tokens
// are honoured in the former only.
#include <algorithm>
#include <cctype>
#include <utility>

#include "model/ggml_runtime.h"
#include "model/tokenizer.h"

namespace fathom {
namespace {

using Range = std::pair<std::size_t, std::size_t>;  // [begin, end) in bytes

// Control characters that no template contains.
std::string Placeholder(std::size_t message) {
  return "\x01"
         "fathom-message-" +
         std::to_string(message) + "\x02";
}

void CheckMessages(std::span<const ChatMessage> messages) {
  if (messages.empty()) {
    throw Error(ErrorCode::kUsage, "a conversation needs at least one message");
  }
  for (const ChatMessage& message : messages) {
    const bool is_word = !message.role.empty() &&
                         std::all_of(message.role.begin(), message.role.end(), [](unsigned char c) {
                           return std::isalnum(c) != 0 || c == '_' || c == '-';
                         });
    if (!is_word) {
      throw Error(ErrorCode::kUsage, "role " + Quoted(message.role) +
                                         " of a chat message; use system, user or assistant");
    }
  }
}

// The message without white space around it. What a template trims stays outside the placeholder,
// so that it is trimmed as it would be without one.
Range Core(std::string_view content) {
  const auto is_space = [](unsigned char c) { return std::isspace(c) != 0; };
  std::size_t begin = 0;
  std::size_t end = content.size();
  while (begin < end && is_space(content[begin])) ++begin;
  while (end > begin && is_space(content[end - 1])) --end;
  return {begin, end};
}

}  // namespace

std::string Tokenizer::RenderTemplate(std::span<const ChatMessage> messages,
                                      std::span<const std::string> contents) const {
  std::vector<llama_chat_message> chat;
  std::size_t size = 256;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    chat.push_back({messages[i].role.c_str(), contents[i].c_str()});
    size += messages[i].role.size() + contents[i].size() + 256;
  }
  std::string text(size, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::int32_t written = llama_chat_apply_template(
        chat_template_.c_str(), chat.data(), chat.size(),
        /*add_ass=*/true, text.data(), static_cast<std::int32_t>(text.size()));
    if (written < 0) {
      throw Error(ErrorCode::kUnsupported,
                  "the chat template of this model is not one that libllama knows; format the "
                  "prompt yourself and pass it as plain text");
    }
    const bool fits = static_cast<std::size_t>(written) <= text.size();
    text.resize(static_cast<std::size_t>(written));
    if (fits) break;
  }
  return text;
}

std::vector<Token> Tokenizer::ChatTokens(std::span<const ChatMessage> messages) const {
  CheckMessages(messages);
  if (!has_chat_template()) {
    throw Error(ErrorCode::kUnsupported,
                "this model has no chat template; pass the prompt as plain text");
  }
  std::vector<std::string> contents;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& content = messages[i].content;
    const auto [begin, end] = Core(content);
    contents.push_back(
        begin == end ? content : content.substr(0, begin) + Placeholder(i) + content.substr(end));
  }
  const std::string rendered = RenderTemplate(messages, contents);
  // Put the messages in, and note where they are. A template may drop or repeat a message.
  std::string text;
  std::vector<Range> ranges;
  for (std::size_t at = 0; at < rendered.size();) {
    const std::size_t mark = std::min(rendered.find('\x01', at), rendered.size());
    text.append(rendered, at, mark - at);
    if (mark == rendered.size()) break;
    const std::size_t end = rendered.find('\x02', mark);
    const std::size_t dash = rendered.rfind('-', end);
    const std::size_t message = std::stoul(rendered.substr(dash + 1, end - dash - 1));
    const auto [core_begin, core_end] = Core(messages[message].content);
    ranges.emplace_back(text.size(), text.size() + core_end - core_begin);
    text.append(messages[message].content, core_begin, core_end - core_begin);
    at = end + 1;
  }
  std::vector<Token> tokens = TokenizeChat(text, ranges);
  if (bos() >= 0 && (tokens.empty() || tokens.front() != bos())) {
    tokens.insert(tokens.begin(), bos());
  }
  return tokens;
}

// The index of the longest control token whose text stands at this position, or the number of them.
std::size_t Tokenizer::ControlTokenAt(std::string_view text, std::size_t position) const {
  std::size_t i = 0;
  for (; i < control_tokens_.size(); ++i) {
    if (text.substr(position).starts_with(control_tokens_[i].text)) break;
  }
  return i;
}

std::vector<Token> Tokenizer::TokenizeChat(std::string_view text,
                                           std::span<const Range> contents) const {
  // Template parts: the complement of the contents.
  std::vector<Range> parts;
  std::size_t at = 0;
  for (const auto& [begin, end] : contents) {
    parts.emplace_back(at, begin);
    at = end;
  }
  parts.emplace_back(at, text.size());

  struct Match {
    std::size_t begin;
    std::size_t end;
    Token id;
  };
  std::vector<Match> matches;
  std::string masked(text);  // without the template's own control tokens
  for (const auto& [begin, end] : parts) {
    for (std::size_t i = begin; i < end;) {
      const std::size_t which = ControlTokenAt(text.substr(0, end), i);
      if (which == control_tokens_.size()) {
        ++i;
        continue;
      }
      const std::size_t length = control_tokens_[which].text.size();
      matches.push_back({i, i + length, control_tokens_[which].id});
      std::fill_n(masked.begin() + static_cast<std::ptrdiff_t>(i), length, '\x01');
      i += length;
    }
  }
  const bool clean = std::all_of(
      control_tokens_.begin(), control_tokens_.end(),
      [&](const ControlToken& token) { return masked.find(token.text) == std::string::npos; });
  // The usual case: exactly what llama.cpp does with the whole prompt.
  if (clean) return Tokenize(text, /*special=*/true);

  std::vector<Token> tokens;
  std::size_t done = 0;
  const auto plain_until = [&](std::size_t end) {
    if (end == done) return;
    const std::vector<Token> plain = Tokenize(text.substr(done, end - done), /*special=*/false);
    tokens.insert(tokens.end(), plain.begin(), plain.end());
  };
  for (const Match& match : matches) {
    plain_until(match.begin);
    tokens.push_back(match.id);
    done = match.end;
  }
  plain_until(text.size());
  return tokens;
}

}  // namespace fathom
