// SPDX-License-Identifier: MIT
// Comparison of floating-point arrays for tests. NaN and inf never pass by accident: they must
// stand at the same places, inf with the same sign, and everything else is compared by relative L2.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <sstream>

#include <gtest/gtest.h>

namespace fathom::test {

struct Difference {
  double relative_l2 =
      0;  // |actual - expected| / |expected| over the finite places; absolute when expected is 0
  std::size_t worst = 0;  // place of the largest difference
  std::size_t misplaced =
      std::numeric_limits<std::size_t>::max();  // first place where NaN or inf do not match
  bool matched() const { return misplaced == std::numeric_limits<std::size_t>::max(); }
};

// Requires equal sizes.
template <typename A, typename B>
Difference Compare(std::span<const A> actual, std::span<const B> expected) {
  Difference result;
  double error = 0, norm = 0, largest = -1;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double a = static_cast<double>(actual[i]), b = static_cast<double>(expected[i]);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      const bool same = (std::isnan(a) && std::isnan(b)) || a == b;
      if (!same && result.matched()) result.misplaced = i;
      continue;
    }
    const double d = std::fabs(a - b);
    if (d > largest) {
      largest = d;
      result.worst = i;
    }
    error += d * d;
    norm += b * b;
  }
  result.relative_l2 = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  return result;
}

// For EXPECT_TRUE: passes when sizes agree, NaN and inf stand at the same places and the relative
// L2 is at most `bound`.
template <typename A, typename B>
testing::AssertionResult Near(const A& actual_range, const B& expected_range, double bound) {
  const std::span actual(std::data(actual_range), std::size(actual_range));
  const std::span expected(std::data(expected_range), std::size(expected_range));
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure()
           << "sizes differ: " << actual.size() << ", expected " << expected.size();
  }
  using Actual = const typename decltype(actual)::value_type;
  using Expected = const typename decltype(expected)::value_type;
  const Difference d = Compare(std::span<Actual>(actual), std::span<Expected>(expected));
  if (!d.matched()) {
    return testing::AssertionFailure()
           << "NaN or inf differ, first at [" << d.misplaced << "]: " << actual[d.misplaced]
           << ", expected " << expected[d.misplaced];
  }
  if (d.relative_l2 <= bound) return testing::AssertionSuccess();
  std::ostringstream text;
  text.precision(9);
  text << "relative L2 " << d.relative_l2 << " exceeds " << bound << ", worst at [" << d.worst
       << "]: " << actual[d.worst] << ", expected " << expected[d.worst];
  return testing::AssertionFailure() << text.str();
}

}  // namespace fathom::test
