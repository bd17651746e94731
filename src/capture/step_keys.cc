// SPDX-License-Identifier: MIT
#include <filesystem>

#include "fathom/capture.h"
#include "fathom/error.h"
#include "fathom/step_bench.h"

namespace fathom {
namespace {

constexpr std::int64_t kLeastBlocks = 4;

}  // namespace

StepKeys DescribeStepKeys(const CaptureFile& capture, const StepShape& shape) {
  const CaptureGeometry& g = capture.geometry();
  const auto fail = [&](const std::string& text) {
    throw Error(ErrorCode::kUsage, "capture '" + capture.path() + "' " + text);
  };
  if (g.heads.head_dim != shape.heads.head_dim) {
    fail("has heads of " + std::to_string(g.heads.head_dim) + " channels, shape " + shape.name +
         " of " + std::to_string(shape.heads.head_dim) +
         "; capture a model with such heads or give another --shape");
  }
  if (g.n_tokens < kLeastBlocks * kBlockTokens) {
    fail("has " + std::to_string(g.n_tokens) + " tokens; at least " +
         std::to_string(kLeastBlocks * kBlockTokens) + " are needed, so capture more of the text");
  }
  StepKeys keys;
  keys.file = std::filesystem::path(capture.path()).filename().string();
  keys.model = g.model;
  keys.n_tokens = g.n_tokens / kBlockTokens * kBlockTokens;
  if (g.stats_positions.front() >= keys.n_tokens) {
    fail("has no queries for statistics before token " + std::to_string(keys.n_tokens) +
         ", where its whole blocks end; capture with fewer --positions or a smaller --stats-every");
  }
  return keys;
}

}  // namespace fathom
