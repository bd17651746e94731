// SPDX-License-Identifier: MIT
// Folders that are being made, or removed: under names that begin with a dot beside the sessions,
// so that a session appears and disappears in one step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "archive/session_lock.h"

namespace fathom {

std::int64_t NowUnixSeconds();

// A session in the making. Goes away unless it is moved to its name.
class Staging {
 public:
  // folder: of the sessions, made where it does not exist. Throws Error(kIo), as all of this class.
  explicit Staging(const std::filesystem::path& folder);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Shares a file of another session, or copies it where the file system has no hard links.
  void LinkOrCopy(const std::filesystem::path& from, const std::string& name);
  // Gives it its name, durably. Throws Error(kUsage) when there is a session of that name by now.
  void MoveTo(const std::filesystem::path& session);

 private:
  std::filesystem::path folder_;
  std::filesystem::path path_;
  SessionLock lock_;
  bool moved_ = false;
};

// Makes the folder and those above it. Throws Error(kIo).
void MakeFolders(const std::filesystem::path& folder);

// Removes a session that the caller has locked: durably, in one step. Throws Error(kIo).
void RemoveByStaging(const std::filesystem::path& folder, const std::filesystem::path& session);

// Removes what processes that have died left behind in a folder of sessions. Never throws.
void RemoveStagings(const std::filesystem::path& folder) noexcept;

}  // namespace fathom
