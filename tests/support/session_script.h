// SPDX-License-Identifier: MIT
// What the crash tests do to sessions, and what must come of it: a text of the bundled model, read
// in small chunks and saved after each.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fathom/fathom.h"

namespace fathom::test {

inline constexpr std::int32_t kScriptChunk = 64;
inline constexpr std::int64_t kScriptTokens = 330;    // of a whole session; not a whole block
inline constexpr std::int64_t kAppendedTokens = 100;  // more
inline constexpr const char* kScriptMethod = "fathom:bits=28,k=64,min=128";

inline std::shared_ptr<const Model> ScriptModel() {
  return Model::Open(FATHOM_SOURCE_DIR "/models/fathom-recall-15m-q8_0.gguf");
}

inline std::vector<Token> ScriptText(const Model& model) {
  std::ifstream file(FATHOM_SOURCE_DIR "/models/questions/single-needle-4k.txt", std::ios::binary);
  return model.Tokenize(std::string(std::istreambuf_iterator<char>(file), {}), false);
}

inline SessionOptions ScriptOptions() {
  SessionOptions options;
  options.ctx_size = 1024;
  options.method = kScriptMethod;
  options.chunk = kScriptChunk;
  options.n_threads = 1;
  options.check_memory = false;
  return options;
}

// Prefills up to `end` tokens of the text, in chunks that begin where an uninterrupted prefill's
// do. after_chunk: called with the session after each.
template <typename Fn>
void ReadTo(Session& session, std::span<const Token> text, std::int64_t end,
            const Fn& after_chunk) {
  while (session.n_tokens() < end) {
    const std::int64_t n = std::min<std::int64_t>(kScriptChunk, end - session.n_tokens());
    session.Prefill(
        text.subspan(static_cast<std::size_t>(session.n_tokens()), static_cast<std::size_t>(n)));
    after_chunk(session);
  }
}

// Greedy continuation of a session that has read the text to `end` and made its index there.
inline std::vector<Token> ContinueFrom(Session& session, std::span<const Token> text,
                                       std::int64_t end) {
  ReadTo(session, text, end, [](Session&) {});
  session.BuildIndex();
  return Generate(session, {12, {}}).tokens;
}

}  // namespace fathom::test
