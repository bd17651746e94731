// SPDX-License-Identifier: MIT
// Host memory for index and rows that kernels read in place: one range of huge pages, made resident
// and registered with CUDA piece by piece in the background. One pin of hundreds of gigabytes would
// block for minutes, show no progress and fail as a whole.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "memory/reservation.h"

namespace fathom::cuda {

// What pins memory. Each returns why it did not, or nothing. Tests give a stand-in.
struct HostPinner {
  std::function<std::string()> begin;  // once, on the thread that will call pin
  std::function<std::string(std::byte* at, std::size_t bytes)> pin;
  std::function<void(std::byte* at)> unpin;  // a piece that was pinned; from any thread
};

// cudaHostRegister, mapped and portable, on the device that the calling thread uses now.
HostPinner CudaPinner();

// Throws Error(kNoMemory) where taking `bytes` more of host memory would leave too little for the
// rest of the process, naming `what` takes them, all three numbers and the remedy.
void CheckHostMemory(std::int64_t bytes, const std::string& what, const std::string& remedy);

// Bytes registered, of all. False asks to stop.
using ArenaProgress = std::function<bool(std::int64_t registered, std::int64_t total)>;

// Thread safety: registered_bytes, done, pinned and reason from any thread; the rest from the
// owner's. The memory may be written by anyone from the start on: the background never changes it.
class HostArena {
 public:
  static constexpr std::int64_t kPage = std::int64_t{2} << 20;
  static constexpr std::int64_t kPiece = std::int64_t{256} << 20;

  // Reserves `bytes` (>= 0, rounded up to whole huge pages) and begins to register them.
  // piece_bytes: a multiple of kPage. Throws Error(kNoMemory) where the machine has less available,
  // naming both. That no device can register memory is no error: see pinned().
  explicit HostArena(std::int64_t bytes, HostPinner pinner = CudaPinner(),
                     std::int64_t piece_bytes = kPiece);
  // Stops registering and unregisters all. No work of the device on the arena may be left.
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Zeroed, aligned to kPage, at the same address for host and device: with unified addressing,
  // which registering checks, a kernel takes any address of a pinned arena as it is. Null when
  // empty.
  std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }  // bytes

  // `bytes` (>= 0) at a multiple of align, a power of two up to kPage. Throws Error(kNoMemory)
  // naming what is asked and what is left.
  std::byte* Allocate(std::int64_t bytes, std::int64_t align = 256);
  // All allocations end; the memory keeps its content and stays registered.
  void FreeAll() { used_ = 0; }
  std::int64_t used_bytes() const { return used_; }

  std::int64_t registered_bytes() const { return registered_.load(std::memory_order_relaxed); }
  bool done() const;  // registering has ended, well or not

  // Until registering has ended. Where the system refused a piece, those before it are unregistered
  // here. Kernels may be given addresses only after this, and only if pinned(). Call it with no
  // copy of the arena in flight. Throws Error(kCancelled) when progress said stop: what was not
  // registered by then never is.
  void Wait(const ArenaProgress& progress = {});

  // All of it is registered. False while that goes on, and for good where the system refused:
  // reason() says why, and the memory is usable, but pageable: only CopyToDevice and CopyToHost
  // move it, through the driver's staging buffer.
  bool pinned() const;
  std::string reason() const;

  // The address kernels use, of a pinned arena; null for one that is not.
  std::byte* device_data() const { return pinned() ? data_ : nullptr; }

  // cudaMemcpyAsync between the device and memory of the arena, pinned or pageable. One call of it
  // must not cross from one registered piece to the next, so there is one per piece. Asynchronous
  // only if pinned().
  void CopyToDevice(void* device, const std::byte* host, std::int64_t bytes,
                    cudaStream_t stream) const;
  void CopyToHost(std::byte* host, const void* device, std::int64_t bytes,
                  cudaStream_t stream) const;

 private:
  void Run();            // the background thread
  std::string PinAll();  // why not, or nothing
  void UnpinAll();       // only when the thread has ended

  HostPinner pinner_;
  std::int64_t piece_bytes_;
  std::int64_t size_ = 0;
  std::int64_t used_ = 0;
  Reservation memory_;  // a huge page more than size_, to align
  std::byte* data_ = nullptr;

  std::atomic<std::int64_t> registered_{0};  // the first bytes of the arena, whole pieces
  std::atomic<bool> stop_{false};
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::string reason_;
  std::thread thread_;
};

}  // namespace fathom::cuda
