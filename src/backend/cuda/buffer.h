// SPDX-License-Identifier: MIT
// Owners of CUDA resources. Movable, not copyable; not thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <utility>

#include "backend/cuda/check.h"

namespace fathom::cuda {

// n elements of device memory, uninitialised, aligned to 256 bytes.
template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t n) { Reserve(n); }
  explicit DeviceBuffer(std::span<const T> host) {
    Reserve(host.size());
    if (!host.empty()) {
      Check(cudaMemcpy(data_, host.data(), host.size_bytes(), cudaMemcpyHostToDevice),
            "cudaMemcpy to the device");
      // A small copy may still be on its way, and streams of ours do not wait for the default one.
      Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    }
  }
  ~DeviceBuffer() { Free(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // At least n elements; contents are lost when it grows.
  void Reserve(std::size_t n) {
    if (n <= size_) return;
    Free();
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)), "cudaMalloc");
    size_ = n;
  }
  T* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void Free() {
    if (data_ != nullptr) Ignore(cudaFree(data_));
    data_ = nullptr;
    size_ = 0;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

class Stream {
 public:
  Stream() {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { Ignore(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void Wait() const { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { Check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() {
    if (event_ != nullptr) Ignore(cudaEventDestroy(event_));
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }
  void Record(cudaStream_t stream) { Check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  // Seconds from `start` to this event; both must have happened.
  double Since(const Event& start) const {
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return ms * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// What a function launches on a stream, recorded once and launched as one piece.
class Graph {
 public:
  template <typename Fn>
  Graph(cudaStream_t stream, const Fn& record) {
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      record(stream);
    } catch (...) {
      Ignore(cudaStreamEndCapture(stream, &graph));
      if (graph != nullptr) Ignore(cudaGraphDestroy(graph));
      throw;
    }
    Check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    Ignore(cudaGraphDestroy(graph));
    Check(status, "cudaGraphInstantiate");
  }
  ~Graph() {
    if (exec_ != nullptr) Ignore(cudaGraphExecDestroy(exec_));
  }
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&&) = delete;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void Launch(cudaStream_t stream) { Check(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace fathom::cuda
