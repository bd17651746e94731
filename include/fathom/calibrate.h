// SPDX-License-Identifier: MIT
// Makes a statistics file's content (fathom/calibration.h) from a capture.
//
// Statistics see the tokens before the first measured position and the queries for statistics
// alone, as in EvaluateError: evaluating the same capture with the result gives the same errors as
// without. Only budgets look at the measured queries.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/calibration.h"
#include "fathom/capture.h"

namespace fathom {

// A budget per layer for one method.
struct BudgetRequest {
  // Of fathom: preset=paper shares code bits, our own read shares read bits. k is 512 unless given.
  std::string spec;
  double mean = 0;  // of the layers' bits
};

struct CalibrateOptions {
  std::vector<std::string> methods;  // specs whose residual factors are fitted and kept
  std::vector<BudgetRequest> budgets;
  // For published reads with basis=auto when the capture does not tell: has the model QK-norm?
  std::optional<bool> has_qk_norm;
  std::string backend = "cpu";
  int n_threads = 0;  // 0: all processors
};

struct LayerBudgets {
  std::string key;                 // in Calibration::budgets
  double mean = 0;                 // asked for
  std::vector<double> bits;        // [layers]
  std::vector<double> error;       // [layers] mean relative error of the attention output with them
  std::vector<double> flat_error;  // [layers] with `mean` bits in every layer
};

struct CalibrateReport {
  std::shared_ptr<const Calibration> calibration;
  std::vector<LayerBudgets> budgets;  // as asked for
};

// Called with what is being done ("statistics", "budgets of SPEC", "residual"); return false to
// stop with Error(kCancelled). Called from several threads, one call at a time.
using CalibrateProgressFn =
    std::function<bool(std::string_view stage, std::int64_t done, std::int64_t total)>;

// Throws Error(kUsage): fewer than 80 tokens before the first measured position; keys no basis can
// be made of (names layer and KV head); a method without residual factors, or too few tokens for
// its k; a budget outside the candidates' range. Throws Error(kCorrupt) as CaptureFile does.
CalibrateReport Calibrate(const CaptureFile& capture, const CalibrateOptions& options,
                          const CalibrateProgressFn& progress = {});

// The published rule for budgets per layer: all layers start at the lowest candidate; the layer
// whose error falls most per added bit goes one candidate up, again and again, until no step fits
// the mean. A step that would exceed the mean is passed over; of equal steps the first layer's is
// taken. candidates: ascending; errors: [candidates][layers], finite. Throws Error(kUsage) for a
// mean outside the candidates.
std::vector<double> PlanLayerBudgets(std::span<const double> candidates,
                                     std::span<const std::vector<double>> errors, double mean);

}  // namespace fathom
