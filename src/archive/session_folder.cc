// SPDX-License-Identifier: MIT
#include "fathom/session_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <set>
#include <utility>

#include "archive/file_ops.h"
#include "archive/manifest.h"
#include "archive/session_lock.h"
#include "archive/staging.h"
#include "fathom/error.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostName = 120;  // bytes

// Bytes and links of what is in a folder; a file that vanishes meanwhile counts nothing.
struct FileSize {
  std::pair<dev_t, ino_t> id;
  std::int64_t bytes = 0;
  bool shared = false;
};

std::vector<FileSize> FilesOf(const fs::path& session) {
  std::vector<FileSize> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(session, error)) {
    struct stat status = {};
    if (stat(entry.path().c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    files.push_back({{status.st_dev, status.st_ino}, status.st_size, status.st_nlink > 1});
  }
  return files;
}

std::int64_t BytesOf(const fs::path& folder, const std::vector<std::string>& names) {
  std::set<std::pair<dev_t, ino_t>> seen;
  std::int64_t bytes = 0;
  for (const std::string& name : names) {
    for (const FileSize& file : FilesOf(folder / name)) {
      if (seen.insert(file.id).second) bytes += file.bytes;
    }
  }
  return bytes;
}

std::int64_t ModifiedAt(const fs::path& path) {
  struct stat status = {};
  return stat(path.c_str(), &status) == 0 ? status.st_mtime : 0;
}

std::int64_t LastUsed(const fs::path& session) {
  return std::max(ModifiedAt(session / kManifestName), SessionLock::LastTaken(session));
}

// Folders with a manifest, by name.
std::vector<std::string> Names(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.front() != '.' && fs::exists(entry.path() / kManifestName, error)) {
      names.push_back(name);
    }
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    ThrowIo("read the folder", folder, error.value());
  }
  std::ranges::sort(names);
  return names;
}

// Reads a session while somebody may replace its manifest and remove files that it named: when
// that has happened, once more.
template <typename Fn>
void WithManifest(const fs::path& session, const Fn& fn) {
  constexpr int kTries = 4;
  for (int i = 1;; ++i) {
    const Manifest manifest = ReadManifest(session);
    try {
      return fn(manifest);
    } catch (const Error&) {
      std::error_code error;
      if (i == kTries || !fs::exists(session / kManifestName, error)) throw;
      if (ReadManifest(session).next_number == manifest.next_number) throw;
    }
  }
}

}  // namespace

SessionFolder::SessionFolder(fs::path path, std::int64_t budget_bytes)
    : path_(std::move(path)), budget_bytes_(budget_bytes) {
  if (path_.empty()) {
    throw Error(ErrorCode::kUsage, "the folder of sessions has no name; give --session-dir FOLDER");
  }
  if (budget_bytes < 0) {
    throw Error(ErrorCode::kUsage, "a budget of " + std::to_string(budget_bytes) +
                                       " bytes for sessions; it must be 0 (no limit) or more");
  }
}

fs::path SessionFolder::DefaultPath() {
  const auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return fs::path(value == nullptr ? "" : value);
  };
  if (const fs::path home = set("FATHOM_HOME"); !home.empty()) return home / "sessions";
  if (const fs::path data = set("XDG_DATA_HOME"); !data.empty())
    return data / "fathom" / "sessions";
  if (const fs::path home = set("HOME"); !home.empty()) {
    return home / ".local" / "share" / "fathom" / "sessions";
  }
  throw Error(ErrorCode::kUsage,
              "none of FATHOM_HOME, XDG_DATA_HOME and HOME is set; give --session-dir FOLDER");
}

void SessionFolder::CheckName(const std::string& name) {
  const auto fail = [&](const std::string& why) {
    std::string shown;
    for (const char c : name.substr(0, kMostName)) {
      shown += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? '?' : c;
    }
    throw Error(ErrorCode::kUsage, "'" + shown + "' cannot name a session: " + why);
  };
  if (name.empty()) fail("it is empty");
  if (name.size() > kMostName) {
    fail("it has " + std::to_string(name.size()) + " bytes, at most " + std::to_string(kMostName) +
         " are possible");
  }
  if (name.front() == '.') fail("it begins with a dot");
  for (const char c : name) {
    if (c == '/' || c == '\\') fail("it holds a separator of folders");
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) fail("it holds a control character");
  }
}

bool SessionFolder::Has(const std::string& name) const {
  CheckName(name);
  std::error_code error;
  return fs::exists(SessionPath(name) / kManifestName, error);
}

void SessionFolder::Require(const std::string& name) const {
  if (Has(name)) return;
  std::string known;
  for (const std::string& other : Names(path_)) known += (known.empty() ? "" : ", ") + other;
  throw Error(ErrorCode::kUsage, "there is no session '" + name + "' in '" + path_.string() + "'" +
                                     (known.empty() ? ", nor any other" : "; there are: " + known));
}

void SessionFolder::RequireAbsent(const std::string& name) const {
  if (!Has(name)) return;
  throw Error(ErrorCode::kUsage,
              "there is a session '" + name + "' already; choose another name, or remove it first");
}

StoredSessionInfo SessionFolder::Info(const std::string& name) const {
  Require(name);
  const fs::path session = SessionPath(name);
  const Manifest manifest = ReadManifest(session);
  StoredSessionInfo info;
  info.name = name;
  info.model = manifest.model;
  info.method = manifest.method;
  info.heads = manifest.heads;
  info.n_layers = manifest.n_layers;
  info.n_tokens = manifest.n_tokens;
  info.has_index = manifest.has_index;
  info.created = manifest.created;
  info.used = LastUsed(session);
  info.owner = SessionLock::Owner(session);
  for (const FileSize& file : FilesOf(session)) {
    info.bytes += file.bytes;
    if (file.shared) info.shared_bytes += file.bytes;
  }
  return info;
}

std::vector<StoredSessionInfo> SessionFolder::List(std::vector<std::string>* unreadable) const {
  std::vector<StoredSessionInfo> sessions;
  for (const std::string& name : Names(path_)) {
    try {
      sessions.push_back(Info(name));
    } catch (const Error&) {
      // It may have been removed since it was seen.
      if (unreadable != nullptr && Has(name)) unreadable->push_back(name);
    }
  }
  return sessions;
}

void SessionFolder::Fork(const std::string& from, const std::string& to) {
  CheckName(to);
  Require(from);
  RemoveStagings(path_);
  RequireAbsent(to);
  const fs::path source = SessionPath(from);
  WithManifest(source, [&](Manifest manifest) {
    Staging staging(path_);
    for (const ArchivedFile& file : manifest.files) {
      staging.LinkOrCopy(source / file.name(), file.name());
    }
    manifest.created = NowUnixSeconds();
    WriteManifest(staging.path(), manifest);
    staging.MoveTo(SessionPath(to));
  });
}

void SessionFolder::Truncate(const std::string& name, std::int64_t n_tokens) {
  Require(name);
  const fs::path session = SessionPath(name);
  const SessionLock lock(session);
  Manifest manifest = ReadManifest(session);
  if (n_tokens < 0 || n_tokens > manifest.n_tokens) {
    throw Error(ErrorCode::kUsage, "cannot truncate session '" + name + "' of " +
                                       std::to_string(manifest.n_tokens) + " tokens to " +
                                       std::to_string(n_tokens));
  }
  if (n_tokens == manifest.n_tokens) return;
  manifest.n_tokens = n_tokens;
  std::erase_if(manifest.files, [&](const ArchivedFile& file) {
    return file.kind == ArchiveKind::kRows && file.first >= n_tokens;
  });
  WriteManifest(session, manifest);
  RemoveUnnamed(session, manifest);
}

void SessionFolder::Remove(const std::string& name) {
  Require(name);
  RemoveStagings(path_);
  const SessionLock lock(SessionPath(name));
  RemoveByStaging(path_, SessionPath(name));
}

void SessionFolder::Verify(const std::string& name, const Progress& progress) const {
  Require(name);
  const fs::path session = SessionPath(name);
  WithManifest(session, [&](const Manifest& manifest) {
    std::int64_t done = 0;
    const std::int64_t total = manifest.Bytes();
    for (const ArchivedFile& file : manifest.files) {
      const ArchiveMapping header(session / file.name(), file.kind, file.digest.bytes);
      const std::uint64_t checksum = FileChecksum(session / file.name(), [&](std::int64_t n) {
        done += n;
        if (progress && !progress(done, total) && done < total) {
          throw Error(ErrorCode::kCancelled, "verification of session '" + name + "' stopped");
        }
      });
      if (checksum != file.digest.checksum) ThrowChecksum(session / file.name());
    }
  });
}

std::int64_t SessionFolder::Bytes() const { return BytesOf(path_, Names(path_)); }

std::vector<std::string> SessionFolder::MakeRoom(std::int64_t bytes, const std::string& keep) {
  if (budget_bytes_ == 0) return {};
  RemoveStagings(path_);
  std::vector<std::string> names = Names(path_);
  std::vector<std::string> stays;
  std::vector<std::pair<std::int64_t, std::string>> may_go;  // by last use
  for (const std::string& name : names) {
    const fs::path session = SessionPath(name);
    if (name == keep || SessionLock::Owner(session) != 0) {
      stays.push_back(name);
    } else {
      may_go.emplace_back(LastUsed(session), name);
    }
  }
  if (const std::int64_t least = BytesOf(path_, stays) + bytes; least > budget_bytes_) {
    throw Error(ErrorCode::kUsage,
                "the session needs " + std::to_string(bytes) +
                    " bytes more and those in use have " + std::to_string(least - bytes) +
                    ", together over the budget of " + std::to_string(budget_bytes_) +
                    " bytes; raise --session-budget or shorten the text");
  }
  std::ranges::sort(may_go);
  std::vector<std::string> removed;
  for (const auto& [used, name] : may_go) {
    if (BytesOf(path_, names) + bytes <= budget_bytes_) break;
    const SessionLock lock = SessionLock::Try(SessionPath(name));
    if (!lock.held()) continue;  // somebody has just begun to use it
    RemoveByStaging(path_, SessionPath(name));
    removed.push_back(name);
    std::erase(names, name);
  }
  return removed;
}

}  // namespace fathom
