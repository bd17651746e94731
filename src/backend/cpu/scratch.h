// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fathom::cpu {

inline constexpr std::size_t kCacheLine = 64;

// Scratch space of a call, kept by the calling thread for its next ones. It is taken before a
// parallel region and divided among the threads of the team, so that no allocation can fail inside.
class Scratch {
 public:
  // At least `bytes`, at a cache line, valid until the next call of the same thread.
  // Throws std::bad_alloc.
  static std::byte* Take(std::size_t bytes) {
    thread_local std::unique_ptr<std::byte[]> buffer;
    thread_local std::size_t size = 0;
    const std::size_t needed = bytes + kCacheLine;
    if (size < needed) {
      size = 0;
      buffer.reset();  // before the next one is taken; pages are touched by whoever writes them
      buffer = std::make_unique_for_overwrite<std::byte[]>(needed + needed / 4);
      size = needed + needed / 4;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(buffer.get());
    // The analyzer takes the moved-from temporary for the owner.
    return buffer.get() +  // NOLINT(clang-analyzer-cplusplus.NewDelete)
           (kCacheLine - address % kCacheLine) % kCacheLine;
  }
};

// Bytes of n elements, rounded up to whole cache lines.
template <typename T>
constexpr std::size_t LineBytes(std::size_t n) {
  return (n * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
}

}  // namespace fathom::cpu
