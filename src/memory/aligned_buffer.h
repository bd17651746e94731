// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <utility>

namespace fathom {

// Zeroed memory that starts at a cache line, from 64 KiB on at a page, movable but not copyable.
// Moving keeps the address. From 2 MiB on it asks for huge pages: fewer TLB misses for reads all
// over it.
class AlignedBuffer {
 public:
  static constexpr std::size_t kAlignment = 64;

  AlignedBuffer() = default;
  // Throws Error(kNoMemory) naming the size.
  explicit AlignedBuffer(std::size_t bytes);

  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }  // bytes

  // The bytes from `offset` as elements of T; offset must suit T's alignment.
  template <typename T>
  T* as(std::size_t offset = 0) {
    return reinterpret_cast<T*>(data_.get() + offset);
  }
  template <typename T>
  const T* as(std::size_t offset = 0) const {
    return reinterpret_cast<const T*>(data_.get() + offset);
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

}  // namespace fathom
