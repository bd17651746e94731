// SPDX-License-Identifier: MIT
// File operations that fail, or at which the process dies, at a given one of them.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <string>

#include "archive/file_ops.h"

namespace fathom::test {

enum class Fault {
  kNone,     // only counts
  kError,    // the operation fails with `error`, and does nothing
  kHalf,     // a write writes half of what it should, then everything works
  kHalfEnd,  // a write writes half, and the next operation fails with `error`
  kKill,     // the process dies before it; a write has then written half
};

class FaultyFiles final : public FileOps {
 public:
  FaultyFiles(Fault fault, std::int64_t at, int error = EIO)
      : fault_(fault), at_(at), error_(error) {}

  std::int64_t count() const { return count_; }
  bool struck() const { return count_ > at_; }

  int Create(const std::string& path) override { return Strikes() ? -1 : FileOps::Create(path); }
  ssize_t Write(int file, const void* data, std::size_t size) override {
    const bool now = count_ == at_;
    if (now && (fault_ == Fault::kHalf || fault_ == Fault::kHalfEnd || fault_ == Fault::kKill)) {
      const ssize_t n = FileOps::Write(file, data, (size + 1) / 2);
      if (fault_ == Fault::kKill) Die();
      ++count_;
      if (fault_ == Fault::kHalfEnd) {
        fault_ = Fault::kError;
        at_ = count_;
      }
      return n;
    }
    return Strikes() ? -1 : FileOps::Write(file, data, size);
  }
  int Sync(int file) override { return Strikes() ? -1 : FileOps::Sync(file); }
  int SyncFolder(const std::string& path) override {
    return Strikes() ? -1 : FileOps::SyncFolder(path);
  }
  int Rename(const std::string& from, const std::string& to) override {
    return Strikes() ? -1 : FileOps::Rename(from, to);
  }
  int Link(const std::string& from, const std::string& to) override {
    return Strikes() ? -1 : FileOps::Link(from, to);
  }
  int Unlink(const std::string& path) override { return Strikes() ? -1 : FileOps::Unlink(path); }
  int MakeFolder(const std::string& path) override {
    return Strikes() ? -1 : FileOps::MakeFolder(path);
  }
  int RemoveFolder(const std::string& path) override {
    return Strikes() ? -1 : FileOps::RemoveFolder(path);
  }

 private:
  bool Strikes() {
    if (count_++ != at_ || fault_ == Fault::kNone) return false;
    if (fault_ == Fault::kKill) Die();
    if (fault_ != Fault::kError) return false;  // half of a write: this is none
    errno = error_;
    return true;
  }
  [[noreturn]] static void Die() {
    for (;;) static_cast<void>(raise(SIGKILL));
  }

  Fault fault_;
  std::int64_t at_;
  const int error_;
  std::int64_t count_ = 0;
};

// Sets file operations for a scope.
class WithFiles {
 public:
  explicit WithFiles(FileOps* files) { SetFiles(files); }
  ~WithFiles() { SetFiles(nullptr); }
  WithFiles(const WithFiles&) = delete;
  WithFiles& operator=(const WithFiles&) = delete;
};

}  // namespace fathom::test
