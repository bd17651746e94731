// SPDX-License-Identifier: MIT
// Host memory of others that kernels read in place, such as a session's rows: registered with CUDA
// range by range, in the background. HostArena has memory of its own.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/cuda/host_arena.h"

namespace fathom::cuda {

// Thread safety: all calls from the owner's thread. The memory may be read and written by anyone
// throughout.
class HostPins {
 public:
  explicit HostPins(HostPinner pinner = CudaPinner()) : pinner_(std::move(pinner)) {}
  // As Release. The memory must still be there.
  ~HostPins() { Release(); }
  HostPins(const HostPins&) = delete;
  HostPins& operator=(const HostPins&) = delete;

  // Asks for whole pages of 4 KiB that no range before has. One range is one registration, for a
  // copy by CUDA must not cross from one to the next, or into memory that is not registered. The
  // memory must not be mapped anew while this lives.
  void Add(std::byte* at, std::int64_t bytes);
  // Until all that was asked for is registered. Returns why it is not, for good, or nothing: the
  // system refused, or too little memory would have been left.
  std::string Wait();
  // Stops for good, and unregisters all. No work of the device on it may be left.
  void Release();

 private:
  struct Range {
    std::byte* at;
    std::int64_t bytes;
  };
  void Run();  // the background thread
  std::string Pin(const Range& range);

  HostPinner pinner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Range> wanted_;            // the first of them is being registered
  std::vector<std::byte*> registered_;  // of the thread alone while it runs
  std::string reason_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace fathom::cuda
