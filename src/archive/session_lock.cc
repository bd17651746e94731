// SPDX-License-Identifier: MIT
#include "archive/session_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "archive/file_ops.h"
#include "fathom/error.h"

namespace fathom {
namespace {

constexpr int kTries = 5;
constexpr auto kPause = std::chrono::milliseconds(4);

std::filesystem::path LockPath(const std::filesystem::path& session) { return session / "lock"; }

int ReadOwner(int file) {
  std::array<char, 32> text{};
  const ssize_t n = pread(file, text.data(), text.size() - 1, 0);
  return n > 0 ? static_cast<int>(std::strtol(text.data(), nullptr, 10)) : 0;
}

// Whether the path still names the file: the session may have been removed, and another one of the
// name made, while we waited for it.
bool IsStill(int file, const std::filesystem::path& path) {
  struct stat mine = {}, named = {};
  return fstat(file, &mine) == 0 && stat(path.c_str(), &named) == 0 &&
         mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
}

// The owner's number is for people; what counts is the lock.
void WriteOwner(int file) {
  const std::string text = std::to_string(getpid()) + "\n";
  if (ftruncate(file, 0) == 0) {
    static_cast<void>(!pwrite(file, text.data(), text.size(), 0));
  }
  static_cast<void>(futimens(file, nullptr));
}

}  // namespace

SessionLock SessionLock::Try(const std::filesystem::path& session) {
  const std::filesystem::path path = LockPath(session);
  SessionLock lock;
  for (int tries = 0;;) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) ThrowIo("open", path, errno);
    if (flock(file, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      close(file);
      if (error != EWOULDBLOCK) ThrowIo("lock", path, error);
      // Owner takes a lock for a moment.
      if (++tries == kTries) return lock;
      std::this_thread::sleep_for(kPause);
      continue;
    }
    if (IsStill(file, path)) {
      WriteOwner(file);
      lock.file_ = file;
      return lock;
    }
    close(file);
  }
}

SessionLock::SessionLock(const std::filesystem::path& session) {
  *this = Try(session);
  if (held()) return;
  const int owner = Owner(session);
  throw Error(ErrorCode::kUsage,
              "session '" + session.filename().string() + "' is in use" +
                  (owner == 0 ? std::string() : " by process " + std::to_string(owner)) +
                  "; wait until that is done, or fork it and use the copy (fathom session fork)");
}

SessionLock::~SessionLock() {
  if (file_ >= 0) close(file_);
}

int SessionLock::Owner(const std::filesystem::path& session) {
  const int file = open(LockPath(session).c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const bool taken = flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  const int owner = taken ? ReadOwner(file) : 0;
  close(file);
  return owner;
}

std::int64_t SessionLock::LastTaken(const std::filesystem::path& session) {
  struct stat status = {};
  return stat(LockPath(session).c_str(), &status) == 0 ? status.st_mtime : 0;
}

}  // namespace fathom
