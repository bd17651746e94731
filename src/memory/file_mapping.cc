// SPDX-License-Identifier: MIT
#include "memory/file_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "fathom/error.h"

namespace fathom {
namespace {

Error IoError(const std::string& path, const std::string& what, int code) {
  return {ErrorCode::kIo, path + ": " + what + ": " + std::strerror(code)};
}

// Closes the descriptor on every way out of the constructor.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

FileMapping::FileMapping(const std::string& path, const std::string& kind) {
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) throw IoError(path, "cannot open the " + kind, errno);
  struct stat info {};
  if (fstat(file.fd, &info) != 0) throw IoError(path, "cannot examine the " + kind, errno);
  if (!S_ISREG(info.st_mode)) {
    throw Error(ErrorCode::kIo, path + ": not a regular file; give the path of a " + kind);
  }
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ == 0) return;  // mmap refuses length 0; the header check of the reader reports it
  void* address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (address == MAP_FAILED) throw IoError(path, "cannot map the " + kind, errno);
  data_ = static_cast<const std::byte*>(address);
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

void FileMapping::Prefetch() const {
  if (data_ != nullptr) madvise(const_cast<std::byte*>(data_), size_, MADV_WILLNEED);
}

}  // namespace fathom
