// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>

#include "fathom/plan.h"
#include "plan/sums.h"

namespace fathom {
namespace {

constexpr double kFloor = 1e-30;  // of g_j: keeps its logarithm finite
constexpr double kThetaLimit = 60.0;
constexpr int kBisections = 30;

// clip(round_half_even(x), 0, 4). The bounds are integers, so clipping may come first; then
// adding 1.5 * 2^52 leaves no fraction bits, and the addition itself rounds half to even. Plain
// arithmetic, which compilers vectorise.
double Depth(double log2_g, double theta) {
  constexpr double kNoFraction = 0x1.8p52;
  const double x = 0.5 * (log2_g - theta);
  const double clipped = std::min(std::max(x, 0.0), static_cast<double>(kPlanes));
  return (clipped + kNoFraction) - kNoFraction;
}

double TotalDepth(std::span<const double> log2_g, double theta) {
  return SumInLanes(log2_g.size(), [&](std::size_t j) { return Depth(log2_g[j], theta); });
}

// Written so that a NaN budget counts as exceeded and the search still ends.
bool Exceeds(double total, double budget) { return !(total <= budget); }

}  // namespace

double PaperReadBits(std::span<const std::uint8_t> depth) {
  constexpr double kScaleBits = 16.0 / kBlockTokens;
  double bits = 0;
  for (const std::uint8_t t : depth) bits += t > 0 ? t + kScaleBits : 0.0;
  return bits;
}

PaperPlan PlanPaper(const float* q, std::int32_t group, std::span<const double> var,
                    double budget) {
  const std::size_t dim = var.size();
  std::vector<double> log2_g(dim);  // first sum_h q_hj^2
  for (std::int32_t h = 0; h < group; ++h, q += dim) {
    for (std::size_t j = 0; j < dim; ++j) log2_g[j] += static_cast<double>(q[j]) * q[j];
  }
  double largest = -kThetaLimit;
  for (std::size_t j = 0; j < dim; ++j) {
    log2_g[j] = std::log2(std::max(FiniteOrZero(log2_g[j] * var[j]), kFloor));
    largest = std::max(largest, log2_g[j]);
  }
  double low = -kThetaLimit, high = kThetaLimit;
  if (Exceeds(TotalDepth(log2_g, high), budget)) {
    // Only for g_j above 2^61: the published interval does not hold the solution, the next one up
    // to depth 0 does.
    low = high;
    high = std::max(high, largest + 2.0);
  }
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (Exceeds(TotalDepth(log2_g, middle), budget) ? low : high) = middle;
  }
  PaperPlan plan;
  plan.theta = high;
  plan.depth.resize(dim);
  for (std::size_t j = 0; j < dim; ++j) {
    plan.depth[j] = static_cast<std::uint8_t>(Depth(log2_g[j], high));
  }
  return plan;
}

}  // namespace fathom
