// SPDX-License-Identifier: MIT
// What `fathom eval error` prints and writes: tables, JSON (docs/format.md, "Error report"), plot.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "fathom/eval.h"
#include "svg_plot.h"

namespace fathom::cli {

constexpr const char* kOwnStatistics = "own prefill";

// One capture with one source of statistics.
struct ErrorRun {
  ErrorReport report;
  std::string statistics = kOwnStatistics;  // or the name of the statistics file
  double seconds = 0;
};

// The tables of a run, one per k, each followed by the bits at equal error.
std::string ErrorTables(const ErrorRun& run);

// The parts of the document that follow from the run: everything of its ErrorReport.
nlohmann::json ErrorRunJson(const ErrorRun& run);

// Error over read bits: a column of panels per run, a row per rank of k (the smallest of each run
// first).
PlotFigure ErrorFigure(const std::vector<ErrorRun>& runs);

// Four significant digits: "0.1234", "68.00", "1234", "1.234e-07"; "0" and "nan" as they are.
std::string Significant(double value);

}  // namespace fathom::cli
