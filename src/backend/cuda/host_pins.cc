// SPDX-License-Identifier: MIT
#include "backend/cuda/host_pins.h"

#include <cassert>
#include <exception>
#include <system_error>
#include <utility>

namespace fathom::cuda {

void HostPins::Release() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (std::byte* at : registered_) pinner_.unpin(at);
  registered_.clear();
}

void HostPins::Add(std::byte* at, std::int64_t bytes) {
  assert(bytes >= 0 && bytes % 4096 == 0);
  {
    const std::lock_guard lock(mutex_);
    wanted_.push_back({at, bytes});
  }
  changed_.notify_all();
  if (thread_.joinable()) return;
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    reason_ = std::string("no thread to register host memory: ") + error.what();
  }
}

std::string HostPins::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return wanted_.empty() || !reason_.empty(); });
  return reason_;
}

std::string HostPins::Pin(const Range& range) {
  // Pages that are there already count as if they were not; a range is small beside all of them.
  CheckHostMemory(range.bytes, "rows that the device reads",
                  "choose a shorter context, or let decode attend on the CPU");
  std::string why = pinner_.pin(range.at, static_cast<std::size_t>(range.bytes));
  if (!why.empty()) {
    return "rows cannot be registered with CUDA: " + why +
           "; raise the limit of locked memory (ulimit -l)";
  }
  registered_.push_back(range.at);
  return {};
}

void HostPins::Run() {
  std::unique_lock lock(mutex_);
  bool begun = false;
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !wanted_.empty(); });
    if (stop_) return;
    const Range range = wanted_.front();
    lock.unlock();
    std::string reason;
    try {
      if (!std::exchange(begun, true)) reason = pinner_.begin();
      if (reason.empty()) reason = Pin(range);
    } catch (const std::exception& error) {
      reason = error.what();
    }
    lock.lock();
    if (!reason.empty()) {
      reason_ = std::move(reason);
      changed_.notify_all();
      return;
    }
    wanted_.pop_front();
    if (wanted_.empty()) changed_.notify_all();
  }
}

}  // namespace fathom::cuda
