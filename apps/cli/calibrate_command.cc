// SPDX-License-Identifier: MIT
// `fathom calibrate`: a statistics file from a capture, or from a text by way of one.
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "common.h"
#include "progress.h"
#include "prompts.h"
#include "specs.h"
#include "table.h"

namespace fathom::cli {
namespace {

struct Options {
  std::string capture;
  std::string model;
  std::string file;  // text, "-" for standard input
  std::string ctx_size;
  std::string out;
  std::vector<std::string> methods = {"fathom"};  // lists of specs, see SplitSpecs; "none"
  std::vector<std::string> budgets;               // lists of SPEC@MEAN
  std::string qk_norm;
  int threads = 0;
  std::string backend = "cpu";
  bool force = false;
  bool json = false;
};

// A capture that is needed only meanwhile.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

 private:
  std::string path_;
};

BudgetRequest ParseBudget(const std::string& text) {
  const std::size_t at = text.rfind('@');
  BudgetRequest request;
  const char* end = text.data() + text.size();
  std::from_chars_result parsed = {text.data(), std::errc::invalid_argument};
  if (at != std::string::npos) {
    request.spec = text.substr(0, at);
    parsed = std::from_chars(text.data() + at + 1, end, request.mean);
  }
  if (request.spec.empty() || parsed.ec != std::errc() || parsed.ptr != end) {
    throw Error(ErrorCode::kUsage, "--budgets '" + text +
                                       "' is not SPEC@MEAN; write fathom@28 or "
                                       "fathom:preset=paper@48 for example");
  }
  return request;
}

CalibrateOptions LibraryOptions(const Options& options) {
  CalibrateOptions calibrate;
  if (options.methods != std::vector<std::string>{"none"}) {
    calibrate.methods = ParseSpecLists(options.methods);
  }
  for (const std::string& list : options.budgets) {
    for (const std::string& item : SplitSpecs(list)) {
      calibrate.budgets.push_back(ParseBudget(item));
    }
  }
  if (!options.qk_norm.empty()) calibrate.has_qk_norm = options.qk_norm == "yes";
  calibrate.backend = options.backend;
  calibrate.n_threads = options.threads;
  return calibrate;
}

void CheckOptions(const Options& options) {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kUsage, what); };
  const bool text = !options.model.empty() || !options.file.empty() || !options.ctx_size.empty();
  if (options.capture.empty() && !text) {
    fail("nothing to calibrate on: give a capture, or -m MODEL -f TEXT -c N");
  }
  if (!options.capture.empty() && text) {
    fail("a capture and -m, -f or -c are given; the capture has model and text, leave them out");
  }
  if (text && (options.model.empty() || options.file.empty() || options.ctx_size.empty())) {
    fail("calibrating on a text needs all of -m MODEL -f TEXT -c N");
  }
  std::error_code ignored;
  if (!options.force && std::filesystem::exists(options.out, ignored)) {
    fail(options.out + " exists; choose another name or replace it with --force");
  }
  // Found out now rather than after the work.
  std::string folder = std::filesystem::path(options.out).parent_path().string();
  if (folder.empty()) folder = ".";
  if (access(folder.c_str(), W_OK) != 0) {
    throw Error(ErrorCode::kIo, "cannot write '" + options.out + "': folder '" + folder +
                                    "' is missing or not writable");
  }
}

void CaptureText(const Options& options, const std::string& path) {
  const std::int64_t n_tokens = ParseTokens(options.ctx_size);
  CaptureOptions capture;
  capture.path = path;
  capture.overwrite = true;  // of a run that was killed
  // The name alone: where the text lay is nobody's business.
  capture.text = options.file == "-" ? "standard input"
                                     : std::filesystem::path(options.file).filename().string();
  capture.backend = options.backend;
  capture.n_threads = options.threads;
  const auto model = Model::Open(options.model);
  const std::vector<Token> tokens = ReadTokens(*model, options.file, n_tokens);
  Progress progress("capture", "tokens");
  RunCapture(model, tokens, capture, [&](std::int64_t done, std::int64_t total) {
    progress.Update(done, total);
    return !Interrupted();
  });
}

CalibrateReport CalibrateCapture(const std::string& path, const CalibrateOptions& options) {
  const CaptureFile capture(path);
  std::unique_ptr<Progress> progress;
  std::string current;
  return Calibrate(capture, options,
                   [&](std::string_view stage, std::int64_t done, std::int64_t total) {
                     if (!progress || stage != current) {
                       current = stage;
                       progress.reset();  // ends its line before the next begins
                       progress = std::make_unique<Progress>(current, "steps");
                     }
                     progress->Update(done, total);
                     return !Interrupted();
                   });
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::string BudgetTable(const LayerBudgets& budgets, const std::vector<std::int32_t>& layers) {
  Table table({"layer", "bits", "error", "error at " + Plain(budgets.mean)});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    table.Add({std::to_string(layers[i]), Plain(budgets.bits[i]), Fixed(budgets.error[i], 4),
               Fixed(budgets.flat_error[i], 4)});
  }
  table.Add({"mean", Fixed(Mean(budgets.bits), 2), Fixed(Mean(budgets.error), 4),
             Fixed(Mean(budgets.flat_error), 4)});
  return "\nbudgets of " + budgets.key + "\n" + table.ToString();
}

std::string SummaryText(const std::string& path, const CalibrateReport& report) {
  const Calibration& c = *report.calibration;
  std::ostringstream text;
  const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(path));
  text << "wrote    " << path << ", " << Grouped(bytes) << " bytes ("
       << ByteText(static_cast<double>(bytes)) << ")\n"
       << "model    " << (c.model.empty() ? "unknown" : c.model) << ", " << c.heads.n_heads
       << " heads, " << c.heads.n_kv_heads << " KV heads, head_dim " << c.heads.head_dim << "\n"
       << "tokens   " << Grouped(c.n_tokens) << " of "
       << (c.source.empty() ? "an unknown text" : c.source) << "\n"
       << "layers   " << LayersText(c.layers) << " (" << c.layers.size() << ")\n";
  for (const auto& [key, factors] : c.residual) {
    const std::vector<double> all(factors.begin(), factors.end());
    text << "residual " << key << ", mean factor " << Fixed(Mean(all), 3) << "\n";
  }
  for (const LayerBudgets& budgets : report.budgets) text << BudgetTable(budgets, c.layers);
  return text.str();
}

nlohmann::json SummaryJson(const std::string& path, const CalibrateReport& report) {
  const Calibration& c = *report.calibration;
  nlohmann::json json = {{"path", path},
                         {"bytes", std::filesystem::file_size(path)},
                         {"model", c.model},
                         {"text", c.source},
                         {"n_tokens", c.n_tokens},
                         {"layers", c.layers},
                         {"n_heads", c.heads.n_heads},
                         {"n_kv_heads", c.heads.n_kv_heads},
                         {"head_dim", c.heads.head_dim},
                         {"residual", nlohmann::json::array()},
                         {"budgets", nlohmann::json::array()}};
  for (const auto& [key, factors] : c.residual) {
    json["residual"].push_back({{"spec", key}, {"factors", factors}});
  }
  for (const LayerBudgets& budgets : report.budgets) {
    json["budgets"].push_back({{"spec", budgets.key},
                               {"mean", budgets.mean},
                               {"bits", budgets.bits},
                               {"error", budgets.error},
                               {"flat_error", budgets.flat_error}});
  }
  return json;
}

void CalibrateCommand(const Options& options) {
  CheckOptions(options);
  const CalibrateOptions library = LibraryOptions(options);
  std::optional<TemporaryFile> temporary;
  std::string capture = options.capture;
  if (capture.empty()) {
    capture = options.out + ".capture";
    temporary.emplace(capture);
    CaptureText(options, capture);
  }
  const CalibrateReport report = CalibrateCapture(capture, library);
  report.calibration->Save(options.out);
  if (options.json) {
    WriteOut(JsonText(SummaryJson(options.out, report)));
  } else {
    WriteOut(SummaryText(options.out, report));
  }
}

void AddSourceOptions(Command calibrate, Options* options) {
  calibrate.AddOption("capture", options->capture, "capture to calibrate on (see fathom capture)")
      .TypeName("CAPTURE");
  calibrate.AddOption("-m,--model", options->model, "GGUF model, to calibrate on a text")
      .TypeName("FILE");
  calibrate.AddOption("-f,--file", options->file, "text; - is standard input").TypeName("FILE");
  calibrate.AddOption("-c,--ctx-size", options->ctx_size, "tokens of the text, e.g. 8k")
      .TypeName("N");
  calibrate.AddOption("-o,--output", options->out, "safetensors file to write")
      .TypeName("FILE")
      .Required();
}

}  // namespace

void AddCalibrateCommand(Command app, int* exit_code) {
  auto options = std::make_shared<Options>();
  Command calibrate = app.AddCommand(
      "calibrate", "Make a statistics file, for --stats-file, of a capture or a text");
  AddSourceOptions(calibrate, options.get());
  calibrate
      .AddOption("--methods", options->methods,
                 "method specs whose residual factors are kept, separated by commas; or none")
      .TypeName("SPEC,SPEC...")
      .OneValueEach()
      .ShowDefault();
  calibrate
      .AddOption("--budgets", options->budgets,
                 "bits per layer with this mean, for specs with budgets=file; k=512 unless given")
      .TypeName("SPEC@MEAN,...")
      .OneValueEach();
  calibrate
      .AddOption("--qk-norm", options->qk_norm,
                 "yes or no: has the model QK-norm? decides basis=auto; default: as captured")
      .TypeName("yes|no")
      .OneOf({"yes", "no"});
  AddMachineOptions(calibrate, &options->threads, &options->backend);
  calibrate.AddFlag("--force", options->force, "replace the output file if it exists");
  calibrate.AddFlag("--json", options->json, "print one JSON document instead of text");
  calibrate.OnRun([options, exit_code] {
    CalibrateCommand(*options);
    *exit_code = kExitOk;
  });
}

}  // namespace fathom::cli
