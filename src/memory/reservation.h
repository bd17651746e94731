// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

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

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }  // bytes

 private:
  void Release();

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fathom
