// SPDX-License-Identifier: MIT
// What `fathom bench step` prints and writes: tables, JSON, picture.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fathom/step_bench.h"
#include "svg_bars.h"

namespace fathom::cli {

// The read that ratios compare with: 4-bit codes of the 32 channels with the largest |q|.
inline constexpr const char* kStepBaseline = "sparq:r=32";

// One combination: what was measured, or why it was not.
struct StepRow {
  std::int64_t n_tokens = 0;
  int batch = 0;
  std::string placement;
  std::string method;  // as it was asked for
  std::optional<StepBenchResult> result;
  std::string refusal;
};

struct StepReport {
  StepShape shape;
  StepKeys keys;
  std::int64_t k = 0;
  bool interrupted = false;
  std::vector<StepRow> rows;
};

// How many times faster a row's GPU time is than that of the baseline in the same setting; 0 where
// one of them is missing.
double StepRatio(const StepReport& report, const StepRow& row);

// A table of times, one of bytes and rates, one beside the published numbers where there are some,
// and notes: which keys, what was not measured, folded rows, random codes, memory that is not
// pinned.
std::string StepTables(const StepReport& report);

// The whole document. Published numbers stand in their rows.
nlohmann::json StepJson(const StepReport& report);

// A panel per context, batch and placement, a bar per method, its stages stacked.
BarFigure StepFigure(const StepReport& report);

}  // namespace fathom::cli
