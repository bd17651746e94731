// SPDX-License-Identifier: MIT
// fathom: the command line program. Results go to standard output, progress and messages to
// standard error.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "common.h"

namespace {

// Threads that wait at a barrier spin before they sleep. libgomp's default spins so long that, on a
// machine of few processors that other programs use too, waiting threads burn the time that the
// working ones need: decode falls from hundreds of tokens per second to a few. A short spin costs
// nothing there; with many threads it costs much, so larger machines keep the default
// (docs/benchmarking.md). libgomp reads the setting when the program is loaded, hence the restart.
void BoundSpinning(char** argv) {
  constexpr const char* kSpinCount = "GOMP_SPINCOUNT";
  constexpr int kFewProcessors = 4;
  if (std::getenv(kSpinCount) != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  if (fathom::DescribeMachine().n_processors > kFewProcessors) return;
  if (setenv(kSpinCount, "1000", 0) == 0) execv("/proc/self/exe", argv);
  // Where a restart is not possible the program runs all the same.
}

int Run(int argc, char** argv) {
  fathom::cli::CommandLine line(
      "fathom", "Fathom: decode long contexts by reading only the key bits a query needs");
  line.SetVersion("fathom " FATHOM_VERSION);
  const fathom::cli::Command program = line.root();
  program.RequireCommand();
  int exit_code = fathom::cli::kExitOk;
  fathom::cli::AddRunCommand(program, &exit_code);
  fathom::cli::AddInfoCommand(program, &exit_code);
  fathom::cli::AddBenchCommand(program, &exit_code);
  fathom::cli::AddCaptureCommand(program, &exit_code);
  fathom::cli::AddCalibrateCommand(program, &exit_code);
  fathom::cli::AddEvalCommand(program, &exit_code);
  fathom::cli::AddSessionCommand(program, &exit_code);
  line.Run(argc, argv);
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  BoundSpinning(argv);
  try {
    fathom::cli::CatchInterrupt();
    const int exit_code = Run(argc, argv);
    fathom::cli::WriteOut("");  // what printf holds back is written, or its failure known
    return exit_code;
  } catch (const fathom::Error& error) {
    std::fprintf(stderr, "fathom: %s\n", error.what());
    return fathom::cli::ExitCode(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "fathom: out of memory; choose a shorter context (-c)\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fathom: internal error: %s\n", error.what());
  }
  return fathom::cli::kExitFailure;
}
