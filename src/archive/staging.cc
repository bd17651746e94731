// SPDX-License-Identifier: MIT
#include "archive/staging.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <vector>

#include "archive/file_ops.h"
#include "archive/manifest.h"
#include "fathom/error.h"
#include "memory/file_mapping.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNew = ".new-";
constexpr const char* kRemoved = ".removed-";

std::string FreshName(const char* prefix) {
  static std::atomic<int> count = 0;
  return prefix + std::to_string(getpid()) + "-" + std::to_string(NowUnixSeconds()) + "-" +
         std::to_string(++count);
}

// Never throws; what cannot be removed stays for the next time.
void Empty(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder, error)) files.push_back(entry.path());
  for (const fs::path& file : files) static_cast<void>(Files().Unlink(file.string()));
  static_cast<void>(Files().RemoveFolder(folder.string()));
}

void Copy(const fs::path& from, const fs::path& to) {
  const FileMapping content(from.string(), "file of a session");
  NewFile copy(to);
  copy.Write(content.bytes());
  copy.Finish();
}

}  // namespace

std::int64_t NowUnixSeconds() { return static_cast<std::int64_t>(std::time(nullptr)); }

void MakeFolders(const fs::path& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  if (folder.has_parent_path() && folder.parent_path() != folder) MakeFolders(folder.parent_path());
  if (Files().MakeFolder(folder.string()) != 0 && errno != EEXIST) {
    ThrowIo("make the folder for sessions (--session-dir)", folder, errno);
  }
  if (!fs::is_directory(folder, error))
    ThrowIo("use as a folder for sessions (--session-dir)", folder, ENOTDIR);
}

Staging::Staging(const fs::path& folder) : folder_(folder) {
  MakeFolders(folder);
  // Until it is locked, another process may take it for a leftover and remove it.
  constexpr int kTries = 100;
  for (int i = 1; !lock_.held(); ++i) {
    path_ = folder / FreshName(kNew);
    if (Files().MakeFolder(path_.string()) != 0) ThrowIo("make the folder", path_, errno);
    try {
      lock_ = SessionLock::Try(path_);
    } catch (const Error&) {
      std::error_code error;
      const bool gone = !fs::exists(path_, error);
      if (!gone) Empty(path_);
      if (!gone || i == kTries) throw;
    }
  }
}

Staging::~Staging() {
  if (!moved_) Empty(path_);
}

void Staging::LinkOrCopy(const fs::path& from, const std::string& name) {
  if (Files().Link(from.string(), (path_ / name).string()) == 0) return;
  if (errno != EPERM && errno != EMLINK && errno != EOPNOTSUPP && errno != EXDEV) {
    ThrowIo("link", from, errno);
  }
  Copy(from, path_ / name);
}

void Staging::MoveTo(const fs::path& session) {
  std::error_code error;
  // A folder without a manifest is one that was begun and never saved.
  if (fs::exists(session, error) && !fs::exists(session / kManifestName, error)) {
    const SessionLock lock(session);
    RemoveByStaging(folder_, session);
  }
  if (Files().Rename(path_.string(), session.string()) != 0) {
    if (errno == ENOTEMPTY || errno == EEXIST) {
      throw Error(ErrorCode::kUsage, "there is a session '" + session.filename().string() +
                                         "' already; choose another name");
    }
    ThrowIo("rename a folder to", session, errno);
  }
  moved_ = true;
  if (Files().SyncFolder(folder_.string()) != 0) ThrowIo("make durable", folder_, errno);
}

void RemoveByStaging(const fs::path& folder, const fs::path& session) {
  const fs::path removed = folder / FreshName(kRemoved);
  if (Files().Rename(session.string(), removed.string()) != 0) ThrowIo("remove", session, errno);
  if (Files().SyncFolder(folder.string()) != 0) ThrowIo("make durable", folder, errno);
  Empty(removed);
}

void RemoveStagings(const fs::path& folder) noexcept {
  try {
    std::error_code error;
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(kNew) || name.starts_with(kRemoved)) found.push_back(entry.path());
    }
    for (const fs::path& path : found) {
      const SessionLock lock = SessionLock::Try(path);
      if (lock.held()) Empty(path);
    }
  } catch (const std::exception&) {  // not ours to read or remove
  }
}

}  // namespace fathom
