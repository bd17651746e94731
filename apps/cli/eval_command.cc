// SPDX-License-Identifier: MIT
// `fathom eval`: the group of commands that measure quality.
#include "common.h"
#include "eval_answers.h"
#include "eval_error.h"

namespace fathom::cli {

void AddEvalCommand(Command app, int* exit_code) {
  Command eval = app.AddCommand("eval", "Measure quality");
  eval.RequireCommand();
  AddEvalAnswersCommand(eval, exit_code);
  AddEvalErrorCommand(eval, exit_code);
}

}  // namespace fathom::cli
