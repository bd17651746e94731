// SPDX-License-Identifier: MIT
#pragma once

#include <string>

namespace fathom {

// "NVIDIA H200, 139 GiB, compute capability 9.0; ..." for every CUDA device, or why none can be
// used.
std::string DescribeCudaDevices();

}  // namespace fathom
