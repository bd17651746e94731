// SPDX-License-Identifier: MIT
#include "archive/file_ops.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

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
