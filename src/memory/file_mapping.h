// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace fathom {

// A whole file mapped read-only. The file must not shrink while it is mapped (the kernel would
// answer a read with SIGBUS).
class FileMapping {
 public:
  // kind: what the file is, for messages, "model file". Throws Error(kIo).
  FileMapping(const std::string& path, const std::string& kind);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  // Asks the kernel to read the file ahead; only a hint.
  void Prefetch() const;

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fathom
