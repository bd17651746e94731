// SPDX-License-Identifier: MIT
// Joins softmax attention over disjoint tokens: with l = log sum exp, out = sum exp(s - l) v, the
// union has weights exp(l_a - l), exp(l_b - l). In double, since a long context joins many parts.
#include <cmath>
#include <limits>

#include "fathom/backend.h"

namespace fathom {

void MergeAttention(float* out, float* lse, const float* other, float other_lse,
                    std::int32_t head_dim) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  if (other_lse == kNothing) return;
  if (*lse == kNothing) {
    for (int d = 0; d < head_dim; ++d) out[d] = other[d];
    *lse = other_lse;
    return;
  }
  const double top = *lse > other_lse ? *lse : other_lse;
  double a = std::exp(*lse - top);
  double b = std::exp(other_lse - top);
  const double sum = a + b;
  a /= sum;
  b /= sum;
  for (int d = 0; d < head_dim; ++d) out[d] = static_cast<float>(a * out[d] + b * other[d]);
  *lse = static_cast<float>(top + std::log(sum));
}

}  // namespace fathom
