// SPDX-License-Identifier: MIT
// One session of a SessionFolder, open for writing: resumes it, and saves to it what a running
// Session holds.
//
//   SessionFolder folder(SessionFolder::DefaultPath());
//   StoredSession stored(folder, "report", model);          // locks it
//   auto session = stored.Resume(options);                  // what was saved, or an empty session
//   session->Prefill(...); session->BuildIndex();
//   stored.Save(*session);                                  // durable when this returns
//
// What resuming promises: the next logits are, bit for bit, those of a session that was never
// interrupted, on the same machine and backend, provided that its prefills were cut into the same
// chunks. Between backends logits differ by rounding, as between any two of them; what is stored is
// the same. Methods other than `fathom` do not keep their index: it is made again from the rows,
// with the statistics of all prefills.
//
// Resuming maps the files and copies none of the rows and planes: a step reads what it needs of
// them, so that a session may be larger than memory. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fathom/session.h"
#include "fathom/session_folder.h"

namespace fathom {

class StoredSession {
 public:
  // Creates it when there is none of that name; what was never saved is gone again afterwards.
  // Throws Error as SessionFolder, kUsage when it is in use.
  StoredSession(SessionFolder& folder, const std::string& name, std::shared_ptr<const Model> model);
  // Checks of content that are still under way are given up.
  ~StoredSession();
  StoredSession(const StoredSession&) = delete;
  StoredSession& operator=(const StoredSession&) = delete;

  // Tokens that Resume would bring back, none of a new session.
  const std::vector<Token>& tokens() const;
  // A number of tokens that the caller wants to find again: `fathom run` keeps where its document
  // ends. 0 unless set; saved with the next Save.
  std::int64_t mark() const;
  void set_mark(std::int64_t n_tokens);
  // Spec of the method it was saved with, empty of a new session.
  const std::string& method() const;

  // A session of these options with all that was saved. Once per object. Small files are checked at
  // once, rows and planes in the background: see WaitVerified. options.method empty: the method it
  // was saved with. With another one, its index is made anew when BuildIndex is called.
  // Throws Error(kUsage) when its tokens exceed ctx_size or it was made with other statistics,
  // naming both; Error(kNoMemory) when what may still be added does not fit the memory;
  // Error(kCorrupt), Error(kUnsupported) for its files.
  std::unique_ptr<Session> Resume(SessionOptions options);

  // Waits until the checksums of all that was mapped have been compared; throws Error(kCorrupt)
  // naming the file when one differs, and then everything that was computed from it is worthless.
  // Sessions larger than half of the available memory are not read for this (false):
  // SessionFolder:: Verify does.
  bool WaitVerified();

  // Writes what has changed since the last Save or Resume: rows and planes of finished blocks once,
  // the rest (state, the open segments) anew. After an error the last saved state stays, and Save
  // may be called again. session: of the same model. Throws Error(kIo), Error(kUsage) when the
  // session does not fit the folder's budget.
  void Save(Session& session);

  // Bytes that a session of n_tokens takes on disk at most, and what the folder's file system has
  // free. Method: of the session.
  static std::int64_t DiskBytes(const ModelInfo& model, const MethodSpec& method,
                                std::int64_t n_tokens);
  // Throws Error(kNoMemory) naming both when n_tokens do not fit the disk, or Error(kUsage) when
  // they exceed the folder's budget: before a long prefill rather than after it.
  void CheckSpace(const MethodSpec& method, std::int64_t n_tokens) const;
  // Sessions that the last Save, or CheckSpace, removed to keep the budget.
  const std::vector<std::string>& evicted() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
