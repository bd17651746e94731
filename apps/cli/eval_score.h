// SPDX-License-Identifier: MIT
// Shares of right answers and how certain they are.
#pragma once

#include <cstdint>
#include <vector>

namespace fathom::cli {

struct Score {
  std::int64_t questions = 0;
  std::int64_t right = 0;

  void Add(bool is_right) {
    ++questions;
    right += is_right ? 1 : 0;
  }
  // right / questions, 0 without questions.
  double share() const;
  // sqrt(p (1 - p) / n) of the share p of n questions, 0 without questions.
  double standard_error() const;
};

// A method against another on the same questions.
struct PairedDifference {
  std::int64_t questions = 0;
  double mean = 0;  // share of the one less share of the other
  // sqrt(sum (d - mean)^2 / (n (n - 1))) of the n differences d in {-1, 0, 1}; 0 for n < 2. Smaller
  // than the shares' own errors suggest, because both meet the same hard questions.
  double standard_error = 0;
};

// ours and other: right (true) or wrong per question; of unequal length (an interrupted run) the
// common beginning counts.
PairedDifference Compare(const std::vector<bool>& ours, const std::vector<bool>& other);

}  // namespace fathom::cli
