// SPDX-License-Identifier: MIT
// The parts of `fathom bench`. Each adds its subcommand; the callback stores the exit code.
#pragma once

#include <CLI/CLI.hpp>

namespace fathom::cli {

void AddBenchDecode(CLI::App& bench, int* exit_code);
void AddBenchScan(CLI::App& bench, int* exit_code);
void AddBenchSelect(CLI::App& bench, int* exit_code);
void AddBenchAttend(CLI::App& bench, int* exit_code);
void AddBenchPrefill(CLI::App& bench, int* exit_code);
void AddBenchStep(CLI::App& bench, int* exit_code);

}  // namespace fathom::cli
