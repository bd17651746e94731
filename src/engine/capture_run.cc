// SPDX-License-Identifier: MIT
#include <algorithm>
#include <filesystem>
#include <numeric>

#include "base/timer.h"
#include "fathom/capture.h"
#include "fathom/error.h"

namespace fathom {
namespace {

constexpr std::int64_t kStatsQueries = 512;  // aimed at by default

void CheckOptions(const CaptureOptions& options, const ModelInfo& model, std::int64_t n_tokens) {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kUsage, what); };
  if (options.path.empty()) fail("no file to write the capture to is named");
  std::error_code ignored;
  if (!options.overwrite && std::filesystem::exists(options.path, ignored)) {
    fail(options.path + " exists; choose another name or ask to replace it (--force)");
  }
  if (options.positions < 1) {
    fail(std::to_string(options.positions) + " positions to measure; at least 1 is needed");
  }
  if (options.stats_every < 0) {
    fail("every " + std::to_string(options.stats_every) +
         "th query for statistics; give at least 1, or 0 for the default");
  }
  if (n_tokens <= kStatsSkip || options.positions >= n_tokens - kStatsSkip) {
    fail(std::to_string(n_tokens) + " tokens with " + std::to_string(options.positions) +
         " positions to measure leave none for statistics after the first " +
         std::to_string(kStatsSkip) + "; capture more than " +
         std::to_string(kStatsSkip + options.positions) + " tokens (-c) or fewer positions");
  }
  for (const std::int32_t layer : options.layers) {
    if (layer < 0 || layer >= model.n_layers) {
      fail("layer " + std::to_string(layer) + " is asked for; the model has layers 0 to " +
           std::to_string(model.n_layers - 1));
    }
  }
}

CaptureGeometry Plan(const CaptureOptions& options, const ModelInfo& model, std::int64_t n_tokens,
                     std::int64_t stats_every) {
  CaptureGeometry geometry;
  geometry.n_tokens = n_tokens;
  geometry.heads = model.heads;
  geometry.layers = options.layers;
  if (geometry.layers.empty()) {
    geometry.layers.resize(static_cast<std::size_t>(model.n_layers));
    std::iota(geometry.layers.begin(), geometry.layers.end(), 0);
  }
  std::sort(geometry.layers.begin(), geometry.layers.end());
  geometry.layers.erase(std::unique(geometry.layers.begin(), geometry.layers.end()),
                        geometry.layers.end());
  const std::int64_t measured = n_tokens - options.positions;
  for (std::int64_t p = kStatsSkip; p < measured; p += stats_every) {
    geometry.stats_positions.push_back(p);
  }
  for (std::int64_t p = measured; p < n_tokens; ++p) geometry.q_positions.push_back(p);
  geometry.model =
      model.name.empty() ? std::filesystem::path(model.path).filename().string() : model.name;
  geometry.architecture = model.architecture;
  geometry.rope = model.rope;
  geometry.text = options.text;
  geometry.has_qk_norm = model.has_qk_norm;
  geometry.has_qkv_bias = model.has_qkv_bias;
  return geometry;
}

void ChooseType(const CaptureOptions& options, const ModelInfo& model, CaptureReport* report) {
  if (options.type) {
    report->type = *options.type;
    report->type_reason = "as asked";
  } else if (model.has_qkv_bias) {
    report->type = CaptureType::kF32;
    report->type_reason = "the model has q/k/v biases, beside which bf16 is too coarse";
  } else {
    report->type = CaptureType::kBf16;
    report->type_reason = "the model has no q/k/v biases";
  }
}

}  // namespace

CaptureReport RunCapture(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                         const CaptureOptions& options, const ProgressFn& progress) {
  const auto n_tokens = static_cast<std::int64_t>(tokens.size());
  CheckOptions(options, model->info(), n_tokens);
  CaptureReport report;
  report.stats_every =
      options.stats_every > 0
          ? options.stats_every
          : std::max<std::int64_t>((n_tokens + kStatsQueries / 2) / kStatsQueries, 1);
  report.geometry = Plan(options, model->info(), n_tokens, report.stats_every);
  ChooseType(options, model->info(), &report);

  std::unique_ptr<CaptureWriter> writer;
  SessionOptions session_options;
  session_options.ctx_size = n_tokens;
  session_options.backend = options.backend;
  session_options.method = "dense";
  session_options.n_threads = options.n_threads;
  session_options.chunk = options.chunk;
  session_options.prefill_observer =
      [&writer](std::int32_t layer, std::int64_t first, std::int64_t n, const float* q,
                const float* k, const float* v) { writer->Write(layer, first, n, q, k, v); };
  Session session(model, session_options);
  report.backend = std::string(session.backend().name());
  report.n_threads = session.backend().n_threads();
  writer = std::make_unique<CaptureWriter>(options.path, report.geometry, report.type);
  report.file_bytes = writer->file_bytes();

  const double start = NowSeconds();
  session.Prefill(tokens, progress);
  writer->Commit();
  report.seconds = NowSeconds() - start;
  return report;
}

}  // namespace fathom
