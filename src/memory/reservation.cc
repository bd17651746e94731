// SPDX-License-Identifier: MIT
#include "memory/reservation.h"

#include <sys/mman.h>

#include <cassert>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "fathom/error.h"

namespace fathom {

Reservation::Reservation(std::size_t bytes, bool huge_pages) : size_(bytes) {
  if (bytes == 0) return;
  void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    const std::string reason = std::strerror(errno);
    throw Error(ErrorCode::kNoMemory, "cannot reserve " + std::to_string(bytes) +
                                          " bytes of address space (" + reason +
                                          "); use a shorter context or raise `ulimit -v`");
  }
  data_ = static_cast<std::byte*>(p);
  // A kernel without transparent huge pages refuses; ordinary pages do as well.
  if (huge_pages) static_cast<void>(madvise(p, bytes, MADV_HUGEPAGE));
}

Reservation::~Reservation() { Release(); }

Reservation::Reservation(Reservation&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Release();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void Reservation::MapFile(std::byte* at, std::size_t bytes, int file, std::int64_t offset) {
  assert(at >= data_ && at + bytes <= data_ + size_);
  void* const p = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                       file, offset);
  if (p == MAP_FAILED) {
    throw Error(ErrorCode::kIo, "cannot map " + std::to_string(bytes) + " bytes of a file (" +
                                    std::strerror(errno) + "); see sysctl vm.max_map_count");
  }
}

void Reservation::Release() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace fathom
