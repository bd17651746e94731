// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom {

// Zeroed address space that takes memory only where it is written, so that it can be as large as a
// session may ever become and never has to move. Page-aligned; movable but not copyable, and moving
// keeps the address.
class Reservation {
 public:
  Reservation() = default;
  // huge_pages: ask for 2 MiB pages (best effort): fewer TLB misses for scattered reads, but memory
  // is then taken 2 MiB at a time. Throws Error(kNoMemory) when the address space cannot be had,
  // naming the size.
  Reservation(std::size_t bytes, bool huge_pages);
  ~Reservation();
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;

  // The bytes at `at` become those of the file from offset on, private: what is written to them
  // does not reach it. All of whole pages. Throws Error(kIo).
  void MapFile(std::byte* at, std::size_t bytes, int file, std::int64_t offset);

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }  // bytes

 private:
  void Release();

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fathom
