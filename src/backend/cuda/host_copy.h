// SPDX-License-Identifier: MIT
// Arrays between host and device in the order of a stream of ours, which does not wait for the
// default one. Pageable memory of the host is staged before a copy to the device returns, so it may
// be a local; what is copied to the host is there when the stream has been waited for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>
#include <vector>

#include "backend/cuda/buffer.h"

namespace fathom::cuda {

// n elements.
template <typename T>
void CopyToDevice(T* device, const std::type_identity_t<T>* host, std::size_t n,
                  cudaStream_t stream) {
  if (n == 0) return;
  Check(cudaMemcpyAsync(device, host, n * sizeof(T), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync to the device");
}
template <typename T>
void CopyToHost(T* host, const std::type_identity_t<T>* device, std::size_t n,
                cudaStream_t stream) {
  if (n == 0) return;
  Check(cudaMemcpyAsync(host, device, n * sizeof(T), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync to the host");
}

// Waits for the stream.
template <typename T>
std::vector<T> ToHost(const T* device, std::size_t n, cudaStream_t stream) {
  std::vector<T> host(n);
  CopyToHost(host.data(), device, n, stream);
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return host;
}

template <typename T>
DeviceBuffer<T> OnDevice(const std::vector<T>& host, cudaStream_t stream) {
  DeviceBuffer<T> buffer(host.size());
  CopyToDevice(buffer.data(), host.data(), host.size(), stream);
  return buffer;
}

template <typename T>
DeviceBuffer<T> Zeros(std::size_t n, cudaStream_t stream) {
  DeviceBuffer<T> buffer(n);
  if (n > 0) Check(cudaMemsetAsync(buffer.data(), 0, n * sizeof(T), stream), "cudaMemsetAsync");
  return buffer;
}

}  // namespace fathom::cuda
