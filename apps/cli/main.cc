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

// The parser's own message for an unknown command does not name it. Returns the command's words,
// "fathom run".
std::string CheckCommand(const CLI::App& app, int argc, char** argv) {
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (commands.empty() || argc < 2 || argv[1][0] == '-') return app.get_name();
  std::string valid;
  for (const CLI::App* command : commands) {
    if (command->get_name() == argv[1]) {
      return app.get_name() + " " + CheckCommand(*command, argc - 1, argv + 1);
    }
    valid += (valid.empty() ? "" : ", ") + command->get_name();
  }
  throw fathom::Error(fathom::ErrorCode::kUsage,
                      "unknown command '" + std::string(argv[1]) + "'; valid: " + valid);
}

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
  CLI::App app("Fathom: decode long contexts by reading only the key bits a query needs", "fathom");
  app.set_version_flag("--version", "fathom " FATHOM_VERSION);
  app.require_subcommand(1);
  int exit_code = fathom::cli::kExitOk;
  fathom::cli::AddRunCommand(app, &exit_code);
  fathom::cli::AddInfoCommand(app, &exit_code);
  fathom::cli::AddBenchCommand(app, &exit_code);
  fathom::cli::AddCaptureCommand(app, &exit_code);
  fathom::cli::AddCalibrateCommand(app, &exit_code);
  fathom::cli::AddEvalCommand(app, &exit_code);
  fathom::cli::AddSessionCommand(app, &exit_code);
  const std::string command = CheckCommand(app, argc, argv);
  app.failure_message([&command](const CLI::App* /*app*/, const CLI::Error& error) {
    return "fathom: " + std::string(error.what()) + "; see " + command + " --help\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version are "errors" with code 0 here.
    return app.exit(error) == 0 ? fathom::cli::kExitOk : fathom::cli::kExitUsage;
  }
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
