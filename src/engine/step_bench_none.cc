// SPDX-License-Identifier: MIT
// `fathom bench step` in a build without CUDA.
#include "fathom/error.h"
#include "fathom/step_bench.h"

namespace fathom {

StepBenchResult RunStepBench(const StepBenchOptions& /*options*/,
                             const StepBenchProgress& /*progress*/) {
  throw Error(ErrorCode::kUnsupported,
              "this build has no CUDA; configure with -DFATHOM_CUDA=ON (preset cuda) and run it on "
              "a machine with an NVIDIA GPU");
}

}  // namespace fathom
