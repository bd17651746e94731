// SPDX-License-Identifier: MIT
// `fathom bench step`: a whole decode step on a CUDA device, by stage, for any list of methods in
// the same pipeline.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "bench.h"
#include "bench_step_report.h"
#include "common.h"
#include "fathom/capture.h"
#include "fathom/step_bench.h"
#include "progress.h"
#include "specs.h"

namespace fathom::cli {
namespace {

constexpr const char* kAutomatic = "auto";

struct StepOptions {
  std::string shape = "qwen3-8b";
  std::vector<std::string> contexts = {"256k", "512k", "1M"};
  std::vector<std::string> methods = {"fathom:bits=28", "fathom:preset=paper,budget=48",
                                      "sparq:r=32",     "sparq:r=16",
                                      "thumbnail",      "landmark",
                                      "full4",          "exact",
                                      "dense"};
  std::vector<std::string> placements = {"host"};
  std::vector<int> batches = {1};
  std::int64_t k = 512;
  std::int64_t steps = 30;
  double seconds = 30;
  std::string fold = kAutomatic;
  std::string keys;
  std::uint64_t seed = 1;
  bool json = false;
  std::string svg;
};

std::vector<std::string> ShapeNames() {
  std::vector<std::string> names;
  for (const StepShape& shape : KnownStepShapes()) names.push_back(shape.name);
  return names;
}

// All combinations in the order of the report. Throws Error(kUsage).
std::vector<StepBenchOptions> Requests(const StepOptions& options) {
  const std::vector<std::string> methods = ParseSpecLists(options.methods);
  for (const std::string& spec : methods) {
    if (MethodSpec::Parse(spec).options.contains("k")) {
      throw Error(ErrorCode::kUsage,
                  "method '" + spec + "': all methods attend the same k; give it by --k");
    }
  }
  StepBenchOptions request;
  const std::vector<StepShape> shapes = KnownStepShapes();
  request.shape = *std::find_if(shapes.begin(), shapes.end(), [&](const StepShape& shape) {
    return shape.name == options.shape;
  });
  request.k = options.k;
  request.steps = options.steps;
  request.seconds = options.seconds;
  request.fold_tokens = options.fold == kAutomatic ? 0 : ParseTokens(options.fold);
  request.keys = options.keys;
  request.seed = options.seed;
  std::vector<StepBenchOptions> requests;
  for (const std::string& context : options.contexts) {
    request.n_tokens = ParseTokens(context);
    for (const int batch : options.batches) {
      request.batch = batch;
      for (const std::string& placement : options.placements) {
        request.placement = placement;
        for (const std::string& method : methods) {
          request.method = method;
          requests.push_back(request);
        }
      }
    }
  }
  return requests;
}

// Does this build list CUDA among its backends? Throws Error(kUnsupported) if it does and no device
// can be used.
bool CheckCuda() {
  for (const BackendInfo& backend : ListBackends()) {
    if (backend.name != "cuda") continue;
    if (backend.available) return true;
    throw Error(ErrorCode::kUnsupported, "bench step needs a CUDA device: " + backend.reason);
  }
  return false;
}

// A bar for each piece of work of a run. False after Ctrl-C.
class StepProgress {
 public:
  bool Update(std::string_view what, std::string_view unit, std::int64_t done, std::int64_t total) {
    if (what != what_) {
      bar_.emplace("  " + std::string(what), std::string(unit));
      what_ = what;
    }
    bar_->Update(done, total);
    return !Interrupted();
  }

 private:
  std::string what_;
  std::optional<Progress> bar_;
};

// What does not fit, or the device does not do, is a row with its reason.
StepRow Measure(const StepBenchOptions& request, bool has_cuda) {
  StepRow row;
  row.n_tokens = request.n_tokens;
  row.batch = request.batch;
  row.placement = request.placement;
  row.method = request.method;
  try {
    StepProgress progress;
    row.result = RunStepBench(
        request, [&](std::string_view what, std::string_view unit, std::int64_t done,
                     std::int64_t total) { return progress.Update(what, unit, done, total); });
  } catch (const std::bad_alloc&) {
    row.refusal = "out of host memory";
  } catch (const Error& error) {
    const bool refused = error.code() == ErrorCode::kNoMemory ||
                         (error.code() == ErrorCode::kUnsupported && has_cuda);
    if (!refused) throw;
    row.refusal = error.what();
  }
  const std::string what = row.method + " at " + Grouped(row.n_tokens) + " tokens, batch " +
                           std::to_string(row.batch) + ", index in " + row.placement;
  if (row.result) {
    std::fprintf(stderr, "%s: %.3f ms GPU, %.3f ms wall%s\n", what.c_str(), row.result->gpu_ms,
                 row.result->wall_ms, row.result->pinned ? "" : ", host memory not pinned");
  } else {
    std::fprintf(stderr, "%s: not measured: %s\n", what.c_str(), row.refusal.c_str());
  }
  return row;
}

void Print(const StepReport& report, const StepOptions& options) {
  if (!options.svg.empty()) WriteText(options.svg, RenderBars(StepFigure(report)));
  if (!options.json) {
    WriteOut(StepTables(report));
    return;
  }
  WriteOut(JsonText(StepJson(report)));
}

int BenchStep(const StepOptions& options) {
  const std::vector<StepBenchOptions> requests = Requests(options);
  StepKeys keys;
  if (!options.keys.empty()) {
    keys = DescribeStepKeys(CaptureFile(options.keys), requests.front().shape);
  }
  const bool has_cuda = CheckCuda();
  if (!options.svg.empty()) CheckWritable(options.svg);
  StepReport report;
  report.shape = requests.front().shape;
  report.keys = keys;
  report.k = options.k;
  try {
    for (const StepBenchOptions& request : requests) {
      if (Interrupted()) {
        throw Error(ErrorCode::kCancelled, "interrupted; what was measured is reported");
      }
      report.rows.push_back(Measure(request, has_cuda));
    }
  } catch (const Error& error) {
    report.interrupted = true;
    if (error.code() != ErrorCode::kCancelled) {
      if (!report.rows.empty()) Print(report, options);
      throw;
    }
    std::fprintf(stderr, "fathom: %s\n", error.what());
  }
  Print(report, options);
  if (Interrupted()) return kExitInterrupted;
  const bool any = std::any_of(report.rows.begin(), report.rows.end(),
                               [](const StepRow& row) { return row.result.has_value(); });
  return any ? kExitOk : kExitFailure;
}

void AddMeasuringOptions(Command step, StepOptions* options) {
  step.AddOption("-k,--k", options->k, "rows attended per query head, always kept ones included")
      .ShowDefault()
      .InRange(kAlwaysKept + 1, 1 << 20);
  step.AddOption("--steps", options->steps, "timed steps per row").ShowDefault().InRange(3, 100000);
  step.AddOption("--seconds", options->seconds,
                 "most time for the steps of a row, three at least are timed")
      .ShowDefault()
      .InRange(0.0, 3600.0);
  step.AddOption("--rows-fold", options->fold,
                 "token i uses row i mod N, where memory does not hold all rows; auto: the "
                 "largest N that fits")
      .TypeName("auto|N")
      .ShowDefault();
  step.AddOption("--keys", options->keys,
                 "keys, values and queries of a capture (fathom capture), repeated along the "
                 "tokens, instead of synthetic ones")
      .TypeName("FILE");
  step.AddOption("--seed", options->seed, "of weights and synthetic keys").ShowDefault();
  step.AddFlag("--json", options->json, "print one JSON document");
  step.AddOption("--svg", options->svg, "also draw the stages as stacked bars").TypeName("FILE");
}

}  // namespace

void AddBenchStep(Command bench, int* exit_code) {
  auto options = std::make_shared<StepOptions>();
  Command step = bench.AddCommand(
      "step", "A decode step on a CUDA device, by stage, with index in host memory or HBM");
  step.AddOption("--shape", options->shape, "model whose step is made, with random weights")
      .ShowDefault()
      .OneOf(ShapeNames());
  step.AddOption("--ctx", options->contexts, "contexts, e.g. 256k,512k,1M")
      .SeparatedBy(',')
      .ShowDefault();
  step.AddOption("--methods", options->methods,
                 "method specs without k, separated by spaces or commas; ratios are to "
                 "sparq:r=32, the 32-channel scan")
      .ShowDefault();
  step.AddOption("--placement", options->placements, "of the index: host, hbm or both")
      .SeparatedBy(',')
      .ShowDefault()
      .OneOf({"host", "hbm"});
  step.AddOption("--batch", options->batches, "sequences per step, e.g. 1,2,8")
      .SeparatedBy(',')
      .ShowDefault()
      .InRange(1, 1024);
  AddMeasuringOptions(step, options.get());
  step.OnRun([options, exit_code] { *exit_code = BenchStep(*options); });
}

}  // namespace fathom::cli
