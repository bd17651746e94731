// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>

#include "fathom/plan.h"
#include "plan/sums.h"

namespace fathom {
namespace {

constexpr std::size_t kSteps = kLevels - 1;  // most steps of a channel
constexpr double kNoSpread =
    1e-20;  // smallest score variance of a head: a zero query must not divide by zero

// Adds w_j of one query head. A head whose values are not all finite has no ranking to protect.
void AddWeights(const float* q, std::span<const double> variance, std::span<double> weight) {
  const double spread = SumInLanes(
      weight.size(), [&](std::size_t j) { return static_cast<double>(q[j]) * q[j] * variance[j]; });
  const double scale = FiniteOrZero(1.0 / std::max(spread, kNoSpread));
  for (std::size_t j = 0; j < weight.size(); ++j) {
    weight[j] += FiniteOrZero(static_cast<double>(q[j]) * q[j] * scale);
  }
}

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

std::array<double, kLevels> MeanLevelCosts(std::int32_t mean_bits) {
  const double mean_cost = static_cast<double>(mean_bits) / kBlockTokens;
  std::array<double, kLevels> cost{};
  for (int t = 0; t <= kPlanes; ++t) cost[static_cast<std::size_t>(t) + 1] = mean_cost + t;
  return cost;
}

DistortionHull::DistortionHull(std::span<const double> distortion, std::int32_t mean_bits)
    : dim_(static_cast<std::int32_t>(distortion.size() / kLevels)),
      steps_(static_cast<std::size_t>(dim_) * kSteps),
      n_steps_(static_cast<std::size_t>(dim_)),
      variance_(static_cast<std::size_t>(dim_)),
      slope_(steps_.size()),
      cost_(steps_.size()) {
  assert(distortion.size() == static_cast<std::size_t>(dim_) * kLevels);
  const auto dim = static_cast<std::size_t>(dim_);
  std::ranges::transform(distortion.first(dim), variance_.begin(), FiniteOrZero);
  const std::array<double, kLevels> cost = MeanLevelCosts(mean_bits);
  for (std::size_t j = 0; j < dim; ++j) {
    std::size_t level = 0;
    for (std::size_t s = 0; s < kSteps; ++s) {
      // The hull's next corner is the level with the most gain per bit, the lowest among equals.
      // NaN and inf are never better: a damaged channel is not planned.
      double best = 0;
      std::size_t next = 0;
      for (std::size_t u = level + 1; u < kLevels; ++u) {
        const double gain = distortion[level * dim + j] - distortion[u * dim + j];
        const double rate = gain / (cost[u] - cost[level]);
        if (rate > best && std::isfinite(rate)) {
          best = rate;
          next = u;
        }
      }
      if (next == 0) break;
      const double gain = distortion[level * dim + j] - distortion[next * dim + j];
      cost_[s * dim + j] = cost[next] - cost[level];
      // Rounding must not make a later step look better than an earlier one.
      slope_[s * dim + j] = s > 0 ? std::min(best, slope_[(s - 1) * dim + j]) : best;
      steps_[j * kSteps + s] = {static_cast<std::uint8_t>(next),
                                static_cast<float>(cost[next] - cost[level]),
                                static_cast<float>(gain)};
      n_steps_[j] = static_cast<std::uint8_t>(s + 1);
      level = next;
    }
  }
}

MeasuredPlan PlanMeasured(const float* q, std::int32_t group, const DistortionHull& hull,
                          double bits) {
  const auto dim = static_cast<std::size_t>(hull.head_dim());
  const std::span<const double> cost = hull.step_costs();
  std::vector<double> scratch(dim * (kSteps + 1));
  const std::span<double> weight(scratch.data(), dim);
  const std::span<double> rate(scratch.data() + dim, dim * kSteps);
  for (std::int32_t h = 0; h < group; ++h, q += dim) AddWeights(q, hull.variance(), weight);
  for (std::size_t s = 0; s < kSteps; ++s) {
    for (std::size_t j = 0; j < dim; ++j) {
      rate[s * dim + j] = weight[j] * hull.step_slopes()[s * dim + j];
    }
  }

  // level holds steps taken until the end.
  MeasuredPlan plan;
  plan.level.resize(dim);
  const double threshold = FindThreshold(rate, cost, bits);
  for (std::size_t s = 0; s < kSteps; ++s) {
    for (std::size_t j = 0; j < dim; ++j) {
      if (!(rate[s * dim + j] > threshold)) continue;
      ++plan.level[j];
      plan.read_bits += cost[s * dim + j];  // multiples of 1/16: exact
    }
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
