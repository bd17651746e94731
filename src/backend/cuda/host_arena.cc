// SPDX-License-Identifier: MIT
#include "backend/cuda/host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>
#include <vector>

#include "backend/cuda/check.h"
#include "base/cpu_features.h"
#include "fathom/error.h"
#include "memory/system_memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; headers may be older than the kernel
#endif

namespace fathom::cuda {
namespace {

constexpr std::int64_t kChunk = std::int64_t{32} << 20;  // made resident by one thread at a time
constexpr std::int64_t kSmallPage = 4096;
constexpr int kMostThreads = 8;  // more do not clear pages faster
// Left to the rest of the process: the system ends a process that takes the last page.
constexpr std::int64_t kSpare = std::int64_t{1} << 30;
constexpr auto kProgressInterval = std::chrono::milliseconds(100);

std::string SizeText(std::int64_t bytes) {
  char text[32];
  const double mib = static_cast<double>(bytes) / (1 << 20);
  if (mib >= 1024) {
    std::snprintf(text, sizeof(text), "%.1f GiB", mib / 1024);
  } else {
    std::snprintf(text, sizeof(text), "%.1f MiB", mib);
  }
  return text;
}

std::int64_t WholePages(std::int64_t bytes) {
  return (bytes + HostArena::kPage - 1) / HostArena::kPage * HostArena::kPage;
}

// Makes pages resident without changing what is in them, while others may write them. Returns why
// not, or nothing.
std::string MakeResident(std::byte* at, std::int64_t bytes) {
  if (madvise(at, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) return {};
  if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) {
    return std::string("cannot take host memory: ") + std::strerror(errno);
  }
  // A system without it. Exchanging a byte for itself writes the page and cannot lose a write.
  for (std::int64_t i = 0; i < bytes; i += kSmallPage) {
    const std::atomic_ref<unsigned char> byte(*reinterpret_cast<unsigned char*>(at + i));
    unsigned char old = byte.load(std::memory_order_relaxed);
    byte.compare_exchange_strong(old, old, std::memory_order_relaxed);
  }
  return {};
}

// Several threads that make a range resident, from its start on. Clearing pages takes longer than
// registering them.
class Toucher {
 public:
  Toucher(std::byte* data, std::int64_t size)
      : data_(data),
        size_(size),
        ready_(static_cast<std::size_t>((size + kChunk - 1) / kChunk), false) {
    const int n = std::clamp(UsableProcessors() - 1, 1, kMostThreads);
    threads_.reserve(static_cast<std::size_t>(n));
    try {
      for (int i = 0; i < n; ++i) threads_.emplace_back([this] { Run(); });
    } catch (const std::system_error&) {
      // Fewer do as well; without any, registering takes the pages by itself.
    }
  }
  ~Toucher() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Toucher(const Toucher&) = delete;
  Toucher& operator=(const Toucher&) = delete;

  // Until the first `bytes` are resident. Returns why they are not, or nothing.
  std::string WaitFor(std::int64_t bytes) {
    if (threads_.empty()) return {};
    const auto n = static_cast<std::size_t>((bytes + kChunk - 1) / kChunk);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      while (n_ready_ < ready_.size() && ready_[n_ready_]) ++n_ready_;
      return n_ready_ >= n || !failure_.empty();
    });
    return failure_;
  }

 private:
  void Run() {
    while (!stop_) {
      const std::size_t chunk = next_++;
      if (chunk >= ready_.size()) return;
      const std::int64_t first = static_cast<std::int64_t>(chunk) * kChunk;
      std::string failure = MakeResident(data_ + first, std::min(kChunk, size_ - first));
      const std::lock_guard lock(mutex_);
      if (!failure.empty()) {
        failure_ = std::move(failure);
        stop_ = true;
      } else {
        ready_[chunk] = true;
      }
      changed_.notify_all();
    }
  }

  std::byte* data_;
  std::int64_t size_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> ready_;  // by chunk
  std::size_t n_ready_ = 0;  // the first chunks, without a gap
  std::string failure_;
  std::vector<std::thread> threads_;
};

// What CUDA says of an error, which is then forgotten: the caller goes on without it.
std::string TextOf(const char* call, cudaError_t status) {
  Ignore(cudaGetLastError());
  return std::string(call) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
         ")";
}

std::string Register(std::byte* at, std::size_t bytes) {
  cudaError_t status =
      cudaHostRegister(at, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (status != cudaSuccess) return TextOf("cudaHostRegister", status);
  void* device = nullptr;
  status = cudaHostGetDevicePointer(&device, at, 0);
  if (status == cudaSuccess && device == at) return {};
  std::string why = status != cudaSuccess
                        ? TextOf("cudaHostGetDevicePointer", status)
                        : "the device has other addresses for host memory than the host";
  Ignore(cudaHostUnregister(at));
  return why;
}

}  // namespace

void CheckHostMemory(std::int64_t bytes, const std::string& what, const std::string& remedy) {
  const std::int64_t available = AvailableMemoryBytes();
  if (available == 0 || bytes <= std::max<std::int64_t>(available - kSpare, 0)) return;
  throw Error(ErrorCode::kNoMemory, what + " need " + SizeText(bytes) + " of host memory, " +
                                        SizeText(available) + " are available and " +
                                        SizeText(kSpare) + " of that must be left; " + remedy);
}

HostPinner CudaPinner() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    Ignore(cudaGetLastError());
    device = 0;  // begin will say what is wrong
  }
  HostPinner pinner;
  pinner.begin = [device]() -> std::string {
    const cudaError_t status = cudaSetDevice(device);
    return status == cudaSuccess ? "" : TextOf("cudaSetDevice", status);
  };
  pinner.pin = Register;
  pinner.unpin = [](std::byte* at) {
    if (cudaHostUnregister(at) != cudaSuccess) Ignore(cudaGetLastError());
  };
  return pinner;
}

HostArena::HostArena(std::int64_t bytes, HostPinner pinner, std::int64_t piece_bytes)
    : pinner_(std::move(pinner)), piece_bytes_(piece_bytes) {
  assert(bytes >= 0 && piece_bytes > 0 && piece_bytes % kPage == 0);
  if (bytes == 0) {
    done_ = true;
    return;
  }
  CheckHostMemory(bytes, "index and rows", "choose a shorter context or a smaller batch");
  size_ = WholePages(bytes);
  memory_ = Reservation(static_cast<std::size_t>(size_ + kPage), true);
  const auto begin = reinterpret_cast<std::uintptr_t>(memory_.data());
  const std::uintptr_t page = kPage;
  data_ = memory_.data() + ((begin + page - 1) / page * page - begin);
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    reason_ = std::string("no thread to register host memory: ") + error.what();
    done_ = true;
  }
}

HostArena::~HostArena() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  UnpinAll();
}

void HostArena::Run() {
  std::string reason;
  try {
    reason = pinner_.begin();
    if (reason.empty()) reason = PinAll();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  const std::lock_guard lock(mutex_);
  reason_ = std::move(reason);
  done_ = true;
  ended_.notify_all();
}

std::string HostArena::PinAll() {
  Toucher toucher(data_, size_);
  for (std::int64_t at = 0; at < size_;) {
    if (stop_) return "registering was stopped";
    const std::int64_t n = std::min(piece_bytes_, size_ - at);
    std::string why = toucher.WaitFor(at + n);
    if (why.empty()) why = pinner_.pin(data_ + at, static_cast<std::size_t>(n));
    if (!why.empty()) {
      return "host memory cannot be registered after " + SizeText(at) + " of " + SizeText(size_) +
             ": " + why + "; raise the limit of locked memory (ulimit -l) or free memory";
    }
    at += n;
    registered_.store(at, std::memory_order_relaxed);
  }
  return {};
}

void HostArena::UnpinAll() {
  for (std::int64_t at = 0; at < registered_; at += piece_bytes_) pinner_.unpin(data_ + at);
  registered_ = 0;
}

std::byte* HostArena::Allocate(std::int64_t bytes, std::int64_t align) {
  assert(bytes >= 0 && align > 0 && align <= kPage &&
         std::has_single_bit(static_cast<std::uint64_t>(align)));
  const std::int64_t first = (used_ + align - 1) / align * align;
  if (first > size_ || bytes > size_ - first) {
    throw Error(ErrorCode::kNoMemory, "host arena: " + SizeText(bytes) + " asked, " +
                                          SizeText(size_ - used_) + " of " + SizeText(size_) +
                                          " are left");
  }
  used_ = first + bytes;
  return data_ + first;
}

bool HostArena::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool HostArena::pinned() const {
  const std::lock_guard lock(mutex_);
  return done_ && reason_.empty();
}

std::string HostArena::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void HostArena::Wait(const ArenaProgress& progress) {
  bool cancelled = false;
  {
    std::unique_lock lock(mutex_);
    while (!done_) {
      ended_.wait_for(lock, kProgressInterval);
      if (!progress || cancelled) continue;
      lock.unlock();
      cancelled = !progress(registered_bytes(), size_);
      if (cancelled) stop_ = true;
      lock.lock();
    }
  }
  if (thread_.joinable()) thread_.join();
  if (!pinned()) UnpinAll();
  if (cancelled) throw Error(ErrorCode::kCancelled, "registering host memory was stopped");
}

void HostArena::CopyToDevice(void* device, const std::byte* host, std::int64_t bytes,
                             cudaStream_t stream) const {
  assert(bytes == 0 || (host >= data_ && bytes <= data_ + size_ - host));
  for (std::int64_t at = 0; at < bytes;) {
    const std::int64_t left = piece_bytes_ - (host + at - data_) % piece_bytes_;
    const std::int64_t n = std::min(bytes - at, left);
    Check(cudaMemcpyAsync(static_cast<std::byte*>(device) + at, host + at,
                          static_cast<std::size_t>(n), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync to the device");
    at += n;
  }
}

void HostArena::CopyToHost(std::byte* host, const void* device, std::int64_t bytes,
                           cudaStream_t stream) const {
  assert(bytes == 0 || (host >= data_ && bytes <= data_ + size_ - host));
  for (std::int64_t at = 0; at < bytes;) {
    const std::int64_t left = piece_bytes_ - (host + at - data_) % piece_bytes_;
    const std::int64_t n = std::min(bytes - at, left);
    Check(cudaMemcpyAsync(host + at, static_cast<const std::byte*>(device) + at,
                          static_cast<std::size_t>(n), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync to the host");
    at += n;
  }
}

}  // namespace fathom::cuda
