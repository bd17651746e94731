// SPDX-License-Identifier: MIT
#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <iterator>
#include <limits>

#include "fathom/plan.h"
#include "plan/sums.h"
#include "plan/weights.h"

namespace fathom {
namespace {

constexpr std::size_t kSteps = kLevels - 1;  // most steps of a channel

std::vector<double> WeightsOf(const float* q, std::int32_t group, const DistortionHull& hull,
                              PlanWeights weights) {
  std::vector<double> weight(static_cast<std::size_t>(hull.head_dim()));
  FillWeights(q, group, hull.variance(), weights, weight);
  return weight;
}

}  // namespace

MeasuredPlan PlanAtMultiplier(const float* q, std::int32_t group, const DistortionHull& hull,
                              double multiplier, PlanWeights weights) {
  const std::vector<double> weight = WeightsOf(q, group, hull, weights);
  const std::size_t dim = weight.size();
  assert(dim <= kMaxHeadDim);
  const double* slope = hull.step_slopes().data();
  const double* cost = hull.step_costs().data();
  // A channel's rates fall from step to step: those above the multiplier are its first ones, and
  // their number says how far it goes.
  MeasuredPlan plan;
  plan.level.resize(dim);
  std::array<double, kMaxHeadDim> taken{}, bits{};
  for (std::size_t s = 0; s < kSteps; ++s) {
    for (std::size_t j = 0; j < dim; ++j) {
      const double take = weight[j] * slope[s * dim + j] > multiplier ? 1 : 0;
      taken[j] += take;
      bits[j] += take * cost[s * dim + j];
    }
  }
  plan.read_bits = SumInLanes(dim, [&](std::size_t j) { return bits[j]; });  // multiples of 1/64
  for (std::size_t j = 0; j < dim; ++j) {
    // No branch: which channels are read is no pattern. A channel has room for kSteps steps.
    const auto n = static_cast<std::int32_t>(taken[j]);
    const bool any = n > 0;
    const std::uint8_t level =
        hull.steps(static_cast<std::int32_t>(j)).data()[n - (any ? 1 : 0)].level;
    plan.level[j] = any ? level : std::uint8_t{0};
  }
  return plan;
}

void MultiplierFit::Add(const float* q, std::int32_t group, const DistortionHull& hull) {
  const std::vector<double> weight = WeightsOf(q, group, hull, weights_);
  const std::size_t dim = weight.size();
  for (std::size_t s = 0; s < kSteps; ++s) {
    for (std::size_t j = 0; j < dim; ++j) {
      // The very product that PlanAtMultiplier compares, so that a fitted multiplier is exact.
      const double rate = weight[j] * hull.step_slopes()[s * dim + j];
      if (rate > 0) steps_.push_back({rate, hull.step_costs()[s * dim + j]});
    }
  }
  ++count_;
}

double MultiplierFit::Fit(double bits) {
  if (!(bits > 0)) return std::numeric_limits<double>::infinity();
  // Halves the range that holds the first step, by falling rate, that no longer fits; steps before
  // the range have the higher rates and fit. Plans take steps above the multiplier only, so that
  // step's rate is the least multiplier that leaves it out.
  const double budget = bits * static_cast<double>(count_);
  double spent = 0;  // by the steps before `first`
  auto first = steps_.begin();
  auto last = steps_.end();
  while (first != last) {
    const auto middle = first + std::distance(first, last) / 2;
    std::nth_element(first, middle, last,
                     [](const Step& a, const Step& b) { return a.rate > b.rate; });
    double cost = 0;
    for (auto step = first; step <= middle; ++step) cost += step->cost;
    if (spent + cost <= budget) {
      spent += cost;
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first == steps_.end() ? 0.0 : first->rate;
}

}  // namespace fathom
