// SPDX-License-Identifier: MIT
// Calibration: statistics of a model's keys and queries, kept in a file and used instead of a
// session's own (design section 3, "Statistics"; docs/format.md). Without one, every session takes
// its statistics from its own prefill.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fathom/stats.h"
#include "fathom/store.h"
#include "fathom/types.h"

namespace fathom {

// Statistics of one KV head in the coordinates of one basis.
struct HeadStats {
  Basis basis;
  std::vector<double> variance;   // [D] of the coordinates, unbiased, first 16 tokens left out
  std::vector<double> abs_key;    // [D] E|x_j| over the finished blocks
  std::vector<double> abs_query;  // [D] E|q_j| of the group's queries; zeros without queries
};

// What a calibration knows of one KV head in one basis. Codecs are those of our own store, by mean
// bits; absent for BasisRule::kRaw, which our own store never uses.
struct HeadCalibration {
  HeadStats stats;
  std::array<MeanCodec, 2> codec;                 // of 4 and 8 mean bits
  std::array<std::vector<double>, 2> distortion;  // [kLevels][D] mean squared errors, likewise
  std::vector<std::int32_t> order;  // [D] channels by falling abs_query * abs_key (Double Sparsity)
};

// Immutable once made; safe to share between threads and sessions.
class Calibration {
 public:
  std::int32_t n_layers = 0;
  HeadGeometry heads;
  std::int64_t n_tokens = 0;                       // tokens the statistics saw
  std::string source;                              // where they come from, for people
  std::string model;                               // general.name of the model, may be empty
  std::vector<HeadCalibration> head_calibrations;  // [n_layers][n_kv_heads][kBasisRules]
  // Factors of the residual mass, [n_layers][n_heads], by canonical method spec.
  std::map<std::string, std::vector<float>> residual;
  // Bits per layer, [n_layers], by canonical method spec (whose bits or budget is their mean).
  std::map<std::string, std::vector<double>> budgets;

  const HeadCalibration& head(std::int32_t layer, std::int32_t kv_head, BasisRule rule) const {
    return head_calibrations[(static_cast<std::size_t>(layer) *
                                  static_cast<std::size_t>(heads.n_kv_heads) +
                              static_cast<std::size_t>(kv_head)) *
                                 kBasisRules +
                             static_cast<std::size_t>(rule)];
  }

  // Throws Error(kUsage), naming both, when a model of this shape cannot use it.
  void Check(std::int32_t layers, HeadGeometry geometry) const;
};

}  // namespace fathom
