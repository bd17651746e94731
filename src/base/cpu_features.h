// SPDX-License-Identifier: MIT
// What this machine can run, and how many processors this process may use of it.
#pragma once

#include <string>

namespace fathom {

// Each flag means that the processor has the instructions and the operating system saves their
// registers. The amx_* instructions also need AllowAmxTiles before the first use. All false outside
// x86-64.
struct CpuFeatures {
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512vbmi = false;
  bool avx512vbmi2 = false;
  bool avx512vnni = false;
  bool avx512bf16 = false;
  bool gfni = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool amx_int8 = false;
  std::string brand;  // as the processor calls itself; empty when it does not say
};

// Detected at the first call; thread-safe.
const CpuFeatures& GetCpuFeatures();

// Asks the operating system to let this process use the tile registers of AMX, once, at the first
// call; thread-safe. False where there are none or it refuses. Holds for all threads.
bool AllowAmxTiles();

// Processors of the affinity mask, or the control group's CPU quota rounded up where that is fewer.
// At least 1.
int UsableProcessors();

namespace internal {

// CPU quota in processors of the control group described by the files under `root` ("" for this
// machine; tests give a folder with proc/ and sys/), 0 when there is none.
double CgroupCpuQuota(const std::string& root);

}  // namespace internal
}  // namespace fathom
