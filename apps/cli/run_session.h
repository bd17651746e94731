// SPDX-License-Identifier: MIT
// The part of `fathom run` that keeps its session on disk (--session).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "command_line.h"
#include "fathom/fathom.h"
#include "run.h"

namespace fathom::cli {

class KeptSession {
 public:
  // Locks the session, or creates it. Throws as StoredSession.
  KeptSession(const RunOptions& options, const std::shared_ptr<const Model>& model);

  // Tokens that are on disk.
  const std::vector<Token>& tokens() const { return stored_.tokens(); }

  // How many tokens of `prompt` need no prefill, whose first document_tokens are the document. Says
  // so on standard error. Throws Error(kUsage) where the session continues otherwise within the
  // document, unless options.session_replace.
  std::int64_t Reuse(const std::vector<Token>& prompt, std::int64_t document_tokens);

  // A session with what is on disk, cut to `reuse` tokens. Throws Error(kUsage), Error(kNoMemory)
  // when n_tokens will not fit the disk or the budget.
  std::unique_ptr<Session> Open(SessionOptions session_options, std::int64_t reuse,
                                std::int64_t n_tokens);
  // Call after every chunk of a prefill: saves now and then, so that a crash loses no more than
  // options.session_checkpoint seconds.
  void Checkpoint(Session& session);
  void Save(Session& session);
  // Saves what a crash must not lose: a prefill, or an index that was made.
  void SaveNew(Session& session);
  // Before anything is shown that came out of what was on disk.
  void WaitVerified();

  SessionReport report() const { return report_; }

 private:
  void SayEvicted() const;

  const double begun_at_;
  const RunOptions& options_;
  const std::shared_ptr<const Model> model_;
  SessionFolder folder_;
  StoredSession stored_;
  SessionReport report_;
  double saved_at_;
  bool verified_ = false;
};

// The tokens that follow a conversation's last answer when the user says `text` next. chat: in the
// model's template. Throws Error(kUnsupported) for a template whose turns cannot be told apart.
std::vector<Token> NextTurn(const Model& model, const std::string& text, bool chat);

// "1.5G" or "800M" bytes, powers of 1024; 0 for none. Throws Error(kUsage).
std::int64_t ParseBytes(const std::string& text);

// --session-dir, in `run` and `session`.
void AddSessionFolderOption(Command command, std::string* folder);
// The folder of that option, or the default one.
std::filesystem::path SessionFolderPath(const std::string& folder);

}  // namespace fathom::cli
