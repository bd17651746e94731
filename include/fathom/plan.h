// SPDX-License-Identifier: MIT
// Plans: how many bits of each channel a query reads. Pure numbers, no data; the functions are
// thread-safe and a plan costs a few microseconds at D = 128.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "fathom/types.h"

namespace fathom {

// Read bits per token of `levels` planes of one channel under the published store: t + 16/64 when t
// > 0.
double PaperReadBits(std::span<const std::uint8_t> depth);

// Published reverse water-filling (design section 3, "Plan"), in double:
//   g_j = max(var_j * sum_h q_hj^2, 1e-30), t_j = clip(round_half_even((log2 g_j - theta) / 2), 0,
//   4), 30 bisections of theta on [-60, 60]; the upper end is used, so sum_j t_j <= budget always.
struct PaperPlan {
  std::vector<std::uint8_t> depth;  // [D] planes read, 0..4
  double theta = 0;  // log2 of a value of g; the worked example of the design prints 2^theta
};
// q: [group][D] in the index's basis; var: [D]; budget >= 0 in code bits per token.
PaperPlan PlanPaper(const float* q, std::int32_t group, std::span<const double> var, double budget);

// Costs in read bits per token of the levels of our store: 0, mean_bits/64, mean_bits/64 + 1 ...
// + 4.
std::array<double, kLevels> MeanLevelCosts(std::int32_t mean_bits);

// The same for the published store, which has no means: 0, 0, and t + 16/64 for level 1 + t. Level
// 1 is level 0 under another number and is never taken.
std::array<double, kLevels> PaperLevelCosts();

// The distortions that the published plan assumes, [kLevels][D]: var for levels 0 and 1, var * 4^-t
// for level 1 + t. With them, PlanWeights::kSum and a cost of t per level 1 + t, the plan at
// multiplier 1.5 * 2^theta is PlanPaper's at theta.
std::vector<double> PublishedDistortions(std::span<const double> variance);

// Lower convex hull of each channel's (cost, distortion) points: the steps a greedy plan can take.
// Rebuild when the distortions change (a block was added), not per step.
class DistortionHull {
 public:
  // distortion: [kLevels][D], measured mean squared errors, level 0 = Var(x_j). Channels where that
  // is NaN or inf get no steps and a variance of 0; other levels where it is NaN or inf are never
  // taken.
  // cost: read bits per token of a level, ascending. Equal costs are allowed; a level that costs no
  // more than level 0, or inf, is never taken. Costs that are multiples of 1/64 add up without
  // rounding.
  DistortionHull(std::span<const double> distortion, const std::array<double, kLevels>& cost);
  // With MeanLevelCosts(mean_bits).
  DistortionHull(std::span<const double> distortion, std::int32_t mean_bits);

  struct Step {
    std::uint8_t level;  // level after the step
    float cost;          // read bits the step adds
    float gain;          // distortion it removes, for weight 1
  };
  std::int32_t head_dim() const { return dim_; }
  // Steps of channel j from level 0 upwards, by falling gain per bit; steps that do not lower the
  // distortion are left out.
  std::span<const Step> steps(std::int32_t j) const {
    return {steps_.data() + static_cast<std::size_t>(j) * (kLevels - 1),
            n_steps_[static_cast<std::size_t>(j)]};
  }
  std::span<const double> variance() const { return variance_; }
  // The same steps as plans read them: gain per bit and cost, [kLevels - 1][D] by step, 0 where
  // there is none.
  std::span<const double> step_slopes() const { return slope_; }
  std::span<const double> step_costs() const { return cost_; }

 private:
  std::int32_t dim_;
  std::vector<Step> steps_;            // [D][kLevels - 1]
  std::vector<std::uint8_t> n_steps_;  // [D]
  std::vector<double> variance_;       // [D] distortion of level 0
  std::vector<double> slope_, cost_;   // [kLevels - 1][D]
};

// Weight w_j of a channel's distortion. A query head with NaN or inf counts nothing.
enum class PlanWeights : std::uint8_t {
  kPerHead,  // sum_h q_hj^2 / sum_i q_hi^2 Var_i: each head counts the same
  kSum,      // sum_h q_hj^2: the published rule
  // sum_h q_hj^2 / (sqrt(D) sigma_h), sigma_h^2 = sum_i q_hi^2 Var_i / D the variance of head h's
  // scores: a head whose scores spread more counts more, which one multiplier for all heads needs.
  kSpread,
};

struct MeasuredPlan {
  std::vector<std::uint8_t> level;  // [D], 0..5: not read, mean only, mean and 1..4 planes
  double read_bits = 0;
};

// Plan by measured distortion (design 3.1 point 3): minimises sum_j w_j D_j(level_j) under sum cost
// <= bits, greedily by gain per bit along the hulls. A step that no longer fits ends its channel
// and the others go on. Optimal whenever no step had to be refused; equal gains take the smaller
// channel first.
MeasuredPlan PlanMeasured(const float* q, std::int32_t group, const DistortionHull& hull,
                          double bits, PlanWeights weights = PlanWeights::kPerHead);

// Plan at a given exchange rate (design 3.1, `plan=common`): takes every step with w_j * gain per
// bit > multiplier, and so minimises sum_j w_j D_j(level_j) among all plans that read no more bits
// than it does. 0 takes every step with a gain; inf and NaN take none.
MeasuredPlan PlanAtMultiplier(const float* q, std::int32_t group, const DistortionHull& hull,
                              double multiplier, PlanWeights weights = PlanWeights::kSpread);

// Finds the multiplier that several (query, hull) pairs, such as a few positions of all layers and
// KV heads, have in common. Keeps at most (kLevels - 1) * D steps of 16 bytes per pair and neither
// the query nor the hull. Not thread-safe.
class MultiplierFit {
 public:
  explicit MultiplierFit(PlanWeights weights = PlanWeights::kSpread) : weights_(weights) {}

  // q: [group][D]. Pairs may differ in group and D. A pair without weight (a zero query, NaN) is a
  // plan that reads nothing and counts in the mean.
  void Add(const float* q, std::int32_t group, const DistortionHull& hull);
  std::int64_t count() const { return count_; }

  // The least multiplier at which PlanAtMultiplier with the same weights reads, in the mean over
  // all pairs, at most `bits` read bits: exact, and the same for any order of the pairs while costs
  // add up without rounding. 0 when all steps fit, as they do when nothing was added; inf when bits
  // is 0, negative or NaN, so that nothing is read of other queries either. Linear in the steps;
  // may be called again, also after further pairs.
  double Fit(double bits);

 private:
  struct Step {
    double rate;  // weight * gain per bit, > 0
    double cost;
  };
  PlanWeights weights_;
  std::int64_t count_ = 0;
  std::vector<Step> steps_;  // in no order
};

}  // namespace fathom
