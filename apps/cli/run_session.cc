// SPDX-License-Identifier: MIT
#include "run_session.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "common.h"

namespace fathom::cli {
namespace {

// An index that was there is "made" in less; saving one that was made so fast again costs little.
constexpr double kQuick = 0.05;

// A token for people.
std::string Shown(const Model& model, Token token) {
  std::string text;
  for (const char c : model.Piece(token, true)) {
    if (c == '\n') {
      text += "\\n";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      text += c;
    }
  }
  return "'" + text + "'";
}

}  // namespace

KeptSession::KeptSession(const RunOptions& options, const std::shared_ptr<const Model>& model)
    : begun_at_(Now()),
      options_(options),
      model_(model),
      folder_(SessionFolderPath(options.session_dir), ParseBytes(options.session_budget)),
      stored_(folder_, options.session, model),
      saved_at_(begun_at_) {
  report_.name = options.session;
  report_.found_tokens = static_cast<std::int64_t>(stored_.tokens().size());
}

std::int64_t KeptSession::Reuse(const std::vector<Token>& prompt, std::int64_t document_tokens) {
  const std::vector<Token>& kept = tokens();
  const auto common =
      std::mismatch(prompt.begin(), prompt.end(), kept.begin(), kept.end()).first - prompt.begin();
  const auto n_kept = static_cast<std::int64_t>(kept.size());
  const auto n_prompt = static_cast<std::int64_t>(prompt.size());
  // The last tokens of a document depend on what follows it: a longer document is no other one.
  constexpr std::int64_t kEndTokens = 8;
  const std::int64_t kept_document = std::min(stored_.mark(), n_kept) - kEndTokens;
  stored_.set_mark(document_tokens);
  if (common < std::min(document_tokens, kept_document)) {
    const std::string where = "the document differs from session '" + options_.session +
                              "' from token " + Grouped(common + 1) + " of " +
                              Grouped(document_tokens) +
                              " on: " + Shown(*model_, prompt[static_cast<std::size_t>(common)]) +
                              ", not " + Shown(*model_, kept[static_cast<std::size_t>(common)]);
    if (!options_.session_replace) {
      throw Error(ErrorCode::kUsage,
                  where + "; keep both with fathom session fork " + options_.session +
                      " OTHER and --session OTHER --session-replace, or give up what the session "
                      "has from there on with --session-replace");
    }
    std::fprintf(stderr, "fathom: %s\n", where.c_str());
  }
  // The last token's logits are wanted, so it is computed again.
  const std::int64_t reuse = std::min<std::int64_t>(common, n_prompt - 1);
  if (n_kept > 0) {
    std::fprintf(stderr, "fathom: session '%s': reused %s of %s tokens\n", options_.session.c_str(),
                 Grouped(reuse).c_str(), Grouped(n_prompt).c_str());
  }
  return reuse;
}

std::unique_ptr<Session> KeptSession::Open(SessionOptions session_options, std::int64_t reuse,
                                           std::int64_t n_tokens) {
  if (!options_.method_given && !stored_.method().empty()) {
    session_options.method = stored_.method();
  }
  stored_.CheckSpace(MethodSpec::Parse(session_options.method), n_tokens);
  SayEvicted();
  auto session = stored_.Resume(std::move(session_options));
  if (!stored_.method().empty() && session->method().spec() != stored_.method()) {
    std::fprintf(stderr, "fathom: session '%s' was kept with %s; its index is made anew\n",
                 options_.session.c_str(), stored_.method().c_str());
  }
  if (reuse < session->n_tokens()) session->Truncate(reuse);
  report_.reused_tokens = reuse;
  report_.resume_s = Now() - begun_at_;
  return session;
}

void KeptSession::Checkpoint(Session& session) {
  if (Now() - saved_at_ >= options_.session_checkpoint) Save(session);
}

void KeptSession::Save(Session& session) {
  const double start = Now();
  stored_.Save(session);
  SayEvicted();
  saved_at_ = Now();
  report_.save_s += saved_at_ - start;
  report_.saved_tokens = session.n_tokens();
  report_.bytes = folder_.Info(options_.session).bytes;
}

void KeptSession::SayEvicted() const {
  for (const std::string& name : stored_.evicted()) {
    std::fprintf(stderr, "fathom: removed session '%s' to keep within --session-budget\n",
                 name.c_str());
  }
}

void KeptSession::SaveNew(Session& session) {
  if (session.n_tokens() > report_.reused_tokens || session.times().index_s > kQuick) Save(session);
}

void KeptSession::WaitVerified() {
  if (std::exchange(verified_, true)) return;
  const bool verified = stored_.WaitVerified();
  report_.first_token_s = Now() - begun_at_;
  if (!verified && report_.found_tokens > 0) {
    std::fprintf(
        stderr,
        "fathom: session '%s' is larger than half of the free memory: it is read from disk as "
        "needed, at the disk's speed, and its checksums are not compared (fathom session "
        "verify does)\n",
        options_.session.c_str());
  }
}

std::vector<Token> NextTurn(const Model& model, const std::string& text, bool chat) {
  if (!chat) return model.Tokenize(text, true);
  // What stands between an answer and the next one is found in a conversation that we know.
  const std::string answer = "yes";
  const ChatMessage first{"user", "go"};
  const std::vector<ChatMessage> turns = {first, {"assistant", answer}, {"user", text}};
  std::vector<Token> before = model.ChatTokens({&first, 1});
  const std::vector<Token> said = model.Tokenize(answer, false);
  before.insert(before.end(), said.begin(), said.end());
  const std::vector<Token> all = model.ChatTokens(turns);
  if (all.size() <= before.size() || !std::equal(before.begin(), before.end(), all.begin())) {
    throw Error(ErrorCode::kUnsupported,
                "the model's chat template cannot continue a conversation turn by turn; give the "
                "document again with -f, or use --no-chat");
  }
  return {all.begin() + static_cast<std::ptrdiff_t>(before.size()), all.end()};
}

std::int64_t ParseBytes(const std::string& text) {
  if (text.empty()) return 0;
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  double factor = 0;
  if (unit.empty()) factor = 1;
  if (unit == "k" || unit == "K" || unit == "KiB") factor = 1024;
  if (unit == "M" || unit == "MiB") factor = 1024.0 * 1024;
  if (unit == "G" || unit == "GiB") factor = 1024.0 * 1024 * 1024;
  if (unit == "T" || unit == "TiB") factor = 1024.0 * 1024 * 1024 * 1024;
  const double bytes = number * factor;
  if (end == text.c_str() || factor == 0 || !(bytes >= 0) || bytes > 1e18) {
    throw Error(ErrorCode::kUsage,
                "'" + text + "' is not a size; give bytes, or a number with k, M, G or T, as 20G");
  }
  return static_cast<std::int64_t>(bytes);
}

void AddSessionFolderOption(Command command, std::string* folder) {
  command
      .AddOption("--session-dir", *folder,
                 "folder of sessions; default: $FATHOM_HOME/sessions, or fathom/sessions in "
                 "$XDG_DATA_HOME or ~/.local/share")
      .TypeName("FOLDER");
}

std::filesystem::path SessionFolderPath(const std::string& folder) {
  return folder.empty() ? SessionFolder::DefaultPath() : std::filesystem::path(folder);
}

}  // namespace fathom::cli
