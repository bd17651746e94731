// SPDX-License-Identifier: MIT
// Kernels of a step begin while the one before still runs (programmatic dependent launch), so that
// a chain of short ones does not pay for the start of each. LaunchFollower launches such a kernel;
// first in it every thread calls Follow, or one of what else is here.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "backend/cuda/check.h"

namespace fathom::cuda {

// Lets the kernel behind this one begin as soon as all blocks of this one have come here.
__device__ inline void LetNextBegin() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
// Until the kernel before this one has ended and what it wrote is seen. Before that a kernel may
// only read what no kernel of the step writes, and write nothing. No thread may leave without it:
// the kernel behind relies on it for all that came before.
__device__ inline void WaitForPrevious() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void Follow() {
  LetNextBegin();
  WaitForPrevious();
}

// A transfer leaves the processors idle, so what comes behind may be done beside it. A kernel that
// others may run beside calls this: it lets them begin once all before itself has ended.
__device__ inline void FollowAndLetRunBeside() {
  WaitForPrevious();
  LetNextBegin();
}
// All of a kernel that may run beside the one before it, if that one called the above, or runs
// beside one itself, and neither touches what the other writes. Data of earlier kernels is seen
// because they have ended, which writes it to the second-level cache, before this one's blocks
// exist, and the fence drops what the first-level cache has of it; PTX itself promises this only
// behind WaitForPrevious.
template <typename Work>
__device__ inline void RunBeside(bool beside, const Work& work) {
  LetNextBegin();
  if (beside) {
    __threadfence();
  } else {
    WaitForPrevious();
  }
  work();
  if (beside) WaitForPrevious();
}

// Launches a kernel that calls Follow behind what is in the stream. What such kernels read of each
// other must not come by `__ldg`, which takes data to be constant from a kernel's beginning on.
template <typename... Params>
void LaunchFollower(const char* name, void (*kernel)(Params...), dim3 grid, int threads, int bytes,
                    cudaStream_t stream, const std::type_identity_t<Params>&... args) {
  cudaFuncAttributes attributes{};
  Check(cudaFuncGetAttributes(&attributes, kernel), name);
  cudaLaunchAttribute follows{};
  follows.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  follows.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = &follows;
  config.numAttrs = attributes.ptxVersion >= 90 ? 1 : 0;  // older code has none of the above
  Check(cudaLaunchKernelEx(&config, kernel, args...), name);
}

}  // namespace fathom::cuda
