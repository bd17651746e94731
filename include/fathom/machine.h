// SPDX-License-Identifier: MIT
// What the machine is, for people and reports.
#pragma once

#include <cstdint>
#include <string>

namespace fathom {

struct MachineInfo {
  std::string processor;
  std::string features;  // instruction sets the kernels ask for, "avx2 fma f16c avx512f ..."
  int n_processors = 0;  // usable by this process: affinity and control group respected
  std::int64_t total_bytes = 0;
  std::int64_t available_bytes = 0;  // what a session may take now
};

// Never throws; unknown parts are empty or zero.
MachineInfo DescribeMachine();

}  // namespace fathom
