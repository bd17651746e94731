// SPDX-License-Identifier: MIT
// Seeded test data, the same with every standard library (its distributions differ, its engines do
// not) up to the last bit of log and cos.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <span>
#include <vector>

#include "base/half.h"
#include "fathom/types.h"

namespace fathom::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t Bits() { return engine_(); }
  // In [0, 1).
  double Uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  // In [low, high].
  std::int64_t Integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  // Standard normal, Box and Muller.
  double Normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - Uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * Uniform());
  }

 private:
  std::mt19937_64 engine_;
};

enum class DataKind {
  kNormal,       // independent, every channel with its own scale between 1/16 and 4
  kHeavyTailed,  // Student's t with 3 degrees of freedom: outliers many sigma away, as key channels
                 // have them
  kConstant,     // every token the same
  kSmooth,       // slow waves along tokens plus a little noise, like keys after RoPE, on a large
                 // constant offset
};

// [n][dim], token-major.
inline std::vector<float> RandomData(DataKind kind, std::int64_t n, std::int32_t dim,
                                     std::uint64_t seed) {
  Random random(seed);
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> scale(d), offset(d), period(d), phase(d);
  for (std::size_t j = 0; j < d; ++j) {
    scale[j] = std::exp2(6.0 * random.Uniform() - 4.0);
    offset[j] = 8.0 * random.Normal();
    period[j] = std::exp2(2.0 + 12.0 * random.Uniform());  // tokens
    phase[j] = random.Uniform();
  }
  std::vector<float> x(static_cast<std::size_t>(n) * d);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t j = i % d;
    const double token = static_cast<double>(i / d);
    double value = offset[j];
    if (kind == DataKind::kNormal) value = scale[j] * random.Normal();
    if (kind == DataKind::kHeavyTailed) {
      double chi = 0;
      for (int f = 0; f < 3; ++f) chi += std::pow(random.Normal(), 2);
      value = scale[j] * random.Normal() / std::sqrt(chi / 3.0 + 1e-6);
    }
    if (kind == DataKind::kSmooth) {
      value += scale[j] * (std::sin(2.0 * std::numbers::pi * (token / period[j] + phase[j])) +
                           0.2 * random.Normal());
    }
    x[i] = static_cast<float>(value);
  }
  return x;
}

// [n] standard normal values times `scale`.
inline std::vector<float> RandomNormal(std::int64_t n, std::uint64_t seed, double scale = 1.0) {
  Random random(seed);
  std::vector<float> x(static_cast<std::size_t>(n));
  std::ranges::generate(x, [&] { return static_cast<float>(scale * random.Normal()); });
  return x;
}

// fp16 rows [n][2][dim] of one KV head from keys and values [n][dim].
inline std::vector<Half> MakeRows(std::span<const float> keys, std::span<const float> values,
                                  std::int32_t dim) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<Half> rows(keys.size() * 2);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t row = i / d * 2 * d + i % d;
    rows[row] = FloatToHalf(keys[i]);
    rows[row + d] = FloatToHalf(values[i]);
  }
  return rows;
}

// Random rows [n][2][dim]: keys of the kind, normal values.
inline std::vector<Half> RandomRows(DataKind kind, std::int64_t n, std::int32_t dim,
                                    std::uint64_t seed) {
  return MakeRows(RandomData(kind, n, dim, seed), RandomNormal(n * dim, seed + 1), dim);
}

}  // namespace fathom::test
