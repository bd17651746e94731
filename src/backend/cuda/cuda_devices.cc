// SPDX-License-Identifier: MIT
#include "backend/cuda/cuda_devices.h"

#include <cuda_runtime_api.h>

namespace fathom {

std::string DescribeCudaDevices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::string("no CUDA device: ") + cudaGetErrorString(status);
  }
  if (count == 0) return "no CUDA device";
  std::string text;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    text += (text.empty() ? "" : "; ") + std::string(properties.name) + ", " +
            std::to_string(properties.totalGlobalMem >> 30) + " GiB, compute capability " +
            std::to_string(properties.major) + "." + std::to_string(properties.minor);
  }
  return text;
}

}  // namespace fathom
