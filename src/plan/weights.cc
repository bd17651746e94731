// SPDX-License-Identifier: MIT
#include "plan/weights.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "plan/sums.h"

namespace fathom {
namespace {

constexpr double kNoSpread =
    1e-20;  // smallest score variance of a head: a zero query must not divide by zero

// What q_hj^2 of a head is multiplied by. spread: sum_i q_hi^2 Var_i, NaN or inf where the query
// has them: such a head has no ranking to protect.
double Scale(PlanWeights weights, double spread) {
  if (!std::isfinite(spread)) return 0.0;
  switch (weights) {
    case PlanWeights::kPerHead:
      return 1.0 / std::max(spread, kNoSpread);
    case PlanWeights::kSum:
      return 1.0;
    case PlanWeights::kSpread:
      return 1.0 / std::sqrt(std::max(spread, kNoSpread));
  }
  return 0.0;
}

}  // namespace

void FillWeights(const float* q, std::int32_t group, std::span<const double> variance,
                 PlanWeights weights, std::span<double> weight) {
  const std::size_t dim = weight.size();
  std::ranges::fill(weight, 0.0);
  for (std::int32_t h = 0; h < group; ++h, q += dim) {
    const double spread = SumInLanes(
        dim, [&](std::size_t j) { return static_cast<double>(q[j]) * q[j] * variance[j]; });
    const double scale = Scale(weights, spread);
    for (std::size_t j = 0; j < dim; ++j) {
      weight[j] += FiniteOrZero(static_cast<double>(q[j]) * q[j] * scale);
    }
  }
}

}  // namespace fathom
