// SPDX-License-Identifier: MIT
// Synthetic rows and queries for benchmarks: keys with outliers around means that drift from block
// to block, with channels of very different variances, as keys of models have them; queries whose
// heads agree in part, so that the winners of a group overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fathom/backend.h"
#include "fathom/stats.h"
#include "fathom/store.h"

namespace fathom::cli {

class SyntheticHeads {
 public:
  SyntheticHeads(HeadGeometry heads, std::uint64_t seed);

  const HeadGeometry& heads() const { return heads_; }
  // Fills n_layers layers with the same n_tokens tokens.
  std::unique_ptr<RowStore> MakeRows(std::int64_t n_layers, std::int64_t n_tokens) const;
  std::vector<double> KeyMean(std::int32_t kv_head) const;  // [D]
  std::vector<double> KeyVariance() const;                  // [n_kv_heads][D]
  // [n_heads][D], another query for each number. The scores q.k / sqrt(D) of a head spread by about
  // 2.5.
  std::vector<float> Query(std::int64_t number) const;
  // [n][n_heads][D]: queries first .. first + n - 1.
  std::vector<float> Queries(std::int64_t first, std::int64_t n) const;
  // What a session of n_tokens would have kept of its prefill, for n_layers layers.
  std::vector<LayerQueries> Samples(std::int64_t n_layers, std::int64_t n_tokens) const;

 private:
  void FillTokens(std::int64_t first, std::int64_t n, float* k, float* v) const;

  HeadGeometry heads_;
  std::uint64_t seed_;
  std::vector<float> normal_, heavy_;                   // values to draw from
  std::vector<float> scale_, offset_, period_, phase_;  // [n_kv_heads][D]
};

// What one KV head attends, as Select writes it.
struct TokenList {
  std::vector<std::int32_t> tokens;
  std::vector<std::uint16_t> mask;
};

// The best k tokens of every query head (sinks and window counted) by exact scores, and their union
// over the group, for each KV head. q: [n_heads][D].
std::vector<TokenList> ExactLists(const RowStore& rows, std::int64_t n_tokens, std::int64_t k,
                                  const float* q, const Backend& backend);

}  // namespace fathom::cli
