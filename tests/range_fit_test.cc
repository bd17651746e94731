// SPDX-License-Identifier: MIT
// How far a channel's planes reach (Ranges::kMeasured), against a plain search over all multiples
// in double.
#include <gtest/gtest.h>

#include <Eigen/QR>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "store/codec_fit.h"
#include "support/index_probe.h"
#include "support/random_data.h"

namespace fathom {
namespace {

constexpr std::array kMultiples = {2, 3, 4, 6, 8, 11};
constexpr std::int32_t kDim = 16;
constexpr int kMeanLimit = 7;

enum Kind { kNormal, kStudent, kOutliers, kConstant, kNan, kKinds };
Kind KindOf(std::size_t channel) { return static_cast<Kind>(channel % kKinds); }

double Sample(Kind kind, test::Random& random) {
  switch (kind) {
    case kStudent: {
      double chi = 0;
      for (int f = 0; f < 3; ++f) chi += std::pow(random.Normal(), 2);
      return random.Normal() / std::sqrt(chi / 3);
    }
    case kOutliers: {  // one in a hundred at 8 rms: rms^2 = .99 + .01 * 64 rms^2
      const double value = random.Normal();
      if (random.Uniform() >= 0.01) return value;
      return (value > 0 ? 8 : -8) * std::sqrt(0.99 / 0.36);
    }
    case kConstant:
      return 3.25;
    default:
      return random.Normal();
  }
}

std::vector<Half> Rows(std::int64_t n_blocks, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<float> keys(static_cast<std::size_t>(n_blocks) * kBlockTokens * kDim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t j = i % kDim;
    keys[i] = static_cast<float>(Sample(KindOf(j), random) * std::exp2(static_cast<int>(j) - 8));
    if (KindOf(j) == kNan && i / kDim == 77) keys[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return test::MakeRows(keys, keys, kDim);
}

struct Fitted {
  std::vector<float> mean_step, rms, multiple;
};

Fitted Fit(const std::vector<Half>& rows, std::int64_t first, std::int64_t n_blocks) {
  const Basis basis = RawBasis(kDim, {});
  BlockReader reader(rows.data(), basis);
  const MeanCodec codec =
      FitSteps(reader, first, n_blocks, {Codec::kMean, kDim, 4, 64}, Ranges::kRms);
  Fitted fitted = {codec.mean_step, codec.range, {}};
  for (float& r : fitted.rms) r /= 2;
  fitted.multiple =
      FitRangeMultiples(reader, first, n_blocks, kMeanLimit, fitted.mean_step, fitted.rms);
  return fitted;
}

// What the quantized means leave of one channel of these blocks.
std::vector<double> Residuals(const std::vector<Half>& rows, std::int64_t first,
                              std::int64_t n_blocks, std::size_t j, double step) {
  std::vector<double> y;
  for (std::int64_t b = first; b < first + n_blocks; ++b) {
    std::array<double, kBlockTokens> x{};
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t token = static_cast<std::size_t>(b) * kBlockTokens + i;
      x[i] = HalfToFloat(rows[token * 2 * kDim + j]);
      sum += x[i];
    }
    const double code = std::nearbyint(sum / kBlockTokens / step);
    for (const double v : x)
      y.push_back(v - std::clamp<double>(code, -kMeanLimit, kMeanLimit) * step);
  }
  return y;
}

// Sum over 2, 3 and 4 planes of the logarithm of the least squared error of any linear decoder.
double Cost(const std::vector<double>& y, double cell) {
  const auto n = static_cast<Eigen::Index>(y.size());
  Eigen::MatrixXd sigma(n, kPlanes);
  Eigen::VectorXd right(n);
  for (Eigen::Index i = 0; i < n; ++i) {
    right[i] = y[static_cast<std::size_t>(i)];
    const int code = static_cast<int>(std::clamp(std::floor(right[i] / cell), -8.0, 7.0)) + 8;
    for (int p = 0; p < kPlanes; ++p) sigma(i, p) = (code >> (3 - p) & 1) != 0 ? 1 : -1;
  }
  double cost = 0;
  for (int t = 2; t <= kPlanes; ++t) {
    const Eigen::MatrixXd bits = sigma.leftCols(t);
    const Eigen::VectorXd w = bits.completeOrthogonalDecomposition().solve(right);
    cost += std::log((right - bits * w).squaredNorm());
  }
  return cost;
}

// The chosen multiple costs no more than the best of all, up to `slack`.
void ExpectBest(const std::vector<Half>& rows, std::int64_t first, std::int64_t n_blocks,
                double slack) {
  const Fitted fitted = Fit(rows, first, n_blocks);
  for (std::size_t j = 0; j < kDim; ++j) {
    const float chosen = fitted.multiple[j];
    ASSERT_NE(std::ranges::find(kMultiples, static_cast<int>(chosen)), kMultiples.end()) << chosen;
    if (KindOf(j) == kNan || KindOf(j) == kConstant) continue;
    const std::vector<double> y = Residuals(rows, first, n_blocks, j, fitted.mean_step[j]);
    double least = std::numeric_limits<double>::infinity(), of_chosen = least;
    for (const int multiple : kMultiples) {
      const double cost = Cost(y, multiple * static_cast<double>(fitted.rms[j]) / 8);
      least = std::min(least, cost);
      if (static_cast<float>(multiple) == chosen) of_chosen = cost;
    }
    EXPECT_LE(of_chosen, least + slack) << "channel " << j << ", chosen " << chosen;
  }
}

TEST(RangeFit, TakesTheBestMultiple) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    ExpectBest(Rows(24, seed), 0, 24, 1e-3);
    ExpectBest(Rows(24, seed), 7, 12, 1e-3);
  }
}

TEST(RangeFit, RareLargeValuesNeedMoreThanNormalOnes) {
  const Fitted fitted = Fit(Rows(100, 5), 0, 100);
  for (std::size_t j = 0; j + kKinds <= kDim; j += kKinds) {
    EXPECT_LE(fitted.multiple[j + kNormal], 3);
    EXPECT_GT(fitted.multiple[j + kStudent], fitted.multiple[j + kNormal]);
    EXPECT_GT(fitted.multiple[j + kOutliers], fitted.multiple[j + kNormal]);
  }
}

// Constant channels have no residual to measure, and NaN none that could be compared.
TEST(RangeFit, WithoutAnythingToMeasureItIsTwoRms) {
  const Fitted fitted = Fit(Rows(24, 6), 0, 24);
  for (std::size_t j = 0; j < kDim; ++j) {
    if (KindOf(j) == kNan) {
      EXPECT_EQ(fitted.multiple[j], 2) << j;
    }
  }
  const std::vector<Half> zeros(std::size_t{24} * kBlockTokens * 2 * kDim);
  for (const float multiple : Fit(zeros, 0, 24).multiple) EXPECT_EQ(multiple, 2);
}

TEST(RangeFit, LooksAtSomeOfManyBlocks) {
  for (const std::int64_t n_blocks : {256, 257, 700}) {
    // Sampling may cost a little, no more: 2 % in each of the three distortions.
    ExpectBest(Rows(n_blocks, 8), 0, n_blocks, 0.06);
  }
}

TEST(RangeFit, IsTheSameEveryTime) {
  const std::vector<Half> rows = Rows(300, 9);
  EXPECT_EQ(Fit(rows, 0, 300).multiple, Fit(rows, 0, 300).multiple);
}

}  // namespace
}  // namespace fathom
