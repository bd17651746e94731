// SPDX-License-Identifier: MIT
// A folder of sessions on disk: what there is, and everything that can be done to a session without
// its model. StoredSession (fathom/stored_session.h) connects one of them to a running Session.
//
// A stored session is a folder with a manifest and files that are written once and never changed
// (docs/format.md). Every operation replaces the manifest as its last step, or a folder's name:
// after a crash at any point a session is as before the operation or as after it. What a crash
// leaves behind is removed by the next operation that writes.
//
// One process at a time may write to a session, which a lock on a file of it ensures; the lock ends
// with its process. Reading (List, Info, Verify, Export, the source of Fork) needs no lock.
//
// Thread safety: none; several objects for one folder, in one or several processes, are fine.
// Errors: Error(kUsage) for bad names, sessions that do not exist, exist already or are in use;
// Error(kIo) when the system refuses; Error(kCorrupt) for damaged files; Error(kUnsupported) for
// those of a newer version.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "fathom/types.h"

namespace fathom {

struct StoredSessionInfo {
  std::string name;
  std::string model;   // the name it gives itself, or of its file
  std::string method;  // spec of the method that it was saved with
  HeadGeometry heads;
  std::int32_t n_layers = 0;
  std::int64_t n_tokens = 0;
  bool has_index = false;         // decodes at once; else the index is made on resuming
  std::int64_t bytes = 0;         // of its files
  std::int64_t shared_bytes = 0;  // of those, in files that another session has as well (Fork)
  std::int64_t created = 0;       // seconds since 1970, UTC
  std::int64_t used = 0;          // opened for writing, or written, last
  int owner = 0;                  // process that has it open for writing; 0: none
};

class SessionFolder {
 public:
  // The folder is made when something is written to it. budget_bytes: MakeRoom keeps the folder
  // below that; 0 for no limit.
  explicit SessionFolder(std::filesystem::path path, std::int64_t budget_bytes = 0);

  // $FATHOM_HOME/sessions, else $XDG_DATA_HOME/fathom/sessions, else
  // $HOME/.local/share/fathom/sessions. Throws Error(kUsage) when none of these is set.
  static std::filesystem::path DefaultPath();
  // Throws Error(kUsage) unless the name is 1 to 120 bytes without '/', '\\' and control characters
  // and does not begin with a dot.
  static void CheckName(const std::string& name);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t budget_bytes() const { return budget_bytes_; }

  bool Has(const std::string& name) const;
  // By name. Sessions that cannot be read are left out and their names put into *unreadable.
  std::vector<StoredSessionInfo> List(std::vector<std::string>* unreadable = nullptr) const;
  StoredSessionInfo Info(const std::string& name) const;

  // Makes `to` a copy that shares all files with `from` (hard links; copies where the file system
  // has none). Either can be removed or grow without the other noticing.
  void Fork(const std::string& from, const std::string& to);
  // Forgets tokens from n_tokens on.
  void Truncate(const std::string& name, std::int64_t n_tokens);
  void Remove(const std::string& name);
  // Reads all of it and compares the checksums. progress: bytes done and in all; returns false to
  // stop with Error(kCancelled).
  using Progress = std::function<bool(std::int64_t done, std::int64_t total)>;
  void Verify(const std::string& name, const Progress& progress = {}) const;
  // To and from one file, an uncompressed tar archive of the session's folder. Import verifies what
  // it reads before the session appears.
  void Export(const std::string& name, const std::filesystem::path& file) const;
  void Import(const std::filesystem::path& file, const std::string& name);

  // Bytes of all sessions; files that several share count once.
  std::int64_t Bytes() const;
  // Removes sessions, those that were used least recently first, until bytes more fit the budget;
  // never one that is open for writing, nor `keep`. Returns their names. Throws Error(kUsage) when
  // that is not enough, before anything is removed, saying what is needed.
  std::vector<std::string> MakeRoom(std::int64_t bytes, const std::string& keep);

 private:
  std::filesystem::path SessionPath(const std::string& name) const { return path_ / name; }
  void Require(const std::string& name) const;
  void RequireAbsent(const std::string& name) const;

  std::filesystem::path path_;
  std::int64_t budget_bytes_;
};

}  // namespace fathom
