// SPDX-License-Identifier: MIT
// Scores as integers of the same order, and the integers T of a scan that reach a score.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace fathom::cpu {

// An integer of the same order as the score; NaN lowest. The kernels have the same.
inline std::int32_t KeyOfScore(float score) {
  if (std::isnan(score)) return std::numeric_limits<std::int32_t>::min();
  const auto bits = std::bit_cast<std::int32_t>(score + 0.0f);
  return bits >= 0 ? bits : bits ^ std::numeric_limits<std::int32_t>::max();
}

inline float ScoreOfKey(std::int32_t key) {
  if (key == std::numeric_limits<std::int32_t>::min())
    return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(key >= 0 ? key : key ^ std::numeric_limits<std::int32_t>::max());
}

inline constexpr std::int32_t kMostTotal = 1 << 25;  // beyond every T

// The least T whose score is `score` or more.
inline std::int32_t LeastTotal(float score, float scale) {
  if (std::isnan(score) || !(scale > 0)) return score <= 0 ? -kMostTotal : kMostTotal;
  const auto reaches = [&](std::int32_t t) { return static_cast<float>(t) * scale >= score; };
  const double exact = static_cast<double>(score) / scale;
  auto total = static_cast<std::int32_t>(std::clamp<double>(exact, -kMostTotal, kMostTotal));
  while (total > -kMostTotal && reaches(total - 1)) --total;
  while (total < kMostTotal && !reaches(total)) ++total;
  return total;
}

}  // namespace fathom::cpu
