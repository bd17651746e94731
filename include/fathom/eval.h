// SPDX-License-Identifier: MIT
// All scans under one protocol (design section 5): how much of dense attention's output each method
// loses on a capture, at which read bits, stored bytes and fetched rows.
//
// Protocol. The index of every method is made at the first measured position (or earlier, see
// ErrorOptions::freeze) from the keys before it and from queries sampled before it, and then grows
// block by block as in decode: statistics never see what they are measured on. Every measured position is one step: the method attends, dense
// attention attends, and the two outputs are compared per query head. The first 4 and last 32 tokens
// and the unfinished block are always attended; k counts the 36.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fathom/calibration.h"
#include "fathom/capture.h"
#include "fathom/method.h"

namespace fathom {

struct ErrorOptions {
  std::vector<std::string> methods;  // specs; `k` in a spec overrides the list below
  std::vector<std::int64_t> k;       // tokens per query head, 37 or more
  std::vector<std::int32_t> layers;  // of the capture; empty takes all
  std::int64_t every = 1;            // measures every n-th of the capture's last positions
  // Share of the context at which statistics, basis and steps are frozen, in (0, 1]; the rest joins
  // as decode would append it, and no query after it is used for statistics. 0: at the first
  // measured position.
  double freeze = 0;
  bool unscaled = false;  // softmax of q.k without 1/sqrt(D), to compare with published tables only
  // The rule of the independent implementation that results are checked against: statistics see all
  // keys of the capture, the residual's factors are fitted on the first half of the measured
  // positions, and methods with a residual are reported on the second half alone.
  bool fit_on_measured = false;
  std::shared_ptr<const Calibration> calibration;  // of the capture's model, or null
  // For published reads with basis=auto when the capture does not tell: has the model QK-norm?
  std::optional<bool> has_qk_norm;
  std::string backend = "cpu";
  int n_threads = 0;  // 0: all processors
};

// One method at one k. Averages are over layers, query heads and measured positions. Standard errors
// take a measured position as one observation; neighbouring positions are alike, so they are lower
// bounds.
struct ErrorRow {
  std::string method;  // as it was given
  std::string spec;    // canonical
  std::int64_t k = 0;
  double mean = 0, mean_se = 0;  // relative L2 error of the attention output
  double median = 0, p99 = 0;
  double recall = 0, recall_se = 0;  // share of the k - 36 best tokens that were selected
  double mass = 0, mass_se = 0;      // attention mass of the attended tokens
  double read_bits = 0;     // per token and KV head; 0 where every step was dense
  double stored_bytes = 0;  // index bytes per token and KV head
  double rows = 0;          // rows attended per step and KV head (union over the group)
  std::int64_t samples = 0;
  std::vector<double> layer_mean;  // [layers] mean error
};

struct ErrorReport {
  std::string capture;  // path
  CaptureGeometry geometry;
  std::vector<std::int32_t> layers;
  std::int64_t n_positions = 0;    // measured
  std::int64_t built_tokens = 0;   // tokens that statistics saw
  std::vector<ErrorRow> rows;      // methods in the order given, k ascending within a method
};

// done and total count (method, k, position) triples; return false to stop with Error(kCancelled).
using EvalProgressFn = std::function<bool(std::int64_t done, std::int64_t total)>;

// Throws Error(kUsage) for specs, k or layers that do not fit the capture (k at or above the tokens
// of the capture: nothing to select), Error(kCorrupt) for keys or queries that are not finite.
// Progress is called from any of its threads, one call at a time.
ErrorReport EvaluateError(const CaptureFile& capture, const ErrorOptions& options,
                          const EvalProgressFn& progress = {});

// Bits at which a curve of one method reaches the error of a fixed-depth scan, by linear
// interpolation of log(error) over read bits.
struct EqualErrorBits {
  std::string reference;  // method of the fixed scan
  std::string curve;      // method without its bits or budget
  std::int64_t k = 0;
  double reference_bits = 0;
  double reference_error = 0;
  // Read bits of the curve at the reference's error. Empty where the curve does not reach it
  // (never_reached) or is below it at its fewest bits already (then `below` has those bits).
  std::optional<double> bits;
  std::optional<double> below;
};

// All pairs of a fixed-depth row and a curve with at least two points, per k.
std::vector<EqualErrorBits> FindEqualErrorBits(std::span<const ErrorRow> rows);

}  // namespace fathom
