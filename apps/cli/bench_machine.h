// SPDX-License-Identifier: MIT
// What the memory and the arithmetic of this machine can do, measured in the run that reports
// shares of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fathom::cli {

// Bytes of all last-level caches of the processors that this process may use; 32 MiB where the
// system does not say.
std::int64_t CacheBytes();

// Memory in huge pages where the system has them, as stores of sessions have it, so that page
// tables cost all readers the same.
class PageBuffer {
 public:
  // Throws Error(kNoMemory).
  explicit PageBuffer(std::size_t bytes);
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// What n threads reach together.
struct MachineSpeed {
  int threads = 0;
  double read_gb_s = 0;    // 1e9 bytes per second, read from memory, nothing written
  double fma_gflop_s = 0;  // fp32 multiply-adds from registers, two operations each
};

// Every thread reads its own part of a buffer of several times the caches, in three ways (one
// stream, one with software prefetch, four interleaved); the best of several passes counts. The
// same for multiply-adds with the widest vectors that the kernels have. Takes about a second per
// thread count.
std::vector<MachineSpeed> MeasureMachine(const std::vector<int>& threads);

}  // namespace fathom::cli
