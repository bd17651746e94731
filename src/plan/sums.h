// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

namespace fathom {

// What a plan takes for a channel whose query or variance is NaN or inf: such a channel carries no
// ranking.
inline double FiniteOrZero(double x) { return std::isfinite(x) ? x : 0.0; }

// term(0) + ... + term(n - 1) in eight interleaved partial sums: one running sum would wait for
// every addition, and the compiler may not split it by itself. The order depends on n alone.
template <typename Fn>
double SumInLanes(std::size_t n, const Fn& term) {
  std::array<double, 8> lane{};
  std::size_t i = 0;
  for (; i + lane.size() <= n; i += lane.size()) {
    for (std::size_t k = 0; k < lane.size(); ++k) lane[k] += term(i + k);
  }
  for (std::size_t k = 0; i + k < n; ++k) lane[k] += term(i + k);
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

}  // namespace fathom
