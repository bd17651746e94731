// SPDX-License-Identifier: MIT
// Calibrations of a synthetic capture: the same keys give the same results with and without, other
// keys do not, chosen layers are those of the model, and budgets follow the published rule.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "fathom/calibrate.h"
#include "fathom/error.h"
#include "fathom/eval.h"
#include "fathom/fathom.h"
#include "support/calibration_capture.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

void ExpectError(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
    ADD_FAILURE() << "no error where it should say " << parts.front();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << message;
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
    }
  }
}

class CalibrationTest : public testing::Test {
 protected:
  CaptureFile Capture(std::uint64_t seed,
                      const CaptureGeometry& geometry = test::SyntheticGeometry(),
                      bool constant = false) const {
    const std::string path = (dir_.path() / ("c" + std::to_string(seed))).string();
    test::WriteSyntheticCapture(path, seed, geometry, constant);
    return CaptureFile(path);
  }

  static CalibrateOptions Options(std::vector<std::string> methods = {},
                                  std::vector<BudgetRequest> budgets = {}) {
    CalibrateOptions options;
    options.methods = std::move(methods);
    options.budgets = std::move(budgets);
    options.n_threads = 1;
    return options;
  }

  static std::vector<ErrorRow> Errors(const CaptureFile& capture, std::vector<std::string> methods,
                                      std::shared_ptr<const Calibration> calibration,
                                      std::vector<std::int32_t> layers = {}) {
    ErrorOptions options;
    options.methods = std::move(methods);
    options.k = {64};
    options.layers = std::move(layers);
    options.calibration = std::move(calibration);
    options.n_threads = 1;
    return EvaluateError(capture, options).rows;
  }

  test::TempDir dir_;
};

const std::vector<std::string>& Methods() {
  static const std::vector<std::string> kMethods = {
      "fathom",
      "fathom:basis=klt",
      "fathom:basis=balanced,meanbits=8",
      "fathom:weights=center",
      "fathom:plan=published,residual=off",
      "fathom:plan=common",
      "fathom:store=paper",
      "fathom:preset=paper",
      "fathom:preset=paper,basis=balanced",
      "double-sparsity:c=4",
      "loki:r=4",
      "loki:r=4,rule=author",
      "loki:r=4,basis=raw",
      "sparq:r=4,basis=klt",
  };
  return kMethods;
}

TEST_F(CalibrationTest, TheSameKeysGiveTheSameResults) {
  const CaptureFile capture = Capture(1);
  const auto own = Calibrate(capture, Options({"fathom:k=64"})).calibration;
  const auto others = Calibrate(Capture(2), Options()).calibration;
  const auto without = Errors(capture, Methods(), nullptr);
  const auto with = Errors(capture, Methods(), own);
  const auto foreign = Errors(capture, Methods(), others);
  ASSERT_EQ(with.size(), Methods().size());
  for (std::size_t i = 0; i < with.size(); ++i) {
    EXPECT_GT(without[i].mean, 0) << with[i].spec;
    EXPECT_LT(without[i].recall, 1) << with[i].spec;
    // Bit for bit: the same winners, attended alike.
    EXPECT_EQ(with[i].mean, without[i].mean) << with[i].spec;
    EXPECT_EQ(with[i].p99, without[i].p99) << with[i].spec;
    EXPECT_EQ(with[i].recall, without[i].recall) << with[i].spec;
    EXPECT_EQ(with[i].read_bits, without[i].read_bits) << with[i].spec;
    EXPECT_NE(foreign[i].mean, without[i].mean) << with[i].spec;
  }
}

TEST_F(CalibrationTest, HoldsWhatTheCaptureSays) {
  const auto c = Calibrate(Capture(1), Options()).calibration;
  EXPECT_EQ(c->layers, (std::vector<std::int32_t>{1, 3}));
  EXPECT_EQ(c->heads, test::kCaptureHeads);
  EXPECT_EQ(c->n_tokens, test::kCaptureTokens - test::kMeasuredTokens);
  EXPECT_EQ(c->model, "synthetic");
  EXPECT_EQ(c->source, "waves");
  EXPECT_TRUE(c->residual.empty());
  EXPECT_TRUE(c->budgets.empty());
  // Against the definitions, from the keys themselves.
  const std::int64_t width = 32, dim = 16;
  const auto k = test::RandomData(test::DataKind::kSmooth, test::kCaptureTokens, width, 103);
  for (const std::int64_t j : {0, 7, 15}) {
    double mean = 0, square = 0;
    const double n = static_cast<double>(c->n_tokens - kStatsSkip);
    for (std::int64_t t = kStatsSkip; t < c->n_tokens; ++t) {
      mean += k[static_cast<std::size_t>(t * width + dim + j)] / n;
    }
    for (std::int64_t t = kStatsSkip; t < c->n_tokens; ++t) {
      square += std::pow(k[static_cast<std::size_t>(t * width + dim + j)] - mean, 2) / (n - 1);
    }
    const auto channel = static_cast<std::size_t>(j);
    const HeadMoments& moments = c->moments[3];  // layer 3, KV head 1
    EXPECT_NEAR(moments.key_mean[channel], mean, 1e-3 * (1 + std::fabs(mean)));
    EXPECT_NEAR(moments.key_covariance[channel * 17], square, 0.01 * square);
    EXPECT_NEAR(c->head(1, 1, BasisRule::kRaw).stats.variance[channel], square, 0.01 * square);
  }
  const HeadCalibration& head = c->head(1, 1, BasisRule::kKlt);
  for (std::size_t i = 1; i < head.order.size(); ++i) {
    const auto weight = [&](std::int32_t channel) {
      const auto at = static_cast<std::size_t>(channel);
      return head.stats.abs_key[at] * head.stats.abs_query[at];
    };
    EXPECT_GE(weight(head.order[i - 1]), weight(head.order[i]));
  }
}

TEST_F(CalibrationTest, ResidualFactorsComeFromTheFile) {
  const CaptureFile capture = Capture(1);
  const auto fitted = Calibrate(capture, Options({"fathom:k=64", "exact:k=64,residual=block"}));
  const Calibration& c = *fitted.calibration;
  ASSERT_EQ(c.residual.size(), 2U);
  const auto* exact = c.FindResidual("exact:basis=raw,k=64,min=77,dense=0,residual=block");
  const auto plain = Errors(capture, {"exact:residual=block"}, nullptr)[0];
  ASSERT_NE(c.FindResidual(plain.spec), nullptr) << plain.spec;
  ASSERT_EQ(exact, c.FindResidual(plain.spec)) << plain.spec;
  ASSERT_EQ(exact->size(), 8U);
  EXPECT_GT(*std::max_element(exact->begin(), exact->end()), 0.0F);
  EXPECT_EQ(c.FindResidual("exact:basis=raw,k=65,min=0,dense=0,residual=block"), nullptr);

  // Factors of 0 are no residual at all.
  auto zeros = std::make_shared<Calibration>(c);
  for (auto& [key, factors] : zeros->residual) std::ranges::fill(factors, 0.0F);
  const auto off = Errors(capture, {"fathom:residual=off"}, nullptr)[0];
  EXPECT_EQ(Errors(capture, {"fathom"}, zeros)[0].mean, off.mean);
  EXPECT_NE(Errors(capture, {"fathom"}, fitted.calibration)[0].mean, off.mean);
}

TEST(CalibrationKeys, LeaveOutWhatChangesNoStatistics) {
  EXPECT_EQ(CalibrationKey("a:k=1,min=1024,dense=0"), "a:k=1,dense=0");
  EXPECT_EQ(CalibrationKey("a:k=1,min=0"), "a:k=1");
  EXPECT_EQ(CalibrationKey("a:min=0,k=1"), "a:k=1");
  EXPECT_EQ(CalibrationKey("a:min=0"), "a");
  EXPECT_EQ(CalibrationKey("a:minimum=3"), "a:minimum=3");
  EXPECT_EQ(CalibrationKey("a:k=1,min=0,residual=block,values=lazy"), "a:k=1,residual=block");
  EXPECT_EQ(CalibrationKey("a:values=all,min=0"), "a");
}

TEST_F(CalibrationTest, SelectsLayersOfTheModel) {
  const CaptureFile capture = Capture(1);
  const auto all = Calibrate(capture, Options({"fathom:k=64"}, {{"fathom:k=64", 20}})).calibration;
  const auto one = all->Select(std::vector<std::int32_t>{3});
  EXPECT_EQ(one->layers, std::vector<std::int32_t>{3});
  EXPECT_EQ(one->n_tokens, all->n_tokens);
  ASSERT_EQ(one->head_calibrations.size(), 2U * kBasisRules);
  EXPECT_EQ(one->head(0, 1, BasisRule::kKlt).stats.variance,
            all->head(1, 1, BasisRule::kKlt).stats.variance);
  EXPECT_EQ(one->moments[0].key_mean, all->moments[2].key_mean);
  const auto& [key, factors] = *all->residual.begin();
  EXPECT_EQ(one->residual.at(key), std::vector<float>(factors.begin() + 4, factors.end()));
  EXPECT_EQ(one->budgets.begin()->second[0], all->budgets.begin()->second[1]);

  for (const auto& layers : {std::vector<std::int32_t>{3}, std::vector<std::int32_t>{3, 1}}) {
    const auto with = Errors(capture, Methods(), all, layers);
    const auto without = Errors(capture, Methods(), nullptr, layers);
    for (std::size_t i = 0; i < with.size(); ++i) {
      EXPECT_EQ(with[i].layer_mean, without[i].layer_mean) << with[i].spec;
    }
  }
  ExpectError(
      [&] {
        all->Select(std::vector<std::int32_t>{1, 2});
      },
      {"layers 1, 3", "layers 1 to 2"});
}

TEST_F(CalibrationTest, OtherGeometriesAreRefused) {
  const auto c = Calibrate(Capture(1), Options()).calibration;
  ExpectError([&] { c->Check(4, test::kCaptureHeads); }, {"layers 1, 3", "layers 0 to 3", "all"});
  CaptureGeometry other = test::SyntheticGeometry();
  other.heads = {6, 2, 16};
  const CaptureFile wide = Capture(5, other);
  ExpectError([&] { Errors(wide, {"fathom"}, c); }, {"4 heads, 2 KV", "6 heads, 2 KV"});
  other = test::SyntheticGeometry();
  other.layers = {1, 2};
  const CaptureFile shifted = Capture(6, other);
  ExpectError([&] { Errors(shifted, {"fathom"}, c); }, {"layers 1, 3", "layers 1 to 2"});
  EXPECT_GT(Errors(shifted, {"fathom"}, c, {1})[0].mean, 0);

  other.layers = {0, 1};
  const auto whole = Calibrate(Capture(7, other), Options()).calibration;
  whole->Check(2, test::kCaptureHeads);
  ExpectError([&] { whole->Check(3, test::kCaptureHeads); }, {"0 to 1", "0 to 2"});
  ExpectError([&] { whole->Check(2, {4, 2, 32}); }, {"dimension 16", "dimension 32"});
}

TEST(LayerBudgets, FollowTheRuleOnAHandMadeTable) {
  const std::vector<double> candidates = {1, 2, 4};
  const std::vector<std::vector<double>> errors = {{10, 6, 4}, {7, 5, 3.5}, {1, 4.5, 3.4}};
  using Bits = std::vector<double>;
  // Per added bit: layer 0 falls by 3 and again by 3 (6 for 2 bits), layer 1 by 1, layer 2 by .5.
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 1), (Bits{1, 1, 1}));
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 4.0 / 3), (Bits{2, 1, 1}));
  // The step of layer 0 to 4 bits does not fit 5 bits in all; that of layer 1 does.
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 5.0 / 3), (Bits{2, 2, 1}));
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 2), (Bits{4, 1, 1}));
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 7.0 / 3), (Bits{4, 2, 1}));
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 8.0 / 3), (Bits{4, 2, 2}));
  EXPECT_EQ(PlanLayerBudgets(candidates, errors, 4), (Bits{4, 4, 4}));
  // Errors that rise: the mean is reached all the same, where it costs least; ties go to the first.
  EXPECT_EQ(PlanLayerBudgets(Bits{1, 2}, std::vector<Bits>{{1, 1}, {3, 2}}, 1.5), (Bits{1, 2}));
  EXPECT_EQ(PlanLayerBudgets(Bits{1, 2}, std::vector<Bits>{{1, 1}, {3, 2}}, 2), (Bits{2, 2}));
  EXPECT_EQ(PlanLayerBudgets(Bits{1, 2}, std::vector<Bits>{{1, 1}, {0, 0}}, 1.5), (Bits{2, 1}));
  for (const double mean : {0.5, 4.5, static_cast<double>(NAN)}) {
    ExpectError([&] { PlanLayerBudgets(candidates, errors, mean); }, {"1 to 4"});
  }
}

TEST_F(CalibrationTest, BudgetsAreUsedAndMeasured) {
  const CaptureFile capture = Capture(1);
  const std::vector<BudgetRequest> requests = {{"fathom:k=64,residual=off", 26},
                                               {"fathom:preset=paper,k=64,basis=raw", 36}};
  const CalibrateReport report =
      Calibrate(capture, Options({"fathom:k=64,bits=26,budgets=file"},
                                 {{"fathom:k=64", 26}, requests[0], requests[1]}));
  ASSERT_EQ(report.budgets.size(), 3U);
  ASSERT_EQ(report.calibration->budgets.size(), 3U);
  const auto rows = Errors(
      capture,
      {"fathom:residual=off,bits=26,budgets=file",
       "fathom:preset=paper,budget=36,basis=raw,budgets=file",
       "fathom:residual=off,bits=26,plan=measured", "fathom:preset=paper,budget=36,basis=raw"},
      report.calibration);
  for (std::size_t i = 0; i < 2; ++i) {
    const LayerBudgets& budgets = report.budgets[i + 1];
    EXPECT_EQ(budgets.key, CalibrationKey(rows[i].spec));
    EXPECT_EQ(budgets.bits, report.calibration->budgets.at(budgets.key));
    EXPECT_EQ(budgets.mean, requests[i].mean);
    const double total = budgets.bits[0] + budgets.bits[1];
    EXPECT_LE(total, 2 * requests[i].mean) << budgets.key;
    EXPECT_GT(total, 2 * requests[i].mean - 16) << budgets.key;  // no further step fits
    EXPECT_EQ(rows[i].layer_mean, budgets.error) << budgets.key;
    EXPECT_EQ(rows[i + 2].layer_mean, budgets.flat_error) << budgets.key;
  }
  ExpectError([&] { Errors(capture, {"fathom:bits=20,budgets=file"}, report.calibration); },
              {"budget per layer", report.budgets[0].key, report.budgets[2].key, "--budgets"});
  ExpectError([&] { Errors(capture, {"fathom:bits=20,budgets=file"}, nullptr); },
              {"no statistics file", "--stats-file"});
}

TEST_F(CalibrationTest, RequestsThatCannotBeAreRefused) {
  const CaptureFile capture = Capture(1);
  const auto refused = [&](std::vector<std::string> methods, std::vector<BudgetRequest> budgets,
                           const std::vector<std::string>& parts) {
    ExpectError([&] { Calibrate(capture, Options(std::move(methods), std::move(budgets))); },
                parts);
  };
  refused({"fathm"}, {}, {"fathm"});
  refused({"dense"}, {}, {"dense", "no residual"});
  refused({"fathom:residual=off"}, {}, {"residual=off", "no residual"});
  refused({"fathom:k=380"}, {}, {"k=380", "statistics' queries", "388", "smaller k"});
  refused({"fathom"}, {}, {"k=512"});
  refused({"fathom:k=64,budgets=file"}, {}, {"budgets=file", "no budgets"});
  refused({}, {{"fathom:k=64", 8}}, {"8 bits", "12 to 64"});
  refused({}, {{"fathom:preset=paper,k=64", 129}}, {"129 bits", "24 to 128"});
  refused({}, {{"fathom:k=64,bits=3", 28}}, {"bits=", "after @"});
  refused({}, {{"exact:k=64", 28}}, {"exact", "only fathom"});
  refused({}, {{"fathom:k=64,plan=common", 28}}, {"plan=common"});
  refused({}, {{"fathom:k=64,dense=1", 28}}, {"dense="});
  refused({}, {{"fathom:k=390", 28}}, {"k=390", "measured queries", "392"});
}

TEST_F(CalibrationTest, CapturesThatCannotServeAreRefused) {
  const CaptureFile fewest = Capture(1, test::SyntheticGeometry(80 + test::kMeasuredTokens));
  EXPECT_EQ(Calibrate(fewest, Options()).calibration->n_tokens, 80);
  const CaptureFile few = Capture(2, test::SyntheticGeometry(79 + test::kMeasuredTokens));
  ExpectError([&] { Calibrate(few, Options()); }, {"has 79 tokens", "need 80", "(-c)"});
  const CaptureFile constant = Capture(3, test::SyntheticGeometry(), true);
  ExpectError([&] { Calibrate(constant, Options()); },
              {"layer 3, KV head 1", "balanced", "not positive definite", "more varied text"});
}

TEST_F(CalibrationTest, ProgressCountsAndStops) {
  const CaptureFile capture = Capture(1);
  std::vector<std::string> stages;
  Calibrate(capture, Options({"fathom:k=64"}, {{"fathom:k=64", 28}}),
            [&](std::string_view stage, std::int64_t done, std::int64_t total) {
              if (done == total) stages.emplace_back(stage);
              return true;
            });
  EXPECT_EQ(stages, (std::vector<std::string>{"statistics", "budgets of fathom:k=64", "residual"}));
  for (const std::string stop : {"statistics", "budgets of fathom:k=64"}) {
    try {
      Calibrate(capture, Options({}, {{"fathom:k=64", 28}}),
                [&](std::string_view stage, std::int64_t, std::int64_t) { return stage != stop; });
      ADD_FAILURE() << "not stopped at " << stop;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCancelled) << error.what();
    }
  }
}

}  // namespace
}  // namespace fathom
