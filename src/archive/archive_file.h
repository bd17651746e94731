// SPDX-License-Identifier: MIT
// Files of a stored session: a header page, then data, written once, in order, and made durable
// before anyone refers to them. Layouts in docs/format.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "archive/file_ops.h"

namespace fathom {

// Raised when a reader of an older version would misread what is written.
inline constexpr std::uint32_t kArchiveVersion = 1;
inline constexpr std::size_t kArchivePage = 4096;

enum class ArchiveKind : std::uint32_t {
  kRows = 1,     // keys and values of a range of tokens
  kQueries = 2,  // sampled queries of the prefill
  kPieces = 3,   // full segments of indexes
  kState = 4,    // tokens, logits and what the method keeps
};
const char* ArchiveKindName(ArchiveKind kind);

// Throws Error(kUnsupported): a file of a later version than this program's.
[[noreturn]] void ThrowNewer(const std::filesystem::path& path, std::int64_t version);
// Throws Error(kCorrupt): content that has another checksum than its manifest says.
[[noreturn]] void ThrowChecksum(const std::filesystem::path& path);

struct ArchiveDigest {
  std::int64_t bytes = 0;      // of the whole file
  std::uint64_t checksum = 0;  // XXH3, 64 bits, of the whole file
};

// Not thread-safe. A writer that goes without Finish removes its file.
class ArchiveWriter {
 public:
  // Writes the header page. Throws Error(kIo), as all of this class.
  ArchiveWriter(std::filesystem::path path, ArchiveKind kind);
  ~ArchiveWriter();
  ArchiveWriter(const ArchiveWriter&) = delete;
  ArchiveWriter& operator=(const ArchiveWriter&) = delete;

  std::int64_t at() const { return at_; }  // bytes so far
  void Append(std::span<const std::byte> bytes);
  void PadTo(std::size_t multiple);  // zeros
  // Makes the content durable; the name is when its folder has been synced.
  ArchiveDigest Finish();

 private:
  void Flush();

  NewFile file_;
  std::int64_t at_ = 0;
  std::vector<std::byte> buffer_;
  struct Hash;
  std::unique_ptr<Hash> hash_;
};

// A file of a session, mapped so that what is written to the memory stays private.
class ArchiveMapping {
 public:
  // Throws Error(kCorrupt) when it is not a file of that kind and size, Error(kUnsupported) when a
  // newer version wrote it, Error(kIo).
  ArchiveMapping(const std::filesystem::path& path, ArchiveKind kind, std::int64_t bytes);
  ~ArchiveMapping();
  ArchiveMapping(const ArchiveMapping&) = delete;
  ArchiveMapping& operator=(const ArchiveMapping&) = delete;

  int file() const { return file_; }
  // Behind the header page.
  std::span<std::byte> data() const { return {data_ + kArchivePage, size_ - kArchivePage}; }
  // Of the whole file as it is mapped; nobody may have written to that. on_part: called now and
  // then, may throw.
  std::uint64_t ChecksumOfFile(const std::function<void()>& on_part) const;

 private:
  int file_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Checksum of a whole file, 64-bit XXH3. on_read is told of bytes read and may throw. Throws
// Error(kIo).
template <typename OnRead>
std::uint64_t FileChecksum(const std::filesystem::path& path, const OnRead& on_read);
std::uint64_t Checksum(std::span<const std::byte> bytes);

class ChecksumReader {
 public:
  explicit ChecksumReader(const std::filesystem::path& path);
  ~ChecksumReader();
  ChecksumReader(const ChecksumReader&) = delete;
  ChecksumReader& operator=(const ChecksumReader&) = delete;
  // Bytes read, 0 at the end.
  std::size_t Next();
  std::uint64_t checksum() const;

 private:
  std::filesystem::path path_;
  int file_ = -1;
  std::vector<std::byte> buffer_;
  struct Hash;
  std::unique_ptr<Hash> hash_;
};

template <typename OnRead>
std::uint64_t FileChecksum(const std::filesystem::path& path, const OnRead& on_read) {
  ChecksumReader reader(path);
  while (const std::size_t n = reader.Next()) on_read(static_cast<std::int64_t>(n));
  return reader.checksum();
}

}  // namespace fathom
