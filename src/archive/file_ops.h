// SPDX-License-Identifier: MIT
// The calls by which sessions change what is on disk, so that tests can let each of them fail, or
// the process die at it. All return what the system call of the name does, errno included.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace fathom {

class FileOps {
 public:
  virtual ~FileOps() = default;
  // A new file for writing; one of that name must not exist.
  virtual int Create(const std::string& path);
  virtual ssize_t Write(int file, const void* data, std::size_t size);
  virtual int Sync(int file);
  virtual int SyncFolder(const std::string& path);
  virtual int Rename(const std::string& from, const std::string& to);
  virtual int Link(const std::string& from, const std::string& to);
  virtual int Unlink(const std::string& path);
  virtual int MakeFolder(const std::string& path);
  virtual int RemoveFolder(const std::string& path);
};

// Those in use; set: others for the whole process (tests), null for the system's.
FileOps& Files();
void SetFiles(FileOps* files);

// A new file, which goes again unless it is finished. Throws Error(kIo) naming the path.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void Write(std::span<const std::byte> bytes);
  // Makes the content durable; the name is when its folder has been synced.
  void Finish();

 private:
  std::filesystem::path path_;
  int file_;
};

// Throws Error(kIo): "cannot <what> '<path>': <reason>", of the given errno; says what to do about
// a full disk.
[[noreturn]] void ThrowIo(const std::string& what, const std::filesystem::path& path, int error);

}  // namespace fathom
