// SPDX-License-Identifier: MIT
// The parts of `fathom bench`. Each adds its subcommand; the callback stores the exit code.
#pragma once

#include "command_line.h"

namespace fathom::cli {

void AddBenchDecode(Command bench, int* exit_code);
void AddBenchScan(Command bench, int* exit_code);
void AddBenchSelect(Command bench, int* exit_code);
void AddBenchAttend(Command bench, int* exit_code);
void AddBenchPrefill(Command bench, int* exit_code);
void AddBenchStep(Command bench, int* exit_code);

}  // namespace fathom::cli
