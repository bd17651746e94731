// SPDX-License-Identifier: MIT
// `fathom capture`: saves queries, keys and values of a model on a text, for study.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common.h"
#include "progress.h"
#include "prompts.h"

namespace fathom::cli {
namespace {

struct Options {
  std::string model;
  std::string file;  // text, "-" for standard input
  std::string ctx_size;
  std::string out;
  std::string layers;  // empty: all
  std::string dtype = "auto";
  std::int64_t positions = 128;
  std::int64_t stats_every = 0;
  int threads = 0;
  std::string backend = "cpu";
  bool force = false;
  bool json = false;
};

CaptureOptions LibraryOptions(const Options& options) {
  CaptureOptions capture;
  capture.path = options.out;
  capture.overwrite = options.force;
  capture.positions = options.positions;
  capture.stats_every = options.stats_every;
  capture.layers = ParseLayers(options.layers);
  if (options.dtype == "f32") capture.type = CaptureType::kF32;
  if (options.dtype == "bf16") capture.type = CaptureType::kBf16;
  // The name alone: where the text lay is nobody's business.
  capture.text = options.file == "-" ? "standard input"
                                     : std::filesystem::path(options.file).filename().string();
  capture.backend = options.backend;
  capture.n_threads = options.threads;
  return capture;
}

std::string TypeName(CaptureType type) { return type == CaptureType::kF32 ? "f32" : "bf16"; }

std::string SummaryText(const std::string& path, const CaptureReport& report) {
  const CaptureGeometry& g = report.geometry;
  std::ostringstream text;
  text << "wrote    " << path << ", " << Grouped(report.file_bytes) << " bytes ("
       << ByteText(static_cast<double>(report.file_bytes)) << ")\n"
       << "model    " << g.model << ", " << g.architecture << ", " << g.heads.n_heads << " heads, "
       << g.heads.n_kv_heads << " KV heads, head_dim " << g.heads.head_dim << "\n"
       << "tokens   " << Grouped(g.n_tokens) << " of " << g.text << "\n"
       << "layers   " << LayersText(g.layers) << " (" << g.layers.size() << ")\n"
       << "queries  " << Grouped(static_cast<std::int64_t>(g.q_positions.size()))
       << " at the end; for statistics "
       << Grouped(static_cast<std::int64_t>(g.stats_positions.size())) << " before, every "
       << Grouped(report.stats_every) << " tokens\n"
       << "dtype    " << TypeName(report.type) << ": " << report.type_reason << "\n";
  return text.str();
}

nlohmann::json SummaryJson(const std::string& path, const CaptureReport& report) {
  const CaptureGeometry& g = report.geometry;
  return {{"path", path},
          {"bytes", report.file_bytes},
          {"model", g.model},
          {"architecture", g.architecture},
          {"text", g.text},
          {"n_tokens", g.n_tokens},
          {"layers", g.layers},
          {"n_heads", g.heads.n_heads},
          {"n_kv_heads", g.heads.n_kv_heads},
          {"head_dim", g.heads.head_dim},
          {"positions", g.q_positions.size()},
          {"stats_positions", g.stats_positions.size()},
          {"stats_every", report.stats_every},
          {"dtype", TypeName(report.type)},
          {"dtype_reason", report.type_reason},
          {"qk_norm", *g.has_qk_norm},
          {"qkv_bias", *g.has_qkv_bias},
          {"backend", report.backend},
          {"threads", report.n_threads},
          {"seconds", report.seconds}};
}

void Capture(const Options& options) {
  const std::int64_t n_tokens = ParseTokens(options.ctx_size);
  const CaptureOptions capture = LibraryOptions(options);
  const auto model = Model::Open(options.model);
  const std::vector<Token> tokens = ReadTokens(*model, options.file, n_tokens);
  if (n_tokens > model->info().n_ctx_train) {
    std::fprintf(stderr, "fathom: %s tokens are beyond the %s this model was made for\n",
                 Grouped(n_tokens).c_str(), Grouped(model->info().n_ctx_train).c_str());
  }
  CaptureReport report;
  {
    Progress progress("capture", "tokens");
    report = RunCapture(model, tokens, capture, [&](std::int64_t done, std::int64_t total) {
      progress.Update(done, total);
      return !Interrupted();
    });
  }
  if (options.json) {
    WriteOut(SummaryJson(options.out, report)
                 .dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
             "\n");
  } else {
    WriteOut(SummaryText(options.out, report));
  }
}

}  // namespace

void AddCaptureCommand(CLI::App& app, int* exit_code) {
  CLI::App* capture =
      app.add_subcommand("capture", "Save queries, keys and values of a model on a text");
  auto options = std::make_shared<Options>();
  capture->add_option("-m,--model", options->model, "GGUF model")->type_name("FILE")->required();
  capture->add_option("-f,--file", options->file, "text; - is standard input")
      ->type_name("FILE")
      ->required();
  capture->add_option("-c,--ctx-size", options->ctx_size, "tokens of it to capture, e.g. 8k")
      ->type_name("N")
      ->required();
  capture->add_option("-o,--output", options->out, "safetensors file to write")
      ->type_name("FILE")
      ->required();
  capture->add_option("--positions", options->positions, "keep the queries of the last P positions")
      ->type_name("P")
      ->capture_default_str()
      ->check(InRange(1, 1 << 20));
  capture
      ->add_option("--stats-every", options->stats_every,
                   "and of every S-th position before, for statistics; 0 keeps about 512")
      ->type_name("S")
      ->capture_default_str()
      ->check(InRange(0, 1 << 30));
  capture->add_option("--layers", options->layers, "layers, e.g. 0,3-5; all if left out")
      ->type_name("LIST");
  capture
      ->add_option("--dtype", options->dtype,
                   "auto, f32 or bf16; auto is f32 for models with q/k/v biases, else bf16")
      ->type_name("TYPE")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "f32", "bf16"}));
  AddMachineOptions(*capture, &options->threads, &options->backend);
  capture->add_flag("--force", options->force, "replace the output file if it exists");
  capture->add_flag("--json", options->json, "print one JSON document instead of text");
  capture->callback([options, exit_code] {
    Capture(*options);
    *exit_code = kExitOk;
  });
}

}  // namespace fathom::cli
