// SPDX-License-Identifier: MIT
#include "fathom/calibrate.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/parallel.h"
#include "eval/measured_capture.h"
#include "fathom/error.h"
#include "fathom/eval.h"
#include "method/calibration_layout.h"
#include "method/head_stats.h"

namespace fathom {
namespace {

constexpr std::int64_t kFewestTokens = kStatsSkip + kBlockTokens;
constexpr std::array<std::int32_t, 2> kMeanBits = {4, 8};
// Candidates for the budget of a layer: the published ones in code bits, ours in read bits.
constexpr std::array<double, 8> kPaperCandidates = {24, 32, 40, 48, 64, 80, 96, 128};
constexpr std::array<double, 8> kOwnCandidates = {12, 16, 19, 24, 28, 37, 48, 64};

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

[[noreturn]] void Fail(const std::string& message) { throw Error(ErrorCode::kUsage, message); }

std::string NumberText(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

// Makes calibrations of one capture, stage by stage.
class Calibrator {
 public:
  Calibrator(const CaptureFile& capture, const CalibrateOptions& options,
             const CalibrateProgressFn& progress)
      : capture_(capture),
        options_(options),
        progress_(progress),
        backend_(MakeBackend(options.backend, options.n_threads)),
        measured_(capture, {}),
        calibration_(std::make_shared<Calibration>()) {}

  void MeasureStatistics();
  LayerBudgets FitBudgets(const BudgetRequest& request);
  void FitResiduals();
  std::shared_ptr<const Calibration> calibration() const { return calibration_; }

 private:
  MethodContext Context(const Backend* backend, bool has_qk_norm,
                        const Calibration* calibration) const {
    return {&measured_.rows(), backend, &measured_.queries(), has_qk_norm, calibration};
  }
  void MeasureHeads(std::int32_t slot, std::int32_t kv_head, const Backend& backend);
  void MeasureBasis(std::int32_t slot, std::int32_t kv_head, BasisRule rule, const Backend& backend,
                    HeadCalibration* head) const;
  void CheckLength(const std::string& method, std::int64_t k, std::int64_t last,
                   const char* queries) const;
  void FitResidual(const std::string& text);
  void Step(std::string_view stage, std::int64_t done, std::int64_t total) const {
    if (progress_ && !progress_(stage, done, total)) {
      throw Error(ErrorCode::kCancelled, "calibration stopped");
    }
  }

  const CaptureFile& capture_;
  const CalibrateOptions& options_;
  const CalibrateProgressFn& progress_;
  std::unique_ptr<Backend> backend_;
  MeasuredCapture measured_;
  std::shared_ptr<Calibration> calibration_;
};

void Calibrator::MeasureStatistics() {
  Calibration& c = *calibration_;
  const CaptureGeometry& geometry = capture_.geometry();
  c.layers = geometry.layers;
  c.heads = geometry.heads;
  c.n_tokens = measured_.built_tokens();
  c.model = geometry.model;
  c.source = geometry.text;
  const auto n = static_cast<std::int64_t>(c.layers.size()) * c.heads.n_kv_heads;
  c.moments.resize(Size(n));
  c.head_calibrations.resize(Size(n) * kBasisRules);
  // Heads are measured side by side, each on one thread.
  const std::unique_ptr<Backend> single = MakeBackend(options_.backend, 1);
  std::mutex mutex;
  std::int64_t done = 0;
  ParallelFor(n, backend_->n_threads(), [&](std::int64_t head) {
    MeasureHeads(static_cast<std::int32_t>(head / c.heads.n_kv_heads),
                 static_cast<std::int32_t>(head % c.heads.n_kv_heads), *single);
    const std::lock_guard lock(mutex);
    Step("statistics", ++done, n);
  });
}

void Calibrator::MeasureHeads(std::int32_t slot, std::int32_t kv_head, const Backend& backend) {
  Calibration& c = *calibration_;
  const std::size_t head = Size(slot) * Size(c.heads.n_kv_heads) + Size(kv_head);
  c.moments[head] = MeasureMoments(Context(&backend, false, nullptr), slot, kv_head, c.n_tokens);
  for (int rule = 0; rule < kBasisRules; ++rule) {
    MeasureBasis(slot, kv_head, static_cast<BasisRule>(rule), backend,
                 &c.head_calibrations[head * kBasisRules + Size(rule)]);
  }
}

void Calibrator::MeasureBasis(std::int32_t slot, std::int32_t kv_head, BasisRule rule,
                              const Backend& backend, HeadCalibration* head) const {
  const std::int64_t n_tokens = calibration_->n_tokens;
  const auto fail = [&](const std::string& why) {
    Fail("layer " + std::to_string(calibration_->layers[Size(slot)]) + ", KV head " +
         std::to_string(kv_head) + ": basis " + statistics_file::BasisName(rule) + ": " + why +
         "; capture a longer or more varied text");
  };
  try {
    head->stats =
        MeasureHead(Context(&backend, false, nullptr), slot, kv_head, n_tokens, rule, true);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUsage) throw;
    const std::string why = error.what();
    fail(why.substr(0, why.find(';')));  // its remedy is another basis, which a file cannot choose
  }
  if (statistics_file::HasMap(rule)) {
    const std::string fault = statistics_file::PairFault(head->stats.basis);
    if (!fault.empty()) fail(fault);
  }
  const std::vector<double>& keys = head->stats.abs_key;
  const std::vector<double>& queries = head->stats.abs_query;
  head->order.resize(keys.size());
  std::iota(head->order.begin(), head->order.end(), 0);
  std::ranges::stable_sort(head->order, [&](std::int32_t a, std::int32_t b) {
    return keys[Size(a)] * queries[Size(a)] > keys[Size(b)] * queries[Size(b)];
  });
  if (rule == BasisRule::kRaw) return;
  for (std::size_t i = 0; i < kMeanBits.size(); ++i) {
    IndexShape shape;
    shape.head_dim = calibration_->heads.head_dim;
    shape.mean_bits = kMeanBits[i];
    HeadIndex index(shape, head->stats.basis);
    index.Build(measured_.rows().rows(slot, kv_head), n_tokens / kBlockTokens, backend);
    head->codec[i] = index.codecs().front();
    head->distortion[i] = index.Distortions();
  }
}

// A query that sees fewer than a block more than k tokens may be answered densely: it says nothing.
void Calibrator::CheckLength(const std::string& method, std::int64_t k, std::int64_t last,
                             const char* queries) const {
  if (last + 1 >= k + kBlockTokens) return;
  Fail(method + " attends to k=" + std::to_string(k) + " tokens, and the " + queries +
       " queries of '" + capture_.path() + "' end at position " + std::to_string(last) +
       ", where that is nearly all; capture more tokens (-c), or give a smaller k");
}

void Calibrator::FitResidual(const std::string& text) {
  MethodSpec spec = MethodSpec::Parse(text);
  const auto nothing = [&text] {
    Fail("method " + text +
         " has no residual factors that are fitted; leave it out of --methods, "
         "or give residual=mean or residual=block where it takes them");
  };
  if (!TakesOption(spec.name, "residual")) nothing();
  spec.options["min"] = "0";  // a capture is used as it is, however short
  const auto method = MakeMethod(
      spec,
      Context(backend_.get(), HasQkNorm(capture_, options_.has_qk_norm, spec), calibration_.get()));
  if (method->residual_factors().empty()) nothing();
  const MethodSpec canonical = MethodSpec::Parse(method->spec());
  const QuerySamples& recent = measured_.queries().front().recent;
  CheckLength(text, std::stoll(canonical.options.at("k")),
              recent.size() > 0 ? recent.positions().back() : 0, "statistics'");
  method->BuildIndex(measured_.built_tokens());
  const std::span<const float> factors = method->residual_factors();
  calibration_->residual[CalibrationKey(method->spec())].assign(factors.begin(), factors.end());
}

void Calibrator::FitResiduals() {
  const auto n = static_cast<std::int64_t>(options_.methods.size());
  for (std::int64_t i = 0; i < n; ++i) {
    FitResidual(options_.methods[Size(i)]);
    Step("residual", i + 1, n);
  }
}

// The spec with so many bits in every layer, or with those of a file. Throws Error(kUsage) for a
// request that cannot be.
MethodSpec BudgetSpec(const BudgetRequest& request, double bits, const char* budgets) {
  MethodSpec spec = MethodSpec::Parse(request.spec);
  ValidateMethodSpec(spec);
  if (spec.name != "fathom") Fail(request.spec + " takes no budget per layer; only fathom does");
  for (const char* option : {"bits", "budget"}) {
    if (spec.options.contains(option)) {
      Fail(request.spec + " says how many " + option + " and so does the mean after @; leave out " +
           option + "=");
    }
  }
  const auto dense = spec.options.find("dense");
  if (dense != spec.options.end() && dense->second != "0") {
    Fail(request.spec + ": layers that are always dense have no budget; leave out dense=");
  }
  const auto preset = spec.options.find("preset");
  const bool paper = preset != spec.options.end() && preset->second == "paper";
  spec.options[paper ? "budget" : "bits"] = NumberText(bits);
  // One multiplier for all layers shares bits among them by itself.
  if (!paper) spec.options.emplace("plan", "measured");
  spec.options["budgets"] = budgets;
  spec.options["min"] = "0";  // a capture is used as it is, however short
  spec.options.emplace("k", "512");
  ValidateMethodSpec(spec);
  return spec;
}

std::span<const double> Candidates(const MethodSpec& spec) {
  return spec.options.contains("budget") ? std::span<const double>(kPaperCandidates)
                                         : std::span<const double>(kOwnCandidates);
}

// Before anything is measured: the request is possible, and its mean within the candidates.
void CheckBudget(const BudgetRequest& request) {
  const MethodSpec spec = BudgetSpec(request, request.mean, "file");
  const std::span<const double> candidates = Candidates(spec);
  const std::vector<std::vector<double>> no_errors(candidates.size());
  PlanLayerBudgets(candidates, no_errors, request.mean);
}

LayerBudgets Calibrator::FitBudgets(const BudgetRequest& request) {
  const MethodSpec spec = BudgetSpec(request, request.mean, "file");
  const std::span<const double> candidates = Candidates(spec);
  ErrorOptions eval;
  for (const double bits : candidates) {
    eval.methods.push_back(BudgetSpec(request, bits, "flat").ToString());
  }
  eval.methods.push_back(BudgetSpec(request, request.mean, "flat").ToString());
  eval.k = {std::stoll(spec.options.at("k"))};
  eval.calibration = calibration_;
  eval.has_qk_norm = options_.has_qk_norm;
  eval.backend = options_.backend;
  eval.n_threads = options_.n_threads;
  CheckLength(request.spec, eval.k.front(), measured_.positions().front(), "measured");
  const std::string stage = "budgets of " + request.spec;
  const ErrorReport report =
      EvaluateError(capture_, eval, [&](std::int64_t done, std::int64_t total) {
        return !progress_ || progress_(stage, done, total);
      });
  std::vector<std::vector<double>> errors;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    errors.push_back(report.rows[i].layer_mean);
  }

  LayerBudgets budgets;
  budgets.mean = request.mean;
  budgets.bits = PlanLayerBudgets(candidates, errors, request.mean);
  for (std::size_t layer = 0; layer < budgets.bits.size(); ++layer) {
    const auto at = std::ranges::find(candidates, budgets.bits[layer]) - candidates.begin();
    budgets.error.push_back(errors[Size(at)][layer]);
  }
  budgets.flat_error = report.rows.back().layer_mean;
  budgets.key = report.rows.back().spec;
  constexpr std::string_view kFlat = "budgets=flat";
  budgets.key.replace(budgets.key.find(kFlat), kFlat.size(), "budgets=file");
  budgets.key = CalibrationKey(budgets.key);
  calibration_->budgets[budgets.key] = budgets.bits;
  return budgets;
}

}  // namespace

CalibrateReport Calibrate(const CaptureFile& capture, const CalibrateOptions& options,
                          const CalibrateProgressFn& progress) {
  const std::int64_t n_tokens = capture.geometry().q_positions.front();
  if (n_tokens < kFewestTokens) {
    Fail("capture '" + capture.path() + "' has " + std::to_string(n_tokens) +
         " tokens before the first measured position; statistics need " +
         std::to_string(kFewestTokens) + " (16 are left out, a block is 64): capture more tokens " +
         "(-c)");
  }
  for (const std::string& method : options.methods) ValidateMethodSpec(MethodSpec::Parse(method));
  for (const BudgetRequest& request : options.budgets) CheckBudget(request);
  Calibrator calibrator(capture, options, progress);
  calibrator.MeasureStatistics();
  CalibrateReport report;
  for (const BudgetRequest& request : options.budgets) {
    report.budgets.push_back(calibrator.FitBudgets(request));
  }
  calibrator.FitResiduals();
  report.calibration = calibrator.calibration();
  return report;
}

}  // namespace fathom
