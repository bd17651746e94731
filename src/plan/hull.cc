// SPDX-License-Identifier: MIT
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>

#include "fathom/plan.h"
#include "plan/sums.h"

namespace fathom {
namespace {

constexpr std::size_t kSteps = kLevels - 1;  // most steps of a channel

}  // namespace

std::array<double, kLevels> MeanLevelCosts(std::int32_t mean_bits) {
  const double mean_cost = static_cast<double>(mean_bits) / kBlockTokens;
  std::array<double, kLevels> cost{};
  for (int t = 0; t <= kPlanes; ++t) cost[static_cast<std::size_t>(t) + 1] = mean_cost + t;
  return cost;
}

std::array<double, kLevels> PaperLevelCosts() {
  constexpr double kScaleBits = 16.0 / kBlockTokens;
  std::array<double, kLevels> cost{};
  for (int t = 1; t <= kPlanes; ++t) cost[static_cast<std::size_t>(t) + 1] = t + kScaleBits;
  return cost;
}

std::vector<double> PublishedDistortions(std::span<const double> variance) {
  const std::size_t dim = variance.size();
  std::vector<double> distortion(kLevels * dim);
  double factor = 1.0;  // 4^-t
  for (std::size_t u = 0; u < kLevels; ++u) {
    if (u > 1) factor /= 4;
    for (std::size_t j = 0; j < dim; ++j) distortion[u * dim + j] = factor * variance[j];
  }
  return distortion;
}

DistortionHull::DistortionHull(std::span<const double> distortion,
                               const std::array<double, kLevels>& cost)
    : dim_(static_cast<std::int32_t>(distortion.size() / kLevels)),
      steps_(static_cast<std::size_t>(dim_) * kSteps),
      n_steps_(static_cast<std::size_t>(dim_)),
      variance_(static_cast<std::size_t>(dim_)),
      slope_(steps_.size()),
      cost_(steps_.size()) {
  assert(distortion.size() == static_cast<std::size_t>(dim_) * kLevels);
  const auto dim = static_cast<std::size_t>(dim_);
  std::ranges::transform(distortion.first(dim), variance_.begin(), FiniteOrZero);
  assert(std::ranges::is_sorted(cost));
  for (std::size_t j = 0; j < dim; ++j) {
    std::size_t level = 0;
    for (std::size_t s = 0; s < kSteps; ++s) {
      // The hull's next corner is the level with the most gain per bit, the lowest among equals.
      // NaN and inf are never better: a damaged channel is not planned. Levels of one cost need no
      // division: the better one was the better corner before.
      double best = 0;
      std::size_t next = 0;
      for (std::size_t u = level + 1; u < kLevels; ++u) {
        if (!(cost[u] > cost[level])) continue;
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

DistortionHull::DistortionHull(std::span<const double> distortion, std::int32_t mean_bits)
    : DistortionHull(distortion, MeanLevelCosts(mean_bits)) {}

}  // namespace fathom
