// SPDX-License-Identifier: MIT
#include "backend/cuda/check.h"

#include <string>

#include "fathom/error.h"

namespace fathom::cuda {
namespace {

ErrorCode CodeOf(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return ErrorCode::kNoMemory;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNotSupported:
      return ErrorCode::kUnsupported;
    default:
      return ErrorCode::kInternal;
  }
}

}  // namespace

void Check(cudaError_t status, const char* call, std::source_location where) {
  if (status == cudaSuccess) return;
  const std::string place = where.file_name();
  std::string text = std::string("CUDA: ") + call + " failed: " + cudaGetErrorString(status) +
                     " (" + cudaGetErrorName(status) + ") at " +
                     place.substr(place.find_last_of('/') + 1) + ":" + std::to_string(where.line());
  // The first call clears what can be cleared; what the second still reports stays for ever.
  Ignore(cudaGetLastError());
  if (cudaPeekAtLastError() != cudaSuccess) {
    text += "; the device can no longer be used by this process, start it again";
  } else if (status == cudaErrorMemoryAllocation) {
    text += "; choose a shorter context, a smaller model or batch, or keep more on the host";
  }
  throw Error(CodeOf(status), text);
}

}  // namespace fathom::cuda
