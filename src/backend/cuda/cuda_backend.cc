// SPDX-License-Identifier: MIT
#include "backend/cuda/cuda_backend.h"

#include "backend/cuda/cuda_devices.h"

namespace fathom {

std::string ProbeCuda() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cuda::Ignore(cudaGetLastError());
    return status == cudaSuccess ? "no CUDA device" : DescribeCudaDevices();
  }
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess) {
    cuda::Ignore(cudaGetLastError());
    return "the device does not say what it can do";
  }
  if (major < 8) {
    return "compute capability 8.0 or higher is needed, there is: " + DescribeCudaDevices();
  }
  return {};
}

std::unique_ptr<Backend> MakeCudaBackend(int n_threads) {
  return std::make_unique<CudaBackend>(n_threads);
}

}  // namespace fathom
