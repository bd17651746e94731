// SPDX-License-Identifier: MIT
// Bits at equal error, on tables made by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fathom/error.h"
#include "fathom/eval.h"

namespace fathom {
namespace {

ErrorRow Row(const std::string& spec, double bits, double error, std::int64_t k = 128) {
  ErrorRow row;
  row.method = spec;
  row.spec = spec;
  row.k = k;
  row.read_bits = bits;
  row.mean = error;
  return row;
}

// A curve at 20, 30 and 40 read bits.
std::vector<ErrorRow> Curve(double at20, double at30, double at40) {
  return {Row("fathom:bits=20", 20, at20), Row("fathom:bits=30", 30, at30),
          Row("fathom:bits=40", 40, at40)};
}

EqualErrorBits Only(std::vector<ErrorRow> rows, double reference_error) {
  rows.push_back(Row("sparq:r=16", 68, reference_error));
  const auto found = FindEqualErrorBits(rows);
  EXPECT_EQ(found.size(), 1U);
  return found.empty() ? EqualErrorBits{} : found[0];
}

TEST(EqualError, InterpolatesTheLogarithm) {
  // From .4 at 20 to .1 at 30: .2 is half way in the logarithm.
  const auto match = Only(Curve(.4, .1, .05), .2);
  EXPECT_EQ(match.reference, "sparq:r=16");
  EXPECT_EQ(match.curve, "fathom");
  EXPECT_EQ(match.k, 128);
  EXPECT_EQ(match.reference_bits, 68);
  EXPECT_EQ(match.reference_error, .2);
  ASSERT_TRUE(match.bits.has_value());
  EXPECT_NEAR(*match.bits, 25, 1e-9);
  EXPECT_FALSE(match.below.has_value());
}

TEST(EqualError, APointOfTheCurveIsReachedExactly) {
  for (const auto& [error, bits] : {std::pair{.4, 20.}, {.1, 30.}, {.05, 40.}}) {
    const auto match = Only(Curve(.4, .1, .05), error);
    ASSERT_TRUE(match.bits.has_value());
    EXPECT_EQ(*match.bits, bits);
    EXPECT_FALSE(match.below.has_value());
  }
}

TEST(EqualError, BelowAtItsFewestBits) {
  const auto match = Only(Curve(.4, .1, .05), .5);
  EXPECT_FALSE(match.bits.has_value());
  ASSERT_TRUE(match.below.has_value());
  EXPECT_EQ(*match.below, 20);
}

TEST(EqualError, NeverReached) {
  const auto match = Only(Curve(.4, .1, .05), .04);
  EXPECT_FALSE(match.bits.has_value());
  EXPECT_FALSE(match.below.has_value());
}

TEST(EqualError, TheFirstOfSeveralCrossingsCounts) {
  // Falls below .2, rises above it, falls again; given out of order.
  auto rows = Curve(.4, .1, .4);
  rows.push_back(Row("fathom:bits=50", 50, .1));
  std::swap(rows[0], rows[3]);
  const auto match = Only(rows, .2);
  ASSERT_TRUE(match.bits.has_value());
  EXPECT_NEAR(*match.bits, 25, 1e-9);
}

TEST(EqualError, ARisingCurveThatStartsBelow) {
  const auto match = Only(Curve(.1, .4, .5), .2);
  ASSERT_TRUE(match.below.has_value());
  EXPECT_EQ(*match.below, 20);
}

TEST(EqualError, UnusableErrorsNeverMatch) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {0., nan, inf, -1.}) {
    // A bad point is left out: the crossing lies between 20 and 40, at 30 in the logarithm.
    const auto match = Only(Curve(.4, bad, .1), .2);
    ASSERT_TRUE(match.bits.has_value()) << bad;
    EXPECT_NEAR(*match.bits, 30, 1e-9) << bad;
    // At the end it reaches nothing.
    EXPECT_FALSE(Only(Curve(.4, .3, bad), .2).bits.has_value()) << bad;
    // One good point is no curve.
    auto rows = Curve(.4, bad, bad);
    rows.push_back(Row("quest", 100, .2));
    EXPECT_TRUE(FindEqualErrorBits(rows).empty()) << bad;
    // A bad reference has no row.
    rows = Curve(.4, .2, .1);
    rows.push_back(Row("quest", 100, bad));
    EXPECT_TRUE(FindEqualErrorBits(rows).empty()) << bad;
  }
}

TEST(EqualError, DenseStepsAreNoPoints) {
  auto rows = Curve(.4, .2, .1);
  rows[2].read_bits = 0;
  EXPECT_FALSE(Only(rows, .15).bits.has_value());
}

TEST(EqualError, CurvesAreGroupedByAllOtherOptions) {
  std::vector<ErrorRow> rows;
  const auto add = [&](const std::string& given, const std::string& canonical, double bits,
                       double error) {
    rows.push_back(Row(canonical, bits, error));
    rows.back().method = given;
  };
  add("fathom:bits=20", "fathom:bits=20,residual=mean,k=512", 20, .1);
  add("fathom:bits=20,residual=off", "fathom:bits=20,residual=off,k=512", 20, .4);
  add("loki", "loki:r=32,k=512", 136, .2);
  add("fathom:bits=30", "fathom:bits=30,residual=mean,k=512", 30, .05);
  add("fathom:bits=30,residual=off", "fathom:bits=30,residual=off,k=512", 30, .1);
  add("fathom:preset=paper,budget=48", "fathom:preset=paper,budget=48,k=512", 56, .1);  // alone
  add("exact", "exact:k=512", 2048, .05);  // no fixed-depth scan
  add("double-sparsity", "double-sparsity:c=32,k=512", 136, .3);
  add("loki:r=32", "loki:r=32,k=512", 136, .2);                // the same scan again
  add("fathom", "fathom:bits=20,residual=off,k=512", 20, .9);  // the same point again
  const auto found = FindEqualErrorBits(rows);
  ASSERT_EQ(found.size(), 4U);
  EXPECT_EQ(found[0].reference, "loki");
  EXPECT_EQ(found[0].curve, "fathom");
  EXPECT_EQ(found[0].curve_spec, "fathom:residual=mean");
  EXPECT_EQ(found[0].below, 20);
  EXPECT_EQ(found[1].reference, "loki");
  EXPECT_EQ(found[1].curve, "fathom:residual=off");
  EXPECT_EQ(found[1].curve_spec, "fathom:residual=off");
  ASSERT_TRUE(found[1].bits.has_value());
  EXPECT_NEAR(*found[1].bits, 25, 1e-9);
  EXPECT_EQ(found[2].reference, "double-sparsity");
  EXPECT_EQ(found[3].reference, "double-sparsity");
}

TEST(EqualError, EveryKHasItsOwnTable) {
  std::vector<ErrorRow> rows = {Row("fathom:bits=20", 20, .4, 512), Row("thumbnail", 288, .2, 512),
                                Row("fathom:bits=30", 30, .1, 512), Row("fathom:bits=20", 20, .8),
                                Row("fathom:bits=30", 30, .2),      Row("thumbnail", 288, .4),
                                Row("landmark", 256, .4, 2048)};
  const auto found = FindEqualErrorBits(rows);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].k, 512);
  EXPECT_EQ(found[0].reference_error, .2);
  EXPECT_EQ(found[1].k, 128);
  EXPECT_EQ(found[1].reference_error, .4);
  for (const auto& match : found) {
    ASSERT_TRUE(match.bits.has_value());
    EXPECT_NEAR(*match.bits, 25, 1e-9);
  }
}

TEST(EqualError, EveryFixedDepthScanIsAReference) {
  for (const char* name :
       {"double-sparsity", "full4", "landmark", "loki", "quest", "sparq", "thumbnail:rule=ffd"}) {
    auto rows = Curve(.4, .2, .1);
    rows.push_back(Row(name, 136, .3));
    EXPECT_EQ(FindEqualErrorBits(rows).size(), 1U) << name;
  }
  for (const char* name : {"exact", "dense", "random", "streaming", "fathom:bits=35"}) {
    auto rows = Curve(.4, .2, .1);
    rows.push_back(Row(name, 136, .3));
    EXPECT_TRUE(FindEqualErrorBits(rows).empty()) << name;
  }
}

TEST(EqualError, NothingOfNothing) { EXPECT_TRUE(FindEqualErrorBits({}).empty()); }

}  // namespace
}  // namespace fathom
