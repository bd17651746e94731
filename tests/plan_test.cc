// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "fathom/plan.h"
#include "support/plan_reference.h"
#include "support/random_data.h"

namespace fathom {
namespace {

using test::Cost;
using test::Exhaustive;
using test::GreedyPath;
using test::Predicted;
using test::Random;
using test::RandomDistortions;
using test::Weights;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Problem {
  std::int32_t group = 1;
  std::vector<float> q;     // [group][D]
  std::vector<double> var;  // [D]
};

// Queries and variances spread over many octaves, with some zeros.
Problem RandomProblem(std::size_t dim, std::int32_t group, std::uint64_t seed) {
  Random random(seed);
  Problem p{group, {}, {}};
  for (std::size_t j = 0; j < dim; ++j) {
    const bool dead = random.Uniform() < 0.05;
    p.var.push_back(dead ? 0.0 : std::exp2(12.0 * random.Uniform() - 8.0));
  }
  for (std::size_t i = 0; i < dim * static_cast<std::size_t>(group); ++i) {
    p.q.push_back(static_cast<float>(random.Normal() * std::exp2(4.0 * random.Uniform())));
  }
  return p;
}

int Sum(const std::vector<std::uint8_t>& depth) {
  return std::accumulate(depth.begin(), depth.end(), 0);
}

std::vector<std::uint8_t> DepthsAt(const Problem& p, double theta) {
  std::vector<std::uint8_t> depth;
  for (std::size_t j = 0; j < p.var.size(); ++j) {
    double energy = 0;
    for (std::size_t h = 0; h < static_cast<std::size_t>(p.group); ++h) {
      energy += std::pow(static_cast<double>(p.q[h * p.var.size() + j]), 2);
    }
    const double g = std::max(p.var[j] * energy, 1e-30);
    const double t = std::nearbyint(0.5 * (std::log2(g) - theta));  // half to even
    depth.push_back(static_cast<std::uint8_t>(std::clamp(t, 0.0, 4.0)));
  }
  return depth;
}

TEST(PaperPlan, EqualsTheDefinition) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Problem p = RandomProblem(32, static_cast<std::int32_t>(1 + seed % 4), seed);
    for (const double budget : {0.0, 1.0, 7.5, 16.0, 48.0, 100.0, 127.0, 128.0, 1e9}) {
      const PaperPlan plan = PlanPaper(p.q.data(), p.group, p.var, budget);
      ASSERT_LE(Sum(plan.depth), budget);
      ASSERT_EQ(plan.depth, DepthsAt(p, plan.theta));
      // theta is the least one that fits: just below it the plan is over budget, unless the
      // interval ends there.
      const double below = plan.theta - 120.0 * 0x1p-29;
      if (below > -60.0) {
        ASSERT_GT(Sum(DepthsAt(p, below)), budget);
      }
    }
  }
}

TEST(PaperPlan, EqualsAFineScanOfTheta) {
  constexpr double kStep = 1.0 / 512;
  for (std::uint64_t seed = 100; seed < 120; ++seed) {
    const Problem p = RandomProblem(24, 2, seed);
    for (const double budget : {5.0, 20.0, 48.0, 90.0}) {
      double theta = -60;
      while (Sum(DepthsAt(p, theta)) > budget) theta += kStep;
      const PaperPlan plan = PlanPaper(p.q.data(), p.group, p.var, budget);
      EXPECT_NEAR(plan.theta, theta, kStep);
      // The total falls with theta, so the plan lies between the scan's last two points.
      EXPECT_GE(Sum(plan.depth), Sum(DepthsAt(p, theta)));
      if (theta > -60) {
        EXPECT_LT(Sum(plan.depth), Sum(DepthsAt(p, theta - kStep)));
      }
    }
  }
}

TEST(PaperPlan, RoundsHalfToEven) {
  // log2 g = 1, 3, 5, 7 with the same fraction: at theta = 0 the halves .5, 1.5, 2.5, 3.5 become 0,
  // 2, 2, 4.
  const Problem p{1, {1, 1, 1, 1}, {2, 8, 32, 128}};
  EXPECT_EQ(DepthsAt(p, 0), (std::vector<std::uint8_t>{0, 2, 2, 4}));
  EXPECT_EQ(PlanPaper(p.q.data(), 1, p.var, 8).depth, (std::vector<std::uint8_t>{0, 2, 2, 4}));
}

TEST(PaperPlan, StaysWithinTheBudgetForHugeEnergies) {
  Problem p = RandomProblem(64, 1, 3);
  for (double& v : p.var) v *= 0x1p200;
  for (const double budget : {0.0, 10.0, 48.0}) {
    const PaperPlan plan = PlanPaper(p.q.data(), 1, p.var, budget);
    EXPECT_LE(Sum(plan.depth), budget);
    EXPECT_GE(Sum(plan.depth), budget - 4) << "and uses it";
  }
}

TEST(PaperPlan, SurvivesNanAndInf) {
  for (const double bad : {kNan, kInf, -kInf}) {
    Problem p = RandomProblem(64, 2, 4);
    p.q[3] = static_cast<float>(bad);
    p.var[9] = bad;
    const PaperPlan plan = PlanPaper(p.q.data(), 2, p.var, 48);
    EXPECT_LE(Sum(plan.depth), 48);
    EXPECT_GE(Sum(plan.depth), 40);
    EXPECT_EQ(plan.depth[3], 0);
    EXPECT_EQ(plan.depth[9], 0);
  }
  const Problem p = RandomProblem(64, 2, 4);
  EXPECT_EQ(Sum(PlanPaper(p.q.data(), 2, p.var, kNan).depth), 0);
}

TEST(PaperReadBits, CountsScalesOfActiveChannels) {
  const std::vector<std::uint8_t> depth = {4, 0, 1, 2, 0};
  EXPECT_EQ(PaperReadBits(depth), 7.75);
  EXPECT_EQ(PaperReadBits({}), 0);
}

TEST(MeasuredPlan, IsOptimalWhereNoStepIsRefused) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const std::size_t dim = 4 + seed % 2;
    const std::int32_t mean_bits = seed % 3 == 0 ? 8 : 4;
    const std::vector<double> distortion = RandomDistortions(dim, seed);
    const DistortionHull hull(distortion, mean_bits);
    const std::vector<float> q = test::RandomNormal(static_cast<std::int64_t>(dim) * 2, seed + 50);
    const std::vector<double> w = Weights(q, dim, distortion);
    for (const auto& level : GreedyPath(w, distortion, MeanLevelCosts(mean_bits), kInf)) {
      const double bits = Cost(level, MeanLevelCosts(mean_bits));
      const MeasuredPlan plan = PlanMeasured(q.data(), 2, hull, bits);
      EXPECT_EQ(plan.level, level) << seed << " at " << bits;
      EXPECT_EQ(plan.read_bits, bits);
      const double best = Exhaustive(w, distortion, MeanLevelCosts(mean_bits), bits);
      EXPECT_NEAR(Predicted(plan.level, w, distortion), best, 1e-12 * best + 1e-300);
    }
  }
}

TEST(MeasuredPlan, EqualsThePlainSearchAtAnyBudget) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::size_t dim = seed % 2 == 0 ? 80 : 13;
    const std::int32_t mean_bits = seed % 3 == 0 ? 8 : 4;
    const auto group = static_cast<std::int32_t>(1 + seed % 5);
    const std::vector<double> distortion = RandomDistortions(dim, seed + 400);
    const DistortionHull hull(distortion, mean_bits);
    const std::vector<float> q =
        test::RandomNormal(static_cast<std::int64_t>(dim) * group, seed + 500);
    const std::vector<double> w = Weights(q, dim, distortion);
    for (const double bits :
         {-1.0, 0.0, 0.05, 0.3, 1.0, 3.17, 14.0, 28.0, 28.03, 64.5, 200.0, 1e9}) {
      EXPECT_EQ(PlanMeasured(q.data(), group, hull, bits).level,
                GreedyPath(w, distortion, MeanLevelCosts(mean_bits), bits).back())
          << "seed " << seed << ", " << bits << " bits";
    }
  }
}

TEST(MeasuredPlan, IsNeverOverBudgetAndMoreBitsNeverHurt) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::size_t dim = 64;
    const std::int32_t mean_bits = seed % 2 == 0 ? 4 : 8;
    const std::vector<double> distortion = RandomDistortions(dim, seed + 1000);
    const DistortionHull hull(distortion, mean_bits);
    const std::vector<float> q = test::RandomNormal(64 * 4, seed);
    const std::vector<double> w = Weights(q, dim, distortion);
    double last = kInf;
    for (int step = 0; step < 811; ++step) {
      const double bits = 0.37 * step;
      const MeasuredPlan plan = PlanMeasured(q.data(), 4, hull, bits);
      ASSERT_LE(plan.read_bits, bits);
      ASSERT_EQ(plan.read_bits, Cost(plan.level, MeanLevelCosts(mean_bits)));
      const double predicted = Predicted(plan.level, w, distortion);
      ASSERT_LE(predicted, last * (1 + 1e-6)) << bits;  // gains are kept in single precision
      last = predicted;
    }
  }
}

TEST(MeasuredPlan, ARefusedStepEndsItsChannelOnly) {
  // Channel 0 wants a plane first, which does not fit; channel 1 still gets its mean.
  const std::vector<double> distortion = {100, 4, 100, 3, 1, 2, 0.9, 1.9, 0.8, 1.8, 0.7, 1.7};
  const DistortionHull hull(distortion, 4);
  ASSERT_EQ(hull.steps(0)[0].level, 2);
  const std::vector<float> q = {1, 1};
  const MeasuredPlan plan = PlanMeasured(q.data(), 1, hull, 0.5);
  EXPECT_EQ(plan.level, (std::vector<std::uint8_t>{0, 1}));
  EXPECT_EQ(plan.read_bits, 0.0625);
}

TEST(MeasuredPlan, EqualGainsTakeTheSmallerChannelFirst) {
  constexpr std::size_t kDim = 33;
  std::vector<double> distortion;
  for (const double d : {8.0, 4.0, 2.0, 1.0, 0.5, 0.25})
    distortion.insert(distortion.end(), kDim, d);
  const DistortionHull hull(distortion, 4);
  const std::vector<float> q(kDim, 1.0f);
  for (std::size_t n = 0; n <= kDim; ++n) {
    const MeasuredPlan plan = PlanMeasured(q.data(), 1, hull, static_cast<double>(n) * 0.0625);
    std::vector<std::uint8_t> expected(kDim);
    std::fill_n(expected.begin(), n, std::uint8_t{1});
    EXPECT_EQ(plan.level, expected);
  }
}

TEST(MeasuredPlan, SurvivesNanAndInf) {
  std::vector<double> distortion = RandomDistortions(32, 5);
  const DistortionHull good(distortion, 4);
  distortion[7] = kNan;
  distortion[8] = kInf;
  distortion[32 + 9] = kNan;
  const DistortionHull damaged(distortion, 4);
  for (const double bad : {kNan, kInf, -kInf}) {
    std::vector<float> q = test::RandomNormal(64, 6);
    q[5] = static_cast<float>(bad);
    for (const DistortionHull* hull : {&good, &damaged}) {
      const MeasuredPlan plan = PlanMeasured(q.data(), 2, *hull, 28);
      EXPECT_LE(plan.read_bits, 28);
      EXPECT_GT(plan.read_bits, 20) << "the other head still plans";
    }
    std::fill(q.begin(), q.end(), static_cast<float>(bad));
    EXPECT_EQ(PlanMeasured(q.data(), 2, good, 28).read_bits, 0);
  }
  const std::vector<float> zero(64);
  EXPECT_EQ(PlanMeasured(zero.data(), 2, good, 28).read_bits, 0);
  EXPECT_EQ(PlanMeasured(test::RandomNormal(64, 6).data(), 2, good, kNan).read_bits, 0);
}

TEST(DistortionHull, IsConvexAndLiesOnThePoints) {
  for (const std::int32_t mean_bits : {4, 8}) {
    const auto cost = MeanLevelCosts(mean_bits);
    const std::vector<double> distortion = RandomDistortions(200, 77);
    const DistortionHull hull(distortion, mean_bits);
    ASSERT_EQ(hull.head_dim(), 200);
    for (std::size_t j = 0; j < 200; ++j) {
      std::size_t level = 0;
      double slope = kInf;
      EXPECT_EQ(hull.variance()[j], distortion[j]);
      for (const DistortionHull::Step& step : hull.steps(static_cast<std::int32_t>(j))) {
        ASSERT_GT(step.level, level);
        EXPECT_EQ(step.cost, cost[step.level] - cost[level]);
        const double gain = distortion[level * 200 + j] - distortion[step.level * 200u + j];
        EXPECT_GT(gain, 0);
        EXPECT_EQ(step.gain, static_cast<float>(gain));
        EXPECT_LE(gain / step.cost, slope);
        // No point lies below the hull's edge.
        for (std::size_t u = level; u < kLevels; ++u) {
          const double edge =
              distortion[level * 200 + j] - gain / step.cost * (cost[u] - cost[level]);
          EXPECT_GE(distortion[u * 200 + j], edge - 1e-12 * std::fabs(distortion[j]));
        }
        slope = gain / step.cost;
        level = step.level;
      }
      for (std::size_t u = level; u < kLevels; ++u) {
        EXPECT_GE(distortion[u * 200 + j], distortion[level * 200 + j]);
      }
    }
  }
}

TEST(MeanLevelCosts, AreReadBits) {
  EXPECT_EQ(MeanLevelCosts(4),
            (std::array<double, kLevels>{0, 0.0625, 1.0625, 2.0625, 3.0625, 4.0625}));
  EXPECT_EQ(MeanLevelCosts(8), (std::array<double, kLevels>{0, 0.125, 1.125, 2.125, 3.125, 4.125}));
}

}  // namespace
}  // namespace fathom
