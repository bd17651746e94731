// SPDX-License-Identifier: MIT
// Softmax attention in two passes. The maximum ignores NaN, whose exp spoils the sum anyway; a head
// whose scores are all -inf attends nothing: zeros and lse = -inf.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/half.h"

namespace fathom {
namespace {

struct Shape {
  int head_dim;
  float scale;
};

// Attends the listed rows; tokens null: rows 0 .. n - 1.
float AttendRows(Shape shape, const Half* rows, const float* q, const std::int64_t* tokens,
                 std::int64_t n, float* out) {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  const int dim = shape.head_dim;
  std::vector<double> score(static_cast<std::size_t>(n));
  double top = kNothing;
  for (std::int64_t i = 0; i < n; ++i) {
    const Half* key = rows + (tokens != nullptr ? tokens[i] : i) * 2 * dim;
    for (int d = 0; d < dim; ++d) score[i] += static_cast<double>(q[d]) * HalfToFloat(key[d]);
    score[i] *= shape.scale;
    if (score[i] > top) top = score[i];
  }
  const double shift = top == kNothing ? 0 : top;
  double sum = 0;
  std::vector<double> total(static_cast<std::size_t>(dim));
  for (std::int64_t i = 0; i < n; ++i) {
    const Half* value = rows + (tokens != nullptr ? tokens[i] : i) * 2 * dim + dim;
    const double p = std::exp(score[i] - shift);
    sum += p;
    for (int d = 0; d < dim; ++d) total[d] += p * HalfToFloat(value[d]);
  }
  for (int d = 0; d < dim; ++d) out[d] = static_cast<float>(sum == 0 ? 0 : total[d] / sum);
  return static_cast<float>(sum == 0 ? kNothing : shift + std::log(sum));
}

}  // namespace

void RefBackend::Attend(const AttendArgs& a) const {
  std::vector<std::int64_t> tokens;
  for (const AttendHead& head : a.heads) {
    for (int h = 0; h < a.group; ++h) {
      tokens.clear();
      for (std::int64_t i = 0; i < head.n_attended; ++i) {
        if (head.tokens == nullptr) {
          tokens.push_back(i);
        } else if ((head.mask[i] >> h & 1) != 0) {
          tokens.push_back(head.tokens[i]);
        }
      }
      head.lse[h] =
          AttendRows({a.head_dim, a.scale}, head.rows, head.q + h * a.head_dim, tokens.data(),
                     static_cast<std::int64_t>(tokens.size()), head.out + h * a.head_dim);
    }
  }
}

void RefBackend::Prefill(const PrefillArgs& a) const {
  const HeadGeometry& g = a.geometry;
  const std::int32_t group = std::max(1, g.group());
  for (std::int64_t t = 0; t < a.n_queries; ++t) {
    for (int h = 0; h < g.n_heads; ++h) {
      const std::int64_t at = (t * g.n_heads + h) * g.head_dim;
      AttendRows({g.head_dim, a.scale}, a.rows[h / group], a.q + at, nullptr, a.first + t + 1,
                 a.out + at);
    }
  }
}

}  // namespace fathom
