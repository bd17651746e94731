// SPDX-License-Identifier: MIT
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "fathom/eval.h"

namespace fathom {
namespace {

// Scans that read the same number of bits for every query.
constexpr std::array<std::string_view, 7> kFixedDepth = {
    "double-sparsity", "full4", "landmark", "loki", "quest", "sparq", "thumbnail"};
constexpr std::string_view kCurveMethod = "fathom";
// What varies along a curve, and k, which names the curve's table.
constexpr std::array<const char*, 3> kVaried = {"bits", "budget", "k"};

struct Point {
  double bits = 0;
  double error = 0;
};

struct Curve {
  std::string name;
  std::string spec;
  std::vector<Point> points;  // by bits, at different bits
};

// The comparisons are false for NaN.
bool Usable(const ErrorRow& row) {
  return row.read_bits > 0 && row.mean > 0 && std::isfinite(row.read_bits) &&
         std::isfinite(row.mean);
}

void AddPoint(const ErrorRow& row, std::vector<Curve>* curves) {
  const std::string spec = CurveOf(row.spec);
  auto curve = std::find_if(curves->begin(), curves->end(),
                            [&](const Curve& other) { return other.spec == spec; });
  if (curve == curves->end()) {
    curves->push_back({CurveOf(row.method), spec, {}});
    curve = curves->end() - 1;
  }
  const auto at =
      std::lower_bound(curve->points.begin(), curve->points.end(), row.read_bits,
                       [](const Point& point, double bits) { return point.bits < bits; });
  if (at != curve->points.end() && at->bits == row.read_bits) return;
  curve->points.insert(at, {row.read_bits, row.mean});
}

EqualErrorBits Match(const ErrorRow& reference, const Curve& curve) {
  EqualErrorBits match;
  match.reference = reference.method;
  match.curve = curve.name;
  match.curve_spec = curve.spec;
  match.k = reference.k;
  match.reference_bits = reference.read_bits;
  match.reference_error = reference.mean;
  const auto reached = std::find_if(curve.points.begin(), curve.points.end(),
                                    [&](const Point& p) { return p.error <= reference.mean; });
  if (reached == curve.points.end()) return match;
  if (reached->error == reference.mean) {
    match.bits = reached->bits;
  } else if (reached == curve.points.begin()) {
    match.below = reached->bits;
  } else {
    const Point& before = *(reached - 1);  // above the reference, so the quotient is in (0, 1)
    const double share =
        std::log(before.error / reference.mean) / std::log(before.error / reached->error);
    match.bits = before.bits + share * (reached->bits - before.bits);
  }
  return match;
}

void MatchAtK(std::span<const ErrorRow> rows, std::int64_t k, std::vector<EqualErrorBits>* found) {
  std::vector<const ErrorRow*> references;
  std::vector<Curve> curves;
  for (const ErrorRow& row : rows) {
    if (row.k != k || !Usable(row)) continue;
    const std::string name = MethodSpec::Parse(row.spec).name;
    if (name == kCurveMethod) AddPoint(row, &curves);
    if (std::find(kFixedDepth.begin(), kFixedDepth.end(), name) == kFixedDepth.end()) continue;
    const bool seen = std::any_of(references.begin(), references.end(),
                                  [&](const ErrorRow* other) { return other->spec == row.spec; });
    if (!seen) references.push_back(&row);
  }
  for (const ErrorRow* reference : references) {
    for (const Curve& curve : curves) {
      if (curve.points.size() >= 2) found->push_back(Match(*reference, curve));
    }
  }
}

}  // namespace

std::string CurveOf(const std::string& spec) {
  MethodSpec parsed = MethodSpec::Parse(spec);
  for (const char* key : kVaried) parsed.options.erase(key);
  return parsed.ToString();
}

std::vector<EqualErrorBits> FindEqualErrorBits(std::span<const ErrorRow> rows) {
  std::vector<EqualErrorBits> found;
  std::vector<std::int64_t> seen;
  for (const ErrorRow& row : rows) {
    if (std::find(seen.begin(), seen.end(), row.k) != seen.end()) continue;
    seen.push_back(row.k);
    MatchAtK(rows, row.k, &found);
  }
  return found;
}

}  // namespace fathom
