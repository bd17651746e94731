// SPDX-License-Identifier: MIT
// `fathom bench`: speed of the parts of a step, and of whole ones, each beside a rival in the same
// run.
#include "bench.h"
#include "common.h"

namespace fathom::cli {

void AddBenchCommand(Command app, int* exit_code) {
  Command bench = app.AddCommand("bench", "Measure speed");
  bench.RequireCommand();
  AddBenchDecode(bench, exit_code);
  AddBenchScan(bench, exit_code);
  AddBenchSelect(bench, exit_code);
  AddBenchAttend(bench, exit_code);
  AddBenchPrefill(bench, exit_code);
  AddBenchStep(bench, exit_code);
}

}  // namespace fathom::cli
