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
    WriteOut(JsonText(SummaryJson(options.out, report)));
  } else {
    WriteOut(SummaryText(options.out, report));
  }
}

}  // namespace

void AddCaptureCommand(Command app, int* exit_code) {
  Command capture = app.AddCommand("capture", "Save queries, keys and values of a model on a text");
  auto options = std::make_shared<Options>();
  capture.AddOption("-m,--model", options->model, "GGUF model").TypeName("FILE").Required();
  capture.AddOption("-f,--file", options->file, "text; - is standard input")
      .TypeName("FILE")
      .Required();
  capture.AddOption("-c,--ctx-size", options->ctx_size, "tokens of it to capture, e.g. 8k")
      .TypeName("N")
      .Required();
  capture.AddOption("-o,--output", options->out, "safetensors file to write")
      .TypeName("FILE")
      .Required();
  capture.AddOption("--positions", options->positions, "keep the queries of the last P positions")
      .TypeName("P")
      .ShowDefault()
      .InRange(1, 1 << 20);
  capture
      .AddOption("--stats-every", options->stats_every,
                 "and of every S-th position before, for statistics; 0 keeps about 512")
      .TypeName("S")
      .ShowDefault()
      .InRange(0, 1 << 30);
  capture.AddOption("--layers", options->layers, "layers, e.g. 0,3-5; all if left out")
      .TypeName("LIST");
  capture
      .AddOption("--dtype", options->dtype,
                 "auto, f32 or bf16; auto is f32 for models with q/k/v biases, else bf16")
      .TypeName("TYPE")
      .ShowDefault()
      .OneOf({"auto", "f32", "bf16"});
  AddMachineOptions(capture, &options->threads, &options->backend);
  capture.AddFlag("--force", options->force, "replace the output file if it exists");
  capture.AddFlag("--json", options->json, "print one JSON document instead of text");
  capture.OnRun([options, exit_code] {
    Capture(*options);
    *exit_code = kExitOk;
  });
}

}  // namespace fathom::cli
