// SPDX-License-Identifier: MIT
#include "fathom/error.h"
#include "fathom/session.h"

namespace fathom {

Generation Generate(Session& session, const GenerateOptions& options, const TokenFn& on_token) {
  Generation result;
  Sampler sampler(options.sampling);
  Utf8Stream utf8;
  const auto emit = [&](Token token, const std::string& text) {
    result.text += text;
    return !on_token || on_token(token, text);
  };
  while (static_cast<std::int64_t>(result.tokens.size()) < options.max_tokens) {
    if (session.logits().empty()) {
      throw Error(ErrorCode::kUsage,
                  "nothing to continue from: prefill at least one token before generating");
    }
    const Token token = sampler.Sample(session.logits());
    if (session.model().IsEndOfGeneration(token)) {
      result.stop = StopReason::kEndOfText;
      break;
    }
    result.tokens.push_back(token);
    if (!emit(token, utf8.Push(session.model().Piece(token)))) {
      result.stop = StopReason::kCancelled;
      break;
    }
    // The last token's logits would not be used: its decode is left out.
    if (static_cast<std::int64_t>(result.tokens.size()) == options.max_tokens) break;
    if (session.n_tokens() >= session.options().ctx_size) {
      result.stop = StopReason::kContext;
      break;
    }
    session.Decode(token);
  }
  const std::string rest = utf8.Flush();
  if (!rest.empty() && !result.tokens.empty()) emit(result.tokens.back(), rest);
  return result;
}

}  // namespace fathom
