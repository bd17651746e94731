// SPDX-License-Identifier: MIT
// Every CUDA call is checked: what fails becomes an Error that names the call and its place.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

namespace fathom::cuda {

// Throws Error unless status is cudaSuccess: kNoMemory when memory ran out, kUnsupported when no
// device can be used, kInternal otherwise, naming call, place and CUDA's own text. An error that
// leaves the context unusable ("sticky": a kernel read outside its memory, say) is said to be one;
// the session that met it ends, the process goes on without CUDA. Other errors are cleared.
void Check(cudaError_t status, const char* call,
           std::source_location where = std::source_location::current());

// After a kernel launch: the error of the launch itself, if any.
inline void CheckLaunch(const char* kernel,
                        std::source_location where = std::source_location::current()) {
  Check(cudaGetLastError(), kernel, where);
}

// For destructors: an error while giving something back is nobody's to handle.
inline void Ignore(cudaError_t /*status*/) {}

}  // namespace fathom::cuda
