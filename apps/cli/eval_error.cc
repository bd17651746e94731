// SPDX-License-Identifier: MIT
#include "eval_error.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "eval_presets.h"
#include "eval_report.h"
#include "progress.h"
#include "specs.h"

namespace fathom::cli {
namespace {

constexpr std::int64_t kFewestK = 37;  // sinks, window and one selected token

// "1.6%" of n_tokens; 0 for a text without '%'.
std::int64_t ShareOfTokens(const std::string& text, std::int64_t n_tokens) {
  if (text.empty() || text.back() != '%') return 0;
  double percent = 0;
  const char* last = text.data() + text.size() - 1;
  const auto [end, error] = std::from_chars(text.data(), last, percent);
  // The comparison is false for NaN.
  if (error != std::errc() || end != last || !(percent > 0 && percent < 100)) {
    throw Error(ErrorCode::kUsage,
                "'" + text + "' is not a share of the context; write 1.6%, above 0 and below 100");
  }
  return std::max<std::int64_t>(std::llround(static_cast<double>(n_tokens) * percent / 100), 1);
}

// What is to be done, checked.
struct Work {
  ErrorOptions options;
  std::vector<CaptureFile> captures;
  std::vector<std::vector<std::int64_t>> k;  // [captures]
  std::vector<std::string> k_texts;
  std::shared_ptr<const Calibration> statistics;
  bool both_statistics = false;
};

std::vector<std::string> Methods(const EvalErrorOptions& options, const EvalPreset& preset) {
  std::vector<std::string> specs =
      ParseSpecLists(options.methods.empty() ? preset.methods : options.methods);
  if (options.basis.empty()) return specs;
  specs = WithBasis(std::move(specs), options.basis);
  for (const std::string& spec : specs) ValidateMethodSpec(MethodSpec::Parse(spec));
  return specs;
}

Work Prepare(const EvalErrorOptions& options) {
  const EvalPreset& preset = FindEvalPreset(options.preset);
  if (options.captures.empty()) {
    throw Error(ErrorCode::kUsage,
                "no capture was given; make one with fathom capture, then fathom eval error FILE");
  }
  if (preset.needs_statistics && options.statistics_file.empty()) {
    throw Error(ErrorCode::kUsage, "--preset " + preset.name + " needs --stats-file");
  }
  Work work;
  ErrorOptions& eval = work.options;
  eval.methods = Methods(options, preset);
  eval.layers = ParseLayers(options.layers);
  eval.every = options.every;
  eval.freeze = options.freeze;
  eval.unscaled = options.metric == "unscaled";
  eval.fit_on_measured = options.fit == "measured";
  if (!options.qk_norm.empty()) eval.has_qk_norm = options.qk_norm == "yes";
  eval.backend = options.backend;
  eval.n_threads = options.threads;
  work.statistics = LoadStatistics(options.statistics_file);
  work.both_statistics = preset.both_statistics;

  work.k_texts = options.k;
  if (work.k_texts.empty()) work.k_texts = preset.k.empty() ? DefaultK() : preset.k;
  for (const std::string& path : options.captures) {
    work.captures.emplace_back(path);
    work.k.push_back(
        ParseK(work.k_texts, work.captures.back().geometry().n_tokens, options.k.empty()));
    const CaptureGeometry& geometry = work.captures.back().geometry();
    if (work.statistics) {
      work.statistics->CheckLayers(eval.layers.empty() ? geometry.layers : eval.layers,
                                   geometry.heads);
    }
  }
  // Found out now rather than after the work.
  if (!options.output.empty()) CheckWritable(options.output);
  if (!options.svg.empty()) CheckWritable(options.svg);
  return work;
}

ErrorRun Evaluate(const CaptureFile& capture, const ErrorOptions& options,
                  const std::string& statistics, const std::string& label) {
  const auto start = std::chrono::steady_clock::now();
  ErrorRun run;
  {
    Progress progress(label, "steps");
    run.report = EvaluateError(capture, options, [&](std::int64_t done, std::int64_t total) {
      progress.Update(done, total);
      return !Interrupted();
    });
  }
  run.statistics = statistics;
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return run;
}

// All runs, or those before an interruption.
std::vector<ErrorRun> Execute(Work* work, const std::string& statistics_file) {
  std::vector<ErrorRun> runs;
  try {
    for (std::size_t i = 0; i < work->captures.size(); ++i) {
      const std::string label =
          "capture " + std::to_string(i + 1) + "/" + std::to_string(work->captures.size());
      work->options.k = work->k[i];
      work->options.calibration = nullptr;
      if (work->statistics == nullptr || work->both_statistics)
        runs.push_back(Evaluate(work->captures[i], work->options, kOwnStatistics, label));
      if (work->statistics == nullptr) continue;
      work->options.calibration = work->statistics;
      runs.push_back(Evaluate(work->captures[i], work->options, statistics_file, label));
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) throw;
    std::fprintf(stderr, "fathom: interrupted; finished captures are reported\n");
  }
  return runs;
}

nlohmann::json Document(const EvalErrorOptions& options, const Work& work,
                        const std::vector<ErrorRun>& runs) {
  nlohmann::json json = {{"format", "fathom-error-report"},
                         {"version", FATHOM_VERSION},
                         {"interrupted", Interrupted()},
                         {"options",
                          {{"methods", work.options.methods},
                           {"k", work.k_texts},
                           {"layers", work.options.layers},
                           {"every", options.every},
                           {"freeze", options.freeze},
                           {"metric", options.metric},
                           {"fit", options.fit},
                           {"basis", options.basis},
                           {"stats_file", options.statistics_file},
                           {"qk_norm", options.qk_norm},
                           {"preset", options.methods.empty() ? options.preset : ""},
                           {"threads", options.threads},
                           {"backend", options.backend}}},
                         {"runs", nlohmann::json::array()}};
  for (const ErrorRun& run : runs) json["runs"].push_back(ErrorRunJson(run));
  return json;
}

// What departs from the protocol is said above the tables.
std::string Tables(const Work& work, const std::vector<ErrorRun>& runs) {
  std::string text;
  if (work.options.unscaled) {
    text += "unscaled logits: softmax(q.k) without 1/sqrt(D), not what the model computes\n";
  }
  if (work.options.fit_on_measured) {
    text +=
        "residual fitted on the first half of the measured positions; methods with a residual "
        "are reported on the second half\n";
  }
  if (work.options.freeze > 0) {
    text += "statistics, basis and steps frozen at " + Plain(100 * work.options.freeze) +
            " % of the context\n";
  }
  for (const ErrorRun& run : runs) text += (text.empty() ? "" : "\n") + ErrorTables(run);
  return text;
}

int EvalError(const EvalErrorOptions& options) {
  if (options.preset == "list") {
    WriteOut(EvalPresetList());
    return kExitOk;
  }
  Work work = Prepare(options);
  const std::vector<ErrorRun> runs = Execute(&work, options.statistics_file);
  const std::string json = JsonText(Document(options, work, runs));
  if (!options.output.empty()) WriteText(options.output, json);
  if (!options.svg.empty()) WriteText(options.svg, RenderSvg(ErrorFigure(runs)));
  WriteOut(options.json ? json : Tables(work, runs));
  return Interrupted() ? kExitInterrupted : kExitOk;
}

void AddRunOptions(Command error, EvalErrorOptions* options) {
  AddMachineOptions(error, &options->threads, &options->backend);
  error.AddFlag("--json", options->json, "print one JSON document (see docs/format.md)");
  error.AddOption("-o,--output", options->output, "also write the JSON document to a file")
      .TypeName("FILE");
  error.AddOption("--svg", options->svg, "also draw error over read bits").TypeName("FILE");
}

void AddProtocolOptions(Command error, EvalErrorOptions* options) {
  error
      .AddOption("--layers", options->layers,
                 "layers of the model, e.g. 0,3-5; all of the capture if left out")
      .TypeName("LIST");
  error.AddOption("--every", options->every, "measure every N-th of the capture's positions")
      .TypeName("N")
      .ShowDefault()
      .InRange(1, 1 << 30);
  error
      .AddOption("--freeze", options->freeze,
                 "share of the context at which statistics, basis and steps are frozen, e.g. 0.5; "
                 "0: at the first measured position")
      .TypeName("SHARE")
      .ShowDefault()
      .InRange(0.0, 1.0);
  error
      .AddOption("--metric", options->metric,
                 "scaled (the model's 1/sqrt(D)) or unscaled (as some published tables)")
      .TypeName("NAME")
      .ShowDefault()
      .OneOf({"scaled", "unscaled"});
  error
      .AddOption("--fit", options->fit,
                 "queries that the residual is fitted on: earlier, or the first half of the "
                 "measured ones")
      .TypeName("NAME")
      .ShowDefault()
      .OneOf({"earlier", "measured"});
  error
      .AddOption("--qk-norm", options->qk_norm,
                 "yes or no: has the model QK-norm? decides basis=auto; default: as captured")
      .TypeName("yes|no")
      .OneOf({"yes", "no"});
}

}  // namespace

std::vector<std::int64_t> ParseK(const std::vector<std::string>& texts, std::int64_t n_tokens,
                                 bool may_skip) {
  std::vector<std::int64_t> list;
  for (const std::string& text : texts) {
    const std::int64_t share = ShareOfTokens(text, n_tokens);
    const std::int64_t k = share > 0 ? share : ParseTokens(text);
    if (k >= kFewestK) {
      list.push_back(k);
    } else if (share == 0 || !may_skip) {
      throw Error(ErrorCode::kUsage,
                  "k = " + text + (share > 0 ? " of " + Grouped(n_tokens) + " tokens" : "") +
                      " is " + Grouped(k) + ", and selection begins at " + Grouped(kFewestK) +
                      ": the first 4 and last 32 tokens are always attended; give a larger --k");
    }
  }
  if (list.empty()) {
    throw Error(ErrorCode::kUsage, "a capture of " + Grouped(n_tokens) +
                                       " tokens is too short for the usual shares; give --k, " +
                                       Grouped(kFewestK) + " or more tokens");
  }
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
  return list;
}

std::vector<std::string> WithBasis(std::vector<std::string> specs, const std::string& basis) {
  std::map<std::string, bool> has_basis;  // by method
  for (const MethodInfo& method : ListMethods())
    has_basis[method.name] = (", " + method.options).find(", basis=") != std::string::npos;
  for (std::string& spec : specs) {
    const MethodSpec parsed = MethodSpec::Parse(spec);
    if (!has_basis[parsed.name] || parsed.options.contains("basis")) continue;
    const bool colon = spec.find(':') != std::string::npos;
    spec += (!colon ? ":basis=" : parsed.options.empty() ? "basis=" : ",basis=") + basis;
  }
  return specs;
}

void AddEvalErrorCommand(Command eval, int* exit_code) {
  auto options = std::make_shared<EvalErrorOptions>();
  Command error = eval.AddCommand(
      "error", "Error of the attention output against dense attention, by method, on captures");
  error.AddOption("captures", options->captures, "captures (see fathom capture)")
      .TypeName("CAPTURE");
  const Option preset = error
                            .AddOption("--preset", options->preset,
                                       "a named list of methods; --preset list shows the names")
                            .TypeName("NAME")
                            .ShowDefault();
  error
      .AddOption("--methods", options->methods,
                 "method specs, separated by commas; default: those of the preset")
      .TypeName("SPEC,SPEC...")
      .OneValueEach()
      .Excludes(preset);
  error
      .AddOption("--k", options->k,
                 "tokens per query head, as numbers or shares of the context, e.g. 128,1.6%; "
                 "default: 0.4%,1.6%,6%, less those below 37 tokens")
      .TypeName("K,K...")
      .SeparatedBy(',')
      .OneValueEach();
  error
      .AddOption("--basis", options->basis,
                 "basis of all methods that have one and whose spec does not say")
      .TypeName("NAME")
      .OneOf({"raw", "klt", "balanced"});
  error
      .AddOption("--stats-file", options->statistics_file,
                 "statistics of a file instead of the captures' own")
      .TypeName("FILE");
  AddProtocolOptions(error, options.get());
  AddRunOptions(error, options.get());
  error.OnRun([options, exit_code] { *exit_code = EvalError(*options); });
}

}  // namespace fathom::cli
