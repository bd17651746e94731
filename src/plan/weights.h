// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <span>

#include "fathom/plan.h"

namespace fathom {

// Writes w_j (see PlanWeights). q: [group][D]; variance, weight: [D].
void FillWeights(const float* q, std::int32_t group, std::span<const double> variance,
                 PlanWeights weights, std::span<double> weight);

}  // namespace fathom
