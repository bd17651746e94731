// SPDX-License-Identifier: MIT
// Plans under other costs and weights, and plans at a multiplier.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "fathom/plan.h"
#include "support/plan_reference.h"
#include "support/random_data.h"

namespace fathom {
namespace {

using test::Cost;
using test::Exhaustive;
using test::GreedyPath;
using test::LevelCosts;
using test::Predicted;
using test::Random;
using test::RandomDistortions;
using test::Weights;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::array<PlanWeights, 3> kAllWeights = {PlanWeights::kPerHead, PlanWeights::kSum,
                                                    PlanWeights::kSpread};

std::vector<double> RandomVariances(std::size_t dim, std::uint64_t seed) {
  Random random(seed);
  std::vector<double> variance(dim);
  std::ranges::generate(variance, [&] { return std::exp2(12.0 * random.Uniform() - 8.0); });
  return variance;
}

// Distortions as the store with these costs would have them.
std::vector<double> DistortionsFor(const LevelCosts& cost, std::size_t dim, std::uint64_t seed) {
  if (cost[1] > 0) return RandomDistortions(dim, seed);
  return PublishedDistortions(RandomVariances(dim, seed));
}

std::vector<float> Queries(std::size_t n, std::uint64_t seed) {
  return test::RandomNormal(static_cast<std::int64_t>(n), seed);
}

TEST(PaperLevelCosts, AreReadBits) {
  EXPECT_EQ(PaperLevelCosts(), (LevelCosts{0, 0, 1.25, 2.25, 3.25, 4.25}));
}

TEST(PublishedDistortions, FallByFourPerPlane) {
  const std::vector<double> variance = {64.0, 3.0};
  EXPECT_EQ(
      PublishedDistortions(variance),
      (std::vector<double>{64, 3, 64, 3, 16, 0.75, 4, 3.0 / 16, 1, 3.0 / 64, 0.25, 3.0 / 256}));
}

TEST(DistortionHull, NeverTakesFreeOrInfiniteLevels) {
  // Level 1 is free and better, level 3 has no distortion, level 5 no cost.
  const std::vector<double> distortion = {16, 8, 4, kInf, 0.5, 0.25};
  const DistortionHull hull(distortion, LevelCosts{0, 0, 1, 2, 3, kInf});
  ASSERT_EQ(hull.steps(0).size(), 2U);
  EXPECT_EQ(hull.steps(0)[0].level, 2);
  EXPECT_EQ(hull.step_slopes()[0], 12.0);
  EXPECT_EQ(hull.steps(0)[1].level, 4);
  EXPECT_EQ(hull.step_slopes()[1], 1.75);
  // Of levels with one cost the best is taken, and nothing after it for nothing.
  const DistortionHull equal(distortion, LevelCosts{0, 1, 1, 1, 1, 1});
  ASSERT_EQ(equal.steps(0).size(), 1U);
  EXPECT_EQ(equal.steps(0)[0].level, 5);
  EXPECT_TRUE(DistortionHull(distortion, LevelCosts{}).steps(0).empty());
}

TEST(DistortionHull, OfMeanBitsHasTheMeanLevelCosts) {
  const std::vector<double> distortion = RandomDistortions(40, 1);
  const DistortionHull a(distortion, 8), b(distortion, MeanLevelCosts(8));
  EXPECT_TRUE(std::ranges::equal(a.step_costs(), b.step_costs()));
  EXPECT_TRUE(std::ranges::equal(a.step_slopes(), b.step_slopes()));
}

TEST(PublishedPlan, EqualsTheGreedyPlanOfTheMeasuredOne) {
  const LevelCosts cost = PaperLevelCosts();
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::size_t dim = seed % 2 == 0 ? 64 : 13;
    const auto group = static_cast<std::int32_t>(1 + seed % 4);
    const std::vector<double> distortion = DistortionsFor(cost, dim, seed);
    const DistortionHull hull(distortion, cost);
    const std::vector<float> q = Queries(dim * static_cast<std::size_t>(group), seed + 90);
    for (const PlanWeights weights : kAllWeights) {
      const std::vector<double> w = Weights(q, dim, distortion, weights);
      for (const double bits : {0.0, 1.0, 1.25, 9.0, 28.0, 57.3, 1e6}) {
        const MeasuredPlan plan = PlanMeasured(q.data(), group, hull, bits, weights);
        ASSERT_EQ(plan.level, GreedyPath(w, distortion, cost, bits).back()) << seed << " " << bits;
        EXPECT_EQ(plan.read_bits, Cost(plan.level, cost));
        EXPECT_EQ(std::ranges::count(plan.level, 1), 0) << "there is no mean to read";
      }
    }
  }
}

// The claim of the header: PlanPaper is the plan at multiplier 1.5 * 2^theta where a plane costs 1.
TEST(PublishedPlan, IsThePlanAtAMultiplier) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const std::vector<double> variance = RandomVariances(64, seed);
    const DistortionHull hull(PublishedDistortions(variance), LevelCosts{0, 0, 1, 2, 3, 4});
    const std::vector<float> q = Queries(128, seed + 90);
    for (const double budget : {4.0, 24.0, 48.0, 130.0, 220.0}) {
      const PaperPlan paper = PlanPaper(q.data(), 2, variance, budget);
      std::vector<std::uint8_t> level;
      for (const std::uint8_t t : paper.depth) {
        level.push_back(t > 0 ? static_cast<std::uint8_t>(t + 1) : std::uint8_t{0});
      }
      const MeasuredPlan plan =
          PlanAtMultiplier(q.data(), 2, hull, 1.5 * std::exp2(paper.theta), PlanWeights::kSum);
      EXPECT_EQ(plan.level, level) << seed << ", budget " << budget;
    }
  }
}

TEST(PlanAtMultiplier, IsTheGreedyPlanBetweenTwoSteps) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const std::size_t dim = 24;
    const LevelCosts cost = seed % 2 == 0 ? MeanLevelCosts(4) : PaperLevelCosts();
    const std::vector<double> distortion = DistortionsFor(cost, dim, seed + 20);
    const DistortionHull hull(distortion, cost);
    const std::vector<float> q = Queries(dim * 3, seed + 30);
    for (const PlanWeights weights : kAllWeights) {
      const std::vector<double> w = Weights(q, dim, distortion, weights);
      std::vector<double> rates = {0.0};
      for (std::size_t i = 0; i < hull.step_slopes().size(); ++i) {
        if (hull.step_slopes()[i] > 0) rates.push_back(w[i % dim] * hull.step_slopes()[i]);
      }
      std::ranges::sort(rates, std::greater<>());
      const auto path = GreedyPath(w, distortion, cost, kInf);
      ASSERT_EQ(path.size(), rates.size());
      for (std::size_t n = 0; n + 1 < path.size(); ++n) {
        const double above = n > 0 ? rates[n - 1] : 2 * rates[n];
        const MeasuredPlan plan =
            PlanAtMultiplier(q.data(), 3, hull, (above + rates[n]) / 2, weights);
        ASSERT_EQ(plan.level, path[n]) << seed << ", step " << n;
        ASSERT_EQ(plan.read_bits, Cost(path[n], cost));
        ASSERT_EQ(plan.level, PlanMeasured(q.data(), 3, hull, plan.read_bits, weights).level);
      }
      EXPECT_EQ(PlanAtMultiplier(q.data(), 3, hull, 0.0, weights).level, path.back());
    }
  }
}

TEST(PlanAtMultiplier, IsOptimalAtItsCost) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const std::size_t dim = 4 + seed % 2;
    const LevelCosts cost = seed % 2 == 0 ? MeanLevelCosts(4) : PaperLevelCosts();
    const std::vector<double> distortion = DistortionsFor(cost, dim, seed);
    const DistortionHull hull(distortion, cost);
    const std::vector<float> q = Queries(dim * 2, seed + 50);
    for (const PlanWeights weights : kAllWeights) {
      const std::vector<double> w = Weights(q, dim, distortion, weights);
      double last = -1;
      int plans = 0;
      for (int eighth = 80; eighth > -160; --eighth) {
        const double multiplier = std::exp2(eighth / 8.0);
        const MeasuredPlan plan = PlanAtMultiplier(q.data(), 2, hull, multiplier, weights);
        ASSERT_GE(plan.read_bits, last);
        if (plan.read_bits == last) continue;
        last = plan.read_bits;
        ++plans;
        const double best = Exhaustive(w, distortion, cost, plan.read_bits);
        ASSERT_NEAR(Predicted(plan.level, w, distortion), best, 1e-12 * best) << seed;
      }
      EXPECT_GE(plans, 8);
    }
  }
}

TEST(PlanAtMultiplier, SurvivesNanAndZeros) {
  const std::vector<double> distortion = RandomDistortions(32, 5);
  const DistortionHull hull(distortion, 4);
  const std::vector<float> healthy = Queries(32, 6);
  for (const PlanWeights weights : kAllWeights) {
    const MeasuredPlan alone = PlanAtMultiplier(healthy.data(), 1, hull, 0.01, weights);
    EXPECT_GT(alone.read_bits, 1.0);
    for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
      std::vector<float> q = healthy;
      q.insert(q.end(), healthy.begin(), healthy.end());
      q[32 + 5] = bad;
      EXPECT_EQ(PlanAtMultiplier(q.data(), 2, hull, 0.01, weights).level, alone.level)
          << "a damaged head counts nothing";
      EXPECT_EQ(PlanMeasured(q.data(), 2, hull, 28, weights).level,
                PlanMeasured(healthy.data(), 1, hull, 28, weights).level);
    }
    const std::vector<float> zero(32);
    EXPECT_EQ(PlanAtMultiplier(zero.data(), 1, hull, 0.0, weights).read_bits, 0);
    EXPECT_EQ(PlanAtMultiplier(healthy.data(), 1, hull, kNan, weights).read_bits, 0);
    EXPECT_EQ(PlanAtMultiplier(healthy.data(), 1, hull, kInf, weights).read_bits, 0);
  }
}

// Pairs of several layers: hulls of different heads and sizes, queries of different strength.
struct Pairs {
  std::vector<DistortionHull> hulls;
  std::vector<std::vector<float>> q;  // [3][D] each

  explicit Pairs(const LevelCosts& cost) {
    for (std::uint64_t i = 0; i < 12; ++i) {
      const std::size_t dim = i % 3 == 0 ? 64 : 48;
      hulls.emplace_back(DistortionsFor(cost, dim, i), cost);
      q.push_back(test::RandomNormal(static_cast<std::int64_t>(dim) * 3, i + 70,
                                     std::exp2(static_cast<double>(i % 5))));
    }
  }
  double MeanBits(double multiplier, PlanWeights weights) const {
    double sum = 0;
    for (std::size_t i = 0; i < q.size(); ++i) {
      sum += PlanAtMultiplier(q[i].data(), 3, hulls[i], multiplier, weights).read_bits;
    }
    return sum / static_cast<double>(q.size());
  }
};

TEST(MultiplierFit, MeetsTheTargetWithinOneStep) {
  for (const LevelCosts& cost : {MeanLevelCosts(4), PaperLevelCosts()}) {
    const Pairs pairs(cost);
    for (const PlanWeights weights : kAllWeights) {
      MultiplierFit fit(weights), backward(weights);
      for (std::size_t i = 0; i < pairs.q.size(); ++i) {
        fit.Add(pairs.q[i].data(), 3, pairs.hulls[i]);
        const std::size_t j = pairs.q.size() - 1 - i;
        backward.Add(pairs.q[j].data(), 3, pairs.hulls[j]);
      }
      EXPECT_EQ(fit.count(), 12);
      double last = kInf;
      for (const double bits : {0.01, 0.3, 5.0, 14.0, 19.37, 28.0, 100.0, 190.0}) {
        const double multiplier = fit.Fit(bits);
        ASSERT_GT(multiplier, 0);
        ASSERT_LT(multiplier, last);
        last = multiplier;
        EXPECT_EQ(fit.Fit(bits), multiplier);
        EXPECT_EQ(backward.Fit(bits), multiplier);
        const double mean = pairs.MeanBits(multiplier, weights);
        EXPECT_LE(mean, bits);
        EXPECT_GT(mean, bits - 4.25 / 12) << "one step of one pair";
        // It is the least one: a hair below, one more step is taken and the mean is exceeded.
        EXPECT_GT(pairs.MeanBits(multiplier * (1 - 1e-12), weights), bits);
      }
    }
  }
}

TEST(MultiplierFit, HandlesTheEnds) {
  const Pairs pairs(MeanLevelCosts(4));
  MultiplierFit fit;
  EXPECT_EQ(fit.Fit(28), 0.0) << "nothing added";
  const std::vector<float> zero(3 * 64), bad(3 * 64, NAN);
  fit.Add(zero.data(), 3, pairs.hulls[0]);
  fit.Add(bad.data(), 3, pairs.hulls[0]);
  EXPECT_EQ(fit.Fit(28), 0.0) << "nothing to read";
  fit.Add(pairs.q[0].data(), 3, pairs.hulls[0]);
  EXPECT_EQ(fit.count(), 3);
  for (const double bits : {0.0, -1.0, kNan}) EXPECT_EQ(fit.Fit(bits), kInf);
  EXPECT_EQ(fit.Fit(1e9), 0.0);
  EXPECT_EQ(fit.Fit(kInf), 0.0);
  // The two empty pairs count in the mean, so the third may read three times the target.
  const double multiplier = fit.Fit(20);
  const double read = PlanAtMultiplier(pairs.q[0].data(), 3, pairs.hulls[0], multiplier).read_bits;
  EXPECT_LE(read, 60);
  EXPECT_GT(read, 60 - 4.0625);
}

TEST(MultiplierFit, LeavesOutTiesTogether) {
  // 33 equal channels: all first steps have one rate, so that either all or none are taken.
  std::vector<double> distortion;
  for (const double d : {8.0, 4.0, 2.0, 1.0, 0.5, 0.25}) {
    distortion.insert(distortion.end(), 33, d);
  }
  const DistortionHull hull(distortion, 4);
  const std::vector<float> q(33, 1.0f);
  MultiplierFit fit;
  fit.Add(q.data(), 1, hull);
  const double all = 33 * 0.0625;
  EXPECT_EQ(PlanAtMultiplier(q.data(), 1, hull, fit.Fit(all - 0.01)).read_bits, 0);
  EXPECT_EQ(PlanAtMultiplier(q.data(), 1, hull, fit.Fit(all)).read_bits, all);
  EXPECT_EQ(PlanAtMultiplier(q.data(), 1, hull, fit.Fit(all + 1)).read_bits, all);
}

}  // namespace
}  // namespace fathom
