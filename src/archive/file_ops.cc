// SPDX-License-Identifier: MIT
#include "archive/file_ops.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "fathom/error.h"

namespace fathom {
namespace {

constexpr mode_t kFileMode = 0600;  // a session holds what its owner has read
constexpr mode_t kFolderMode = 0700;

FileOps system_files;
FileOps* files_in_use = &system_files;

}  // namespace

int FileOps::Create(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kFileMode);
}

ssize_t FileOps::Write(int file, const void* data, std::size_t size) {
  return write(file, data, size);
}

int FileOps::Sync(int file) { return fsync(file); }

int FileOps::SyncFolder(const std::string& path) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -1;
  const int result = fsync(folder);
  const int error = errno;
  close(folder);
  errno = error;
  return result;
}

int FileOps::Rename(const std::string& from, const std::string& to) {
  return rename(from.c_str(), to.c_str());
}

int FileOps::Link(const std::string& from, const std::string& to) {
  return link(from.c_str(), to.c_str());
}

int FileOps::Unlink(const std::string& path) { return unlink(path.c_str()); }
int FileOps::MakeFolder(const std::string& path) { return mkdir(path.c_str(), kFolderMode); }
int FileOps::RemoveFolder(const std::string& path) { return rmdir(path.c_str()); }

FileOps& Files() { return *files_in_use; }
void SetFiles(FileOps* files) { files_in_use = files == nullptr ? &system_files : files; }

NewFile::NewFile(std::filesystem::path path)
    : path_(std::move(path)), file_(Files().Create(path_.string())) {
  if (file_ < 0) ThrowIo("create", path_, errno);
}

NewFile::~NewFile() {
  if (file_ < 0) return;
  close(file_);
  static_cast<void>(Files().Unlink(path_.string()));  // what stays is removed later
}

void NewFile::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = Files().Write(file_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) ThrowIo("write to", path_, n == 0 ? EIO : errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void NewFile::Finish() {
  if (Files().Sync(file_) != 0) ThrowIo("make durable", path_, errno);
  if (close(std::exchange(file_, -1)) == 0) return;
  const int error = errno;
  static_cast<void>(Files().Unlink(path_.string()));
  ThrowIo("close", path_, error);
}

void ThrowIo(const std::string& what, const std::filesystem::path& path, int error) {
  std::string message = "cannot " + what + " '" + path.string() + "': " + std::strerror(error);
  if (error == ENOSPC || error == EDQUOT) {
    message +=
        "; free some space, remove sessions (fathom session rm), or use another --session-dir";
  } else if (error == EROFS || error == EACCES || error == EPERM) {
    message += "; use a folder that you may write to (--session-dir)";
  }
  throw Error(ErrorCode::kIo, message);
}

}  // namespace fathom
