// SPDX-License-Identifier: MIT
// Named runs of `fathom eval error`: which methods answer which question.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fathom::cli {

struct EvalPreset {
  std::string name;
  std::string description;  // one line
  std::vector<std::string> methods;
  std::vector<std::string> k;     // as --k takes them; empty: the default list
  bool needs_statistics = false;  // --stats-file must be given
  bool both_statistics = false;   // runs twice: without the file's statistics and with them
};

// k of the runs that say none, as shares of the context.
std::vector<std::string> DefaultK();
// The methods of a run that says none: the rivals at their usual points and ours.
std::vector<std::string> DefaultMethods();

const std::vector<EvalPreset>& EvalPresets();
// Throws Error(kUsage) listing the names.
const EvalPreset& FindEvalPreset(std::string_view name);
// A line per preset: name and description.
std::string EvalPresetList();

}  // namespace fathom::cli
