// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/half.h"
#include "base/parallel.h"
#include "eval/measured_capture.h"
#include "fathom/error.h"
#include "fathom/eval.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// One method at one k.
struct Task {
  std::string given;
  MethodSpec spec;
  std::int64_t k = 0;
  std::size_t k_index = 0;  // in the list of distinct k
};

void CheckK(std::int64_t k, const CaptureFile& capture) {
  const std::int64_t n = capture.geometry().n_tokens;
  if (k > kAlwaysKept && k < n) return;
  throw Error(ErrorCode::kUsage, "k=" + std::to_string(k) + " does not fit capture '" +
                                     capture.path() + "' of " + std::to_string(n) +
                                     " tokens; it must be " + std::to_string(kAlwaysKept + 1) +
                                     ".." + std::to_string(n - 1));
}

// All methods at all k; methods that take no k (dense) once. Fills the list of distinct k.
std::vector<Task> ListTasks(const CaptureFile& capture, const ErrorOptions& options,
                            std::vector<std::int64_t>* distinct) {
  std::vector<Task> tasks;
  for (const std::string& text : options.methods) {
    MethodSpec spec = MethodSpec::Parse(text);
    ValidateMethodSpec(spec);
    // A capture is measured as it is, however short.
    if (TakesOption(spec.name, "min")) spec.options.emplace("min", "0");
    std::vector<std::int64_t> ks = options.k;
    const auto own = spec.options.find("k");
    if (own != spec.options.end()) ks = {std::stoll(own->second)};
    if (!TakesOption(spec.name, "k") && ks.size() > 1) ks.resize(1);
    std::ranges::sort(ks);
    ks.erase(std::unique(ks.begin(), ks.end()), ks.end());
    for (const std::int64_t k : ks) {
      CheckK(k, capture);
      auto found = std::ranges::find(*distinct, k);
      if (found == distinct->end()) found = distinct->insert(distinct->end(), k);
      if (TakesOption(spec.name, "k")) spec.options["k"] = std::to_string(k);
      tasks.push_back({text, spec, k, Size(found - distinct->begin())});
    }
  }
  if (tasks.empty()) {
    throw Error(ErrorCode::kUsage, "nothing to evaluate: give at least one method and one k");
  }
  return tasks;
}

// Running sums of one task; a position is one observation.
class Tally {
 public:
  explicit Tally(std::int32_t n_layers) : layer_sum_(Size(n_layers)) {}

  void Add(std::int32_t layer, double error, double recall, double mass) {
    errors_.push_back(error);
    layer_sum_[Size(layer)] += error;
    now_[0] += error;
    now_[1] += recall;
    now_[2] += mass;
    ++n_now_;
  }
  void EndPosition() {
    for (std::size_t i = 0; i < 3; ++i) {
      positions_[i].push_back(now_[i] / static_cast<double>(std::max<std::int64_t>(n_now_, 1)));
      now_[i] = 0;
    }
    n_now_ = 0;
  }

  void Finish(ErrorRow* row) {
    std::tie(row->mean, row->mean_se) = MeanAndError(positions_[0]);
    std::tie(row->recall, row->recall_se) = MeanAndError(positions_[1]);
    std::tie(row->mass, row->mass_se) = MeanAndError(positions_[2]);
    row->samples = static_cast<std::int64_t>(errors_.size());
    row->median = Quantile(0.5);
    row->p99 = Quantile(0.99);
    const double per_layer =
        static_cast<double>(errors_.size()) / static_cast<double>(layer_sum_.size());
    for (const double sum : layer_sum_) row->layer_mean.push_back(sum / per_layer);
  }

 private:
  static std::pair<double, double> MeanAndError(const std::vector<double>& x) {
    const auto n = static_cast<double>(x.size());
    double mean = 0, square = 0;
    for (const double v : x) mean += v / n;
    for (const double v : x) square += (v - mean) * (v - mean);
    return {mean, x.size() > 1 ? std::sqrt(square / (n - 1) / n) : 0.0};
  }

  // Linear between order statistics.
  double Quantile(double share) {
    if (errors_.empty()) return 0;
    std::ranges::sort(errors_);
    const double at = share * static_cast<double>(errors_.size() - 1);
    const auto below = static_cast<std::size_t>(at);
    const std::size_t above = std::min(below + 1, errors_.size() - 1);
    const double weight = at - static_cast<double>(below);
    return errors_[below] * (1 - weight) + errors_[above] * weight;
  }

  std::vector<double> errors_;
  std::vector<double> layer_sum_;
  double now_[3] = {};
  std::int64_t n_now_ = 0;
  std::vector<double> positions_[3];
};

double RelativeError(const float* out, const float* dense, std::int32_t dim) {
  double error = 0, norm = 0;
  for (std::int32_t d = 0; d < dim; ++d) {
    const double x = static_cast<double>(out[d]) - dense[d];
    error += x * x;
    norm += static_cast<double>(dense[d]) * dense[d];
  }
  if (norm == 0) return error == 0 ? 0 : std::numeric_limits<double>::infinity();
  return std::sqrt(error / norm);
}

class TaskRun {
 public:
  TaskRun(const MeasuredCapture& capture, const Task& task, Method& method)
      : capture_(capture),
        task_(task),
        method_(method),
        tally_(capture.n_layers()),
        out_(Size(capture.heads().n_heads) * Size(capture.heads().head_dim)),
        key_(Size(capture.heads().head_dim)) {}

  void Position(std::size_t position, bool counts) {
    for (std::int32_t layer = 0; layer < capture_.n_layers(); ++layer) {
      method_.Attend(layer, capture_.positions()[position] + 1, capture_.query(layer, position),
                     out_.data());
      if (counts) Compare(layer, position);
    }
    if (counts) tally_.EndPosition();
  }

  ErrorRow Finish(std::int64_t n_tokens) {
    ErrorRow row;
    row.method = task_.given;
    row.spec = method_.spec();
    row.k = task_.k;
    tally_.Finish(&row);
    const MethodCounters& counters = method_.counters();
    row.read_bits = counters.mean_read_bits();
    row.rows = static_cast<double>(counters.rows) /
               static_cast<double>(std::max<std::int64_t>(counters.calls, 1));
    const std::int64_t indexed = n_tokens / kBlockTokens * kBlockTokens;
    row.stored_bytes = static_cast<double>(method_.MemoryBytes()) /
                       static_cast<double>(capture_.n_layers() * capture_.heads().n_kv_heads *
                                           std::max<std::int64_t>(indexed, 1));
    return row;
  }

 private:
  void Compare(std::int32_t layer, std::size_t position) {
    const HeadGeometry& heads = capture_.heads();
    const float* dense = capture_.dense(layer, position);
    for (std::int32_t kv = 0; kv < heads.n_kv_heads; ++kv) {
      Kept kept(Size(heads.group()));
      const bool sparse = LookAtTokens(layer, position, kv, &kept);
      for (std::int32_t g = 0; g < heads.group(); ++g) {
        const std::int32_t head = kv * heads.group() + g;
        const std::ptrdiff_t offset = std::ptrdiff_t{head} * heads.head_dim;
        const double error = RelativeError(out_.data() + offset, dense + offset, heads.head_dim);
        const auto keep = static_cast<double>(task_.k - kAlwaysKept);
        const auto& [hits, mass] = kept[Size(g)];
        tally_.Add(layer, error, sparse ? std::min(static_cast<double>(hits) / keep, 1.0) : 1.0,
                   sparse ? mass : 1.0);
      }
    }
  }

  using Kept = std::vector<std::pair<std::int64_t, double>>;  // of a head: hits, mass

  // False for a dense step.
  bool LookAtTokens(std::int32_t layer, std::size_t position, std::int32_t kv, Kept* kept) {
    const HeadGeometry& heads = capture_.heads();
    const AttendedTokens attended = method_.attended(kv);
    if (attended.tokens.empty()) return false;
    const std::int64_t n_tokens = capture_.positions()[position] + 1;
    const std::int64_t last = std::min(n_tokens / kBlockTokens * kBlockTokens, n_tokens - kWindow);
    const Half* rows = capture_.rows().rows(layer, kv);
    const float* q = capture_.query(layer, position);
    for (std::size_t t = 0; t < attended.tokens.size(); ++t) {
      const std::int64_t token = attended.tokens[t];
      ConvertHalfToFloat(rows + token * 2 * heads.head_dim, heads.head_dim, key_.data());
      for (std::int32_t g = 0; g < heads.group(); ++g) {
        if ((attended.mask[t] >> g & 1) == 0) continue;
        const std::int32_t head = kv * heads.group() + g;
        double score = 0;
        for (std::int32_t d = 0; d < heads.head_dim; ++d) {
          score += static_cast<double>(q[head * heads.head_dim + d]) * key_[Size(d)];
        }
        auto& [hits, mass] = (*kept)[Size(g)];
        mass += std::exp(score * capture_.scale() - capture_.dense_lse(layer, position, head));
        if (token >= kSinks && token < last &&
            score >= capture_.threshold(task_.k_index, layer, position, head)) {
          ++hits;
        }
      }
    }
    return true;
  }

  const MeasuredCapture& capture_;
  const Task& task_;
  Method& method_;
  Tally tally_;
  std::vector<float> out_;  // [n_heads][D]
  std::vector<float> key_;  // [D]
};

}  // namespace

ErrorReport EvaluateError(const CaptureFile& capture, const ErrorOptions& options,
                          const EvalProgressFn& progress) {
  std::vector<std::int64_t> ks;
  const std::vector<Task> tasks = ListTasks(capture, options, &ks);
  std::vector<char> qk_norm;
  qk_norm.reserve(tasks.size());
  for (const Task& task : tasks) {
    qk_norm.push_back(HasQkNorm(capture, options.has_qk_norm, task.spec) ? 1 : 0);
  }
  const int n_threads = MakeBackend(options.backend, options.n_threads)->n_threads();
  // Methods run side by side, each on one thread.
  const std::unique_ptr<Backend> backend = MakeBackend(options.backend, 1);
  std::shared_ptr<const Calibration> calibration;
  if (options.calibration) {
    const std::vector<std::int32_t>& layers =
        options.layers.empty() ? capture.geometry().layers : options.layers;
    options.calibration->CheckLayers(layers, capture.geometry().heads);
    calibration = options.calibration->Select(layers);
  }
  MeasuredCapture measured(capture, options);
  measured.MeasureDense(*backend, ks, n_threads);

  ErrorReport report;
  report.capture = capture.path();
  report.geometry = capture.geometry();
  report.layers = measured.layers();
  report.n_positions = static_cast<std::int64_t>(measured.positions().size());
  report.built_tokens = measured.built_tokens();
  report.rows.resize(tasks.size());
  const auto n_tasks = static_cast<std::int64_t>(tasks.size());
  const std::int64_t total = n_tasks * report.n_positions;
  std::int64_t done = 0;
  std::mutex mutex;
  const auto step = [&] {
    const std::lock_guard lock(mutex);
    ++done;
    if (progress && !progress(done, total) && done < total) {
      throw Error(ErrorCode::kCancelled, "evaluation stopped");
    }
  };
  ParallelFor(n_tasks, n_threads, [&](std::int64_t t) {
    const Task& task = tasks[Size(t)];
    const auto method = MakeMethod(task.spec, {&measured.rows(), backend.get(), &measured.queries(),
                                               qk_norm[Size(t)] != 0, calibration.get()});
    method->BuildIndex(measured.built_tokens());
    method->ResetCounters();
    TaskRun run(measured, task, *method);
    const bool has_residual = !method->residual_factors().empty();
    for (std::size_t p = 0; p < measured.positions().size(); ++p) {
      run.Position(p, !(has_residual && measured.fits_only(p)));
      step();
    }
    report.rows[Size(t)] = run.Finish(measured.positions().back() + 1);
  });
  return report;
}

}  // namespace fathom
