// SPDX-License-Identifier: MIT
#include "archive/archive_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fathom/error.h"

namespace fathom {
namespace {

constexpr std::size_t kBuffer = std::size_t{1} << 20;
constexpr std::array<char, 8> kMagic = {'F', 'A', 'T', 'H', 'O', 'M', 'S', 'S'};

// The beginning of the header page; the rest of the page is zeros.
struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = kArchiveVersion;
  ArchiveKind kind = ArchiveKind::kState;
};
static_assert(sizeof(Header) == 16);

[[noreturn]] void Damaged(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorCode::kCorrupt, "'" + path.string() + "' " + what);
}

}  // namespace

void ThrowNewer(const std::filesystem::path& path, std::int64_t version) {
  throw Error(ErrorCode::kUnsupported,
              "'" + path.string() + "' is of version " + std::to_string(version) +
                  " of the format; this program knows up to " + std::to_string(kArchiveVersion) +
                  ", a newer one is needed");
}

void ThrowChecksum(const std::filesystem::path& path) {
  Damaged(path,
          "is damaged: its checksum differs; the session cannot be used, remove it (fathom session "
          "rm)");
}

const char* ArchiveKindName(ArchiveKind kind) {
  switch (kind) {
    case ArchiveKind::kRows:
      return "rows";
    case ArchiveKind::kQueries:
      return "queries";
    case ArchiveKind::kPieces:
      return "pieces";
    case ArchiveKind::kState:
      break;
  }
  return "state";
}

struct ArchiveWriter::Hash {
  XXH3_state_t state;
};
struct ChecksumReader::Hash {
  XXH3_state_t state;
};

std::uint64_t Checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

ArchiveWriter::ArchiveWriter(std::filesystem::path path, ArchiveKind kind)
    : file_(std::move(path)), hash_(std::make_unique<Hash>()) {
  XXH3_64bits_reset(&hash_->state);
  buffer_.reserve(kBuffer);
  Header header;
  header.kind = kind;
  Append(std::as_bytes(std::span(&header, 1)));
  PadTo(kArchivePage);
}

ArchiveWriter::~ArchiveWriter() = default;

void ArchiveWriter::Append(std::span<const std::byte> bytes) {
  at_ += static_cast<std::int64_t>(bytes.size());
  while (!bytes.empty()) {
    const std::size_t n = std::min(bytes.size(), kBuffer - buffer_.size());
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    bytes = bytes.subspan(n);
    if (buffer_.size() == kBuffer) Flush();
  }
}

void ArchiveWriter::PadTo(std::size_t multiple) {
  static constexpr std::array<std::byte, kArchivePage> kZeros = {};
  const std::size_t over = static_cast<std::size_t>(at_) % multiple;
  if (over > 0) Append(std::span(kZeros).first(multiple - over));
}

void ArchiveWriter::Flush() {
  XXH3_64bits_update(&hash_->state, buffer_.data(), buffer_.size());
  file_.Write(buffer_);
  buffer_.clear();
}

ArchiveDigest ArchiveWriter::Finish() {
  Flush();
  file_.Finish();
  return {at_, XXH3_64bits_digest(&hash_->state)};
}

ArchiveMapping::ArchiveMapping(const std::filesystem::path& path, ArchiveKind kind,
                               std::int64_t bytes) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) ThrowIo("open", path, errno);
  struct stat status = {};
  Header header;
  try {
    if (fstat(file_, &status) != 0) ThrowIo("read", path, errno);
    if (status.st_size != bytes || bytes < static_cast<std::int64_t>(kArchivePage)) {
      Damaged(path, "is damaged: it has " + std::to_string(status.st_size) + " bytes where " +
                        std::to_string(bytes) + " belong");
    }
    if (pread(file_, &header, sizeof header, 0) != sizeof header) ThrowIo("read", path, errno);
    if (header.magic != kMagic) Damaged(path, "is not a file of a session");
    if (header.version > kArchiveVersion) {
      ThrowNewer(path, header.version);
    }
    if (header.version == 0 || header.kind != kind) {
      Damaged(path, std::string("does not hold ") + ArchiveKindName(kind));
    }
    size_ = static_cast<std::size_t>(bytes);
    void* const p =
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file_, 0);
    if (p == MAP_FAILED) ThrowIo("map", path, errno);
    data_ = static_cast<std::byte*>(p);
  } catch (...) {
    close(file_);
    throw;
  }
}

ArchiveMapping::~ArchiveMapping() {
  munmap(data_, size_);
  close(file_);
}

std::uint64_t ArchiveMapping::ChecksumOfFile(const std::function<void()>& on_part) const {
  constexpr std::size_t kPart = std::size_t{2} << 20;
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  for (std::size_t at = 0; at < size_; at += kPart) {
    const std::size_t n = std::min(kPart, size_ - at);
    on_part();
#ifdef MADV_POPULATE_READ
    // One call instead of a fault for every few pages; a kernel that does not know it faults.
    static_cast<void>(madvise(data_ + at, n, MADV_POPULATE_READ));
#endif
    XXH3_64bits_update(&hash, data_ + at, n);
  }
  return XXH3_64bits_digest(&hash);
}

ChecksumReader::ChecksumReader(const std::filesystem::path& path)
    : path_(path), buffer_(4 * kBuffer), hash_(std::make_unique<Hash>()) {
  XXH3_64bits_reset(&hash_->state);
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) ThrowIo("open", path, errno);
}

ChecksumReader::~ChecksumReader() { close(file_); }

std::size_t ChecksumReader::Next() {
  ssize_t n = 0;
  do {
    n = read(file_, buffer_.data(), buffer_.size());
  } while (n < 0 && errno == EINTR);
  if (n < 0) ThrowIo("read", path_, errno);
  XXH3_64bits_update(&hash_->state, buffer_.data(), static_cast<std::size_t>(n));
  return static_cast<std::size_t>(n);
}

std::uint64_t ChecksumReader::checksum() const { return XXH3_64bits_digest(&hash_->state); }

}  // namespace fathom
