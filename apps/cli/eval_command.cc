// SPDX-License-Identifier: MIT
// `fathom eval`: the group of commands that measure quality.
#include "common.h"
#include "eval_answers.h"
#include "eval_error.h"

namespace fathom::cli {

void AddEvalCommand(CLI::App& app, int* exit_code) {
  CLI::App* eval = app.add_subcommand("eval", "Measure quality");
  eval->require_subcommand(1);
  AddEvalAnswersCommand(*eval, exit_code);
  AddEvalErrorCommand(*eval, exit_code);
}

}  // namespace fathom::cli
