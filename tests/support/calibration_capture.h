// SPDX-License-Identifier: MIT
// A small synthetic capture for tests of calibrations: layers 1 and 3 of a model, smooth keys, and
// queries that look for some of them.
#pragma once

#include <string>
#include <vector>

#include "fathom/capture.h"
#include "support/random_data.h"

namespace fathom::test {

inline constexpr std::int64_t kCaptureTokens = 400;
inline constexpr std::int64_t kMeasuredTokens = 8;
inline constexpr HeadGeometry kCaptureHeads = {4, 2, 16};

inline CaptureGeometry SyntheticGeometry(std::int64_t n_tokens = kCaptureTokens) {
  CaptureGeometry g;
  g.n_tokens = n_tokens;
  g.heads = kCaptureHeads;
  g.layers = {1, 3};
  for (std::int64_t p = n_tokens - kMeasuredTokens; p < n_tokens; ++p) g.q_positions.push_back(p);
  for (std::int64_t p = 16; p < n_tokens - kMeasuredTokens; p += 4) g.stats_positions.push_back(p);
  g.model = "synthetic";
  g.text = "waves";
  g.has_qk_norm = false;
  return g;
}

// constant: keys of KV head 1 of layer 3 that are all the same.
inline void WriteSyntheticCapture(const std::string& path, std::uint64_t seed,
                                  const CaptureGeometry& g = SyntheticGeometry(),
                                  bool constant = false) {
  CaptureWriter writer(path, g, CaptureType::kF32);
  const std::int32_t width = g.heads.n_kv_heads * g.heads.head_dim;
  const std::int32_t q_width = g.heads.n_heads * g.heads.head_dim;
  for (const std::int32_t layer : g.layers) {
    const std::uint64_t s = seed * 100 + static_cast<std::uint64_t>(layer);
    std::vector<float> k = RandomData(DataKind::kSmooth, g.n_tokens, width, s);
    if (constant && layer == 3) {
      for (std::size_t i = 0; i < k.size(); ++i) {
        if (i % static_cast<std::size_t>(width) >= static_cast<std::size_t>(g.heads.head_dim)) {
          k[i] = 0.5F;
        }
      }
    }
    const auto v = RandomNormal(g.n_tokens * width, s + 1000);
    const auto q = RandomNormal(g.n_tokens * q_width, s + 2000);
    writer.Write(layer, 0, g.n_tokens, q.data(), k.data(), v.data());
  }
  writer.Commit();
}

}  // namespace fathom::test
