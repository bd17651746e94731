// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "fathom/plan.h"
#include "plan/sums.h"
#include "plan/weights.h"

namespace fathom {
namespace {

constexpr std::size_t kSteps = kLevels - 1;  // most steps of a channel

// The greedy plan takes steps by falling rate. Steps above any threshold whose total cost fits are
// therefore a beginning of that order in which nothing is refused, so that no queue has to be kept
// for them. Finds such a threshold, close to the least one. rate, cost: [kSteps * D], 0 where a
// channel has no step.
double FindThreshold(std::span<const double> rate, std::span<const double> cost, double bits) {
  constexpr double kOctaves =
      48.0;                        // below the largest rate; what lies deeper is left to the caller
  constexpr int kBisections = 13;  // to 0.4 % of a rate
  const auto fits = [&](double threshold) {
    return SumInLanes(rate.size(),
                      [&](std::size_t i) { return rate[i] > threshold ? cost[i] : 0.0; }) <= bits;
  };
  if (fits(0.0)) return 0.0;
  const double largest = *std::ranges::max_element(rate);
  double low = 0.0, high = kOctaves;  // largest * 2^-low fits
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (fits(largest * std::exp2(-middle)) ? low : high) = middle;
  }
  return largest * std::exp2(-low);
}

}  // namespace

MeasuredPlan PlanMeasured(const float* q, std::int32_t group, const DistortionHull& hull,
                          double bits, PlanWeights weights) {
  const auto dim = static_cast<std::size_t>(hull.head_dim());
  const std::span<const double> cost = hull.step_costs();
  std::vector<double> scratch(dim * (kSteps + 1));
  const std::span<double> weight(scratch.data(), dim);
  const std::span<double> rate(scratch.data() + dim, dim * kSteps);
  FillWeights(q, group, hull.variance(), weights, weight);
  for (std::size_t s = 0; s < kSteps; ++s) {
    for (std::size_t j = 0; j < dim; ++j) {
      rate[s * dim + j] = weight[j] * hull.step_slopes()[s * dim + j];
    }
  }

  // level holds steps taken until the end.
  MeasuredPlan plan;
  plan.level.resize(dim);
  const double threshold = FindThreshold(rate, cost, bits);
  for (std::size_t j = 0; j < dim; ++j) {
    std::uint8_t taken = 0;
    double channel_bits = 0;
    for (std::size_t s = 0; s < kSteps; ++s) {
      const bool take = rate[s * dim + j] > threshold;
      taken = static_cast<std::uint8_t>(taken + (take ? 1 : 0));
      channel_bits += take ? cost[s * dim + j] : 0.0;
    }
    plan.level[j] = taken;
    plan.read_bits += channel_bits;  // exact for multiples of 1/64
  }
  // The few steps that still fit, one by one. What does not fit now never will.
  while (true) {
    double best = 0;
    std::size_t channel = dim;
    for (std::size_t j = 0; j < dim; ++j) {
      const std::size_t next = plan.level[j] * dim + j;
      if (plan.level[j] < kSteps && rate[next] > best && plan.read_bits + cost[next] <= bits) {
        best = rate[next];
        channel = j;
      }
    }
    if (channel == dim) break;
    plan.read_bits += cost[plan.level[channel] * dim + channel];
    ++plan.level[channel];
  }
  for (std::size_t j = 0; j < dim; ++j) {
    if (plan.level[j] > 0) {
      plan.level[j] = hull.steps(static_cast<std::int32_t>(j))[plan.level[j] - 1u].level;
    }
  }
  return plan;
}

}  // namespace fathom
