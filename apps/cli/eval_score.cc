// SPDX-License-Identifier: MIT
#include "eval_score.h"

#include <algorithm>
#include <cmath>

namespace fathom::cli {

double Score::share() const {
  return questions > 0 ? static_cast<double>(right) / static_cast<double>(questions) : 0;
}

double Score::standard_error() const {
  if (questions == 0) return 0;
  return std::sqrt(share() * (1 - share()) / static_cast<double>(questions));
}

PairedDifference Compare(const std::vector<bool>& ours, const std::vector<bool>& other) {
  PairedDifference difference;
  const std::size_t n = std::min(ours.size(), other.size());
  difference.questions = static_cast<std::int64_t>(n);
  if (n == 0) return difference;
  const auto at = [&](std::size_t i) { return static_cast<double>(int{ours[i]} - int{other[i]}); };
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += at(i);
  const auto count = static_cast<double>(n);
  difference.mean = sum / count;
  if (n < 2) return difference;
  double squares = 0;
  for (std::size_t i = 0; i < n; ++i) squares += std::pow(at(i) - difference.mean, 2);
  difference.standard_error = std::sqrt(squares / (count * (count - 1)));
  return difference;
}

}  // namespace fathom::cli
