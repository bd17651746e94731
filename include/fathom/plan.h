// SPDX-License-Identifier: MIT
// Plans: how many bits of each channel a query reads. Pure numbers, no data; both functions are
// thread-safe and cost a few microseconds at D = 128.
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

// Lower convex hull of each channel's (cost, distortion) points: the steps a greedy plan can take.
// Rebuild when the distortions change (a block was added), not per step.
class DistortionHull {
 public:
  // distortion: [kLevels][D], measured mean squared errors, level 0 = Var(x_j). Channels where they
  // are NaN or inf get no steps and a variance of 0.
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
  // The same steps as PlanMeasured reads them: gain per bit and cost, [kLevels - 1][D] by step, 0
  // where there is none.
  std::span<const double> step_slopes() const { return slope_; }
  std::span<const double> step_costs() const { return cost_; }

 private:
  std::int32_t dim_;
  std::vector<Step> steps_;            // [D][kLevels - 1]
  std::vector<std::uint8_t> n_steps_;  // [D]
  std::vector<double> variance_;       // [D] distortion of level 0
  std::vector<double> slope_, cost_;   // [kLevels - 1][D]
};

// Plan by measured distortion (design 3.1 point 3): minimises sum_j w_j D_j(level_j) under sum cost
// <= bits, greedily by gain per bit along the hulls, w_j = sum_h q_hj^2 / sum_i q_hi^2 Var_i. A
// step that no longer fits ends its channel and the others go on. Optimal whenever no step had to
// be refused; equal gains take the smaller channel first. A query head with NaN or inf counts
// nothing.
struct MeasuredPlan {
  std::vector<std::uint8_t> level;  // [D], 0..5: not read, mean only, mean and 1..4 planes
  double read_bits = 0;
};
MeasuredPlan PlanMeasured(const float* q, std::int32_t group, const DistortionHull& hull,
                          double bits);

}  // namespace fathom
