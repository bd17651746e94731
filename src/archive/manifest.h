// SPDX-License-Identifier: MIT
// The manifest of a stored session: which files it is made of, and all that gives them meaning.
// Replaced as a whole, never changed in place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "archive/archive_file.h"
#include "fathom/types.h"

namespace fathom {

inline constexpr const char* kManifestName = "manifest.json";

struct ArchivedFile {
  std::uint64_t number = 0;  // unique in the session, ascending
  ArchiveKind kind = ArchiveKind::kState;
  ArchiveDigest digest;
  // Rows: tokens first .. first + count - 1, of which those below the next file's first count.
  std::int64_t first = 0;
  std::int64_t count = 0;

  std::string name() const;  // "rows-12"
};

struct Manifest {
  // What must be the same for the content to mean the same: "model", "rope", "rows", "blocks".
  std::map<std::string, std::string> fingerprint;
  std::string model;   // for people
  std::string method;  // spec
  HeadGeometry heads;
  std::int32_t n_layers = 0;
  std::int64_t n_tokens = 0;
  std::int64_t saved_tokens = 0;  // that the state knows; more than n_tokens after a truncation
  std::int64_t mark = 0;          // see StoredSession::mark
  bool has_index = false;
  std::int64_t created = 0;  // seconds since 1970
  std::uint64_t next_number = 1;
  std::vector<ArchivedFile> files;  // rows by first

  std::int64_t Bytes() const;
  // Null where there is none.
  const ArchivedFile* Find(ArchiveKind kind) const;
};

// Reads and checks a session's manifest, its version included. Throws Error(kIo), Error(kCorrupt),
// Error(kUnsupported).
Manifest ReadManifest(const std::filesystem::path& session);
// The same of its text; path: for messages.
Manifest ParseManifest(const std::string& text, const std::filesystem::path& path);
std::string ManifestText(const Manifest& manifest);
// Replaces the manifest of a session atomically and durably; the files it names must be durable.
// Throws Error(kIo), and the old one stays.
void WriteManifest(const std::filesystem::path& session, const Manifest& manifest);

// Files in the folder that the manifest does not name and a crash, or a replaced manifest, has left
// behind. Never throws: what cannot be removed now is removed another time.
void RemoveUnnamed(const std::filesystem::path& session, const Manifest& manifest) noexcept;

}  // namespace fathom
