// SPDX-License-Identifier: MIT
// Plans by plain search, to check the fast ones against.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "fathom/plan.h"
#include "fathom/types.h"
#include "support/random_data.h"

namespace fathom::test {

using LevelCosts = std::array<double, kLevels>;

// Distortions [kLevels][D] that fall roughly by 4 per plane, some channels not convex, some not
// even monotone.
inline std::vector<double> RandomDistortions(std::size_t dim, std::uint64_t seed) {
  Random random(seed);
  std::vector<double> d(kLevels * dim);
  for (std::size_t j = 0; j < dim; ++j) {
    double value = std::exp2(6.0 * random.Uniform() - 3.0);
    for (std::size_t u = 0; u < kLevels; ++u) {
      d[u * dim + j] = value;
      value *= std::exp2(-3.0 * random.Uniform() + (random.Uniform() < 0.1 ? 1.0 : 0.0));
    }
  }
  return d;
}

inline std::vector<double> Weights(const std::vector<float>& q, std::size_t dim,
                                   const std::vector<double>& distortion,
                                   PlanWeights weights = PlanWeights::kPerHead) {
  std::vector<double> w(dim);
  for (std::size_t h = 0; h < q.size() / dim; ++h) {
    double spread = 0;  // D * variance of the head's scores
    for (std::size_t j = 0; j < dim; ++j) {
      spread += std::pow(static_cast<double>(q[h * dim + j]), 2) * distortion[j];
    }
    const double sigma = std::sqrt(spread / static_cast<double>(dim));
    for (std::size_t j = 0; j < dim; ++j) {
      double value = std::pow(static_cast<double>(q[h * dim + j]), 2);
      if (weights == PlanWeights::kPerHead) value /= spread;
      if (weights == PlanWeights::kSpread) value /= std::sqrt(static_cast<double>(dim)) * sigma;
      w[j] += value;
    }
  }
  return w;
}

inline double Predicted(const std::vector<std::uint8_t>& level, const std::vector<double>& w,
                        const std::vector<double>& distortion) {
  double sum = 0;
  for (std::size_t j = 0; j < w.size(); ++j) sum += w[j] * distortion[level[j] * w.size() + j];
  return sum;
}

inline double Cost(const std::vector<std::uint8_t>& level, const LevelCosts& cost) {
  double sum = 0;
  for (const std::uint8_t u : level) sum += cost[u];
  return sum;
}

// The least weighted distortion of all level combinations within the budget.
inline double Exhaustive(const std::vector<double>& w, const std::vector<double>& distortion,
                         const LevelCosts& cost, double bits) {
  std::vector<std::uint8_t> level(w.size());
  double best = std::numeric_limits<double>::infinity();
  while (true) {
    if (Cost(level, cost) <= bits) best = std::min(best, Predicted(level, w, distortion));
    std::size_t j = 0;
    while (j < level.size() && ++level[j] == kLevels) level[j++] = 0;
    if (j == level.size()) return best;
  }
}

// The greedy plan by plain search: of all upgrades of channels that are not ended the one with the
// most gain per bit, the smaller channel and then the smaller level among equals; one that does not
// fit ends its channel. Returns the levels after every step taken.
inline std::vector<std::vector<std::uint8_t>> GreedyPath(const std::vector<double>& w,
                                                         const std::vector<double>& distortion,
                                                         const LevelCosts& cost, double bits) {
  const std::size_t dim = w.size();
  std::vector<std::uint8_t> level(dim);
  std::vector<bool> ended(dim);
  std::vector<std::vector<std::uint8_t>> path = {level};
  while (true) {
    double best = 0;
    std::size_t channel = 0, to = 0;
    for (std::size_t j = 0; j < dim; ++j) {
      for (std::size_t u = level[j] + 1u; u < kLevels && !ended[j]; ++u) {
        const double gain = distortion[level[j] * dim + j] - distortion[u * dim + j];
        const double rate = w[j] * gain / (cost[u] - cost[level[j]]);
        if (rate > best) {
          best = rate;
          channel = j;
          to = u;
        }
      }
    }
    if (best == 0) return path;
    if (Cost(level, cost) + cost[to] - cost[level[channel]] > bits) {
      ended[channel] = true;
      continue;
    }
    level[channel] = static_cast<std::uint8_t>(to);
    path.push_back(level);
  }
}

}  // namespace fathom::test
