// SPDX-License-Identifier: MIT
// The right to write to one stored session: flock on the file `lock` in its folder, which the
// system takes back when the process ends, however it ends.
#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>

namespace fathom {

class SessionLock {
 public:
  SessionLock() = default;
  // Locks a session whose folder exists. Throws Error(kUsage) naming the owner when another
  // process, or this one, has it; Error(kIo).
  explicit SessionLock(const std::filesystem::path& session);
  ~SessionLock();
  SessionLock(SessionLock&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  SessionLock& operator=(SessionLock&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }

  bool held() const { return file_ >= 0; }
  // An empty lock when somebody has the session. Throws Error(kIo).
  static SessionLock Try(const std::filesystem::path& session);
  // Process that has the lock, 0 if none.
  static int Owner(const std::filesystem::path& session);
  // When it was last taken, seconds since 1970; 0 if never.
  static std::int64_t LastTaken(const std::filesystem::path& session);

 private:
  int file_ = -1;
};

}  // namespace fathom
