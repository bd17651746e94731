// SPDX-License-Identifier: MIT
#include "eval/capture_rows.h"

#include <algorithm>
#include <vector>

namespace fathom {
namespace {

constexpr std::int64_t kRecentSamples = 16;  // queries that fit the residual, as in a session
constexpr std::int64_t kLoadTokens = 4096;   // rows read from the file at a time

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

void LoadCaptureRows(const CaptureFile& capture, std::int32_t layer, std::int64_t n_tokens,
                     std::int32_t slot, RowStore* rows) {
  const HeadGeometry& heads = rows->geometry();
  const std::size_t width = Size(heads.n_kv_heads) * Size(heads.head_dim);
  std::vector<float> k(Size(kLoadTokens) * width), v(k.size());
  for (std::int64_t first = 0; first < n_tokens; first += kLoadTokens) {
    const std::int64_t n = std::min(kLoadTokens, n_tokens - first);
    capture.LoadRows(layer, first, n, k.data(), v.data());
    rows->Write(slot, first, n, k.data(), v.data());
  }
}

LayerQueries LoadCaptureSamples(const CaptureFile& capture, std::int32_t layer, std::int64_t end,
                                float factor) {
  const HeadGeometry& heads = capture.geometry().heads;
  const std::size_t width = Size(heads.n_heads) * Size(heads.head_dim);
  std::vector<float> stats = capture.LoadStatsQueries(layer);
  for (float& x : stats) x *= factor;
  const QuerySamples none(heads.n_heads, heads.head_dim);
  LayerQueries kept = {none, none};
  const std::vector<std::int64_t>& sampled = capture.geometry().stats_positions;
  for (std::size_t i = 0; i < sampled.size() && sampled[i] < end; ++i) {
    kept.samples.Add(sampled[i], stats.data() + i * width);
    kept.recent.Add(sampled[i], stats.data() + i * width);
  }
  kept.recent.KeepLast(kRecentSamples);
  return kept;
}

}  // namespace fathom
