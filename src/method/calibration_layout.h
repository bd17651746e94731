// SPDX-License-Identifier: MIT
// What reader and writer of statistics files share: names, shapes and rules of the tensors
// (docs/format.md, "Statistics file").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/calibration.h"

namespace fathom::statistics_file {

// Keys of the file's metadata.
inline constexpr const char* kVersionKey = "fathom_statistics";
inline constexpr std::int64_t kVersion = 1;
inline constexpr const char* kHeadsKey = "n_heads";
inline constexpr const char* kTokensKey = "n_tokens";
inline constexpr const char* kModelKey = "model";
inline constexpr const char* kSourceKey = "source";

inline constexpr const char* kLayerPrefix = "layers.";
inline constexpr const char* kResidualPrefix = "residual.";  // then the CalibrationKey
inline constexpr const char* kBudgetsPrefix = "budgets.";
inline constexpr const char* kFirstPart = "key_mean";  // of every layer: its shape tells the heads

// What the values of a tensor must be.
enum class Rule : std::uint8_t {
  kFinite,
  kNotNegative,  // and finite
  kPositive,     // and finite
  kPermutation,  // of 0 .. D - 1 along the last dimension
};

using Shape = std::vector<std::int64_t>;

inline const char* BasisName(BasisRule rule) {
  switch (rule) {
    case BasisRule::kRaw:
      return "raw";
    case BasisRule::kCentred:
      return "centred";
    case BasisRule::kKlt:
      return "klt";
    case BasisRule::kBalanced:
      break;
  }
  return "balanced";
}

inline bool HasMap(BasisRule rule) {
  return rule == BasisRule::kKlt || rule == BasisRule::kBalanced;
}

// What is wrong with the maps of a basis that has them, as one line, or empty: scores are exact
// only where key_map * query_map^T is the identity.
std::string PairFault(const Basis& basis);

// Calls visit(name, shape, rule, vector) for everything the file has of one KV head; names are
// those within the layer, shapes without the dimension of the KV heads. F32, F64 or I64 follow from
// the vector's elements.
template <typename Moments, typename Visit>
void VisitMoments(Moments& m, std::int64_t dim, const Visit& visit) {
  visit("key_mean", Shape{dim}, Rule::kFinite, m.key_mean);
  visit("key_covariance", Shape{dim, dim}, Rule::kFinite, m.key_covariance);
  visit("query_moment", Shape{dim, dim}, Rule::kFinite, m.query_moment);
}

template <typename Head, typename Visit>
void VisitBasis(Head& head, BasisRule rule, std::int64_t dim, const Visit& visit) {
  const std::string name = std::string(BasisName(rule)) + ".";
  visit(name + "center", Shape{dim}, Rule::kFinite, head.stats.basis.center);
  if (HasMap(rule)) {
    visit(name + "key_map", Shape{dim, dim}, Rule::kFinite, head.stats.basis.key_map);
    visit(name + "query_map", Shape{dim, dim}, Rule::kFinite, head.stats.basis.query_map);
  }
  visit(name + "variance", Shape{dim}, Rule::kNotNegative, head.stats.variance);
  visit(name + "abs_key", Shape{dim}, Rule::kNotNegative, head.stats.abs_key);
  visit(name + "abs_query", Shape{dim}, Rule::kNotNegative, head.stats.abs_query);
  visit(name + "order", Shape{dim}, Rule::kPermutation, head.order);
  if (rule == BasisRule::kRaw) return;
  for (std::size_t i = 0; i < head.codec.size(); ++i) {
    const std::string part = name + (i == 0 ? "mean4." : "mean8.");
    visit(part + "step", Shape{dim}, Rule::kPositive, head.codec[i].mean_step);
    visit(part + "range", Shape{dim}, Rule::kPositive, head.codec[i].range);
    visit(part + "weight", Shape{dim, kPlanes, kPlanes}, Rule::kFinite, head.codec[i].weight);
    visit(part + "distortion", Shape{kLevels, dim}, Rule::kNotNegative, head.distortion[i]);
  }
}

// The same for slot `slot`, KV head `kv_head` of a calibration, whose arrays have their sizes.
template <typename Calibration, typename Visit>
void VisitHead(Calibration& c, std::size_t slot, std::size_t kv_head, const Visit& visit) {
  const std::size_t head = slot * static_cast<std::size_t>(c.heads.n_kv_heads) + kv_head;
  VisitMoments(c.moments[head], c.heads.head_dim, visit);
  for (int rule = 0; rule < kBasisRules; ++rule) {
    VisitBasis(c.head_calibrations[head * kBasisRules + static_cast<std::size_t>(rule)],
               static_cast<BasisRule>(rule), c.heads.head_dim, visit);
  }
}

}  // namespace fathom::statistics_file
