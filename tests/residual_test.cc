// SPDX-License-Identifier: MIT
// The residual mass: what tokens that were not fetched add to attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/half.h"
#include "fathom/fathom.h"
#include "method/residual.h"
#include "plan/sums.h"
#include "support/compare.h"
#include "support/layered_session.h"

namespace fathom {
namespace {

using test::LayeredSession;
using test::Near;
using test::Size;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// --- exact estimates give dense attention

// Values that are alike within each block, sinks included.
void ShareValuesInBlocks(LayeredSession* session) {
  const std::int32_t dim = session->heads.head_dim;
  for (std::int64_t t = 0; t < session->n_tokens; ++t) {
    for (std::int32_t kv = 0; kv < session->heads.n_kv_heads; ++kv) {
      for (std::int32_t d = 0; d < dim; ++d) {
        session->Value(0, t, kv, d) = session->Value(0, t / kBlockTokens * kBlockTokens, kv, d);
      }
    }
  }
}

TEST(Residual, OfExactScoresAndBlockValuesIsDense) {
  for (const HeadGeometry heads :
       {HeadGeometry{2, 2, 64}, {3, 1, 64}, {8, 2, 80}, {6, 1, 128}, {7, 1, 64}, {8, 1, 256}}) {
    for (const std::int64_t n : {640, 1000}) {
      LayeredSession session(1, heads, n, 1);
      ShareValuesInBlocks(&session);
      session.Write();
      const std::string spec = "exact:residual=block,k=60,min=0";
      const Calibration calibration = session.WithFactor(spec, 1);
      const auto method = session.Make(spec, &calibration);
      const auto plain = session.Make("exact:residual=off,k=60,min=0");
      const auto q = session.Query(2);
      const auto dense = test::DenseAttention(session.rows, 0, n, q);
      EXPECT_TRUE(Near(session.Attend(*method, q), dense, 1e-4)) << heads.head_dim << " n " << n;
      EXPECT_FALSE(Near(session.Attend(*plain, q), dense, 0.1)) << "the rest has to matter";
    }
  }
}

TEST(Residual, OfExactScoresAndOneValueIsDense) {
  LayeredSession session(1, {6, 2, 64}, 900, 3);
  for (std::int64_t t = kSinks; t < 900; ++t) {  // sinks may differ: they are always attended
    for (std::int32_t d = 0; d < 64; ++d) {
      for (std::int32_t kv = 0; kv < 2; ++kv) {
        session.Value(0, t, kv, d) = session.Value(0, kSinks, kv, d);
      }
    }
  }
  session.Write();
  const std::string spec = "exact:residual=mean,k=60,min=0";
  const Calibration calibration = session.WithFactor(spec, 1);
  // Queries that look at the sinks: the values of the rest must not drown theirs.
  auto q = session.Query(4);
  for (std::size_t h = 0; h < 6; ++h) {
    for (std::size_t d = 0; d < 64; ++d) {
      q[h * 64 + d] = 3 * session.Key(0, 1, h < 3 ? 0 : 1, static_cast<std::int32_t>(d));
    }
  }
  const auto dense = test::DenseAttention(session.rows, 0, 900, q);
  EXPECT_TRUE(Near(session.Attend(*session.Make(spec, &calibration), q), dense, 1e-4));
}

// --- the mass

TEST(SumInLanes, IsTheSumOfAnyNumberOfBlocks) {
  const auto sum_of = [](const std::vector<float>& x) {
    return SumInLanes(x.size(), [&](std::size_t i) { return double{x[i]}; });
  };
  std::vector<float> mass;
  double sum = 0;
  for (int n = 0; n <= 17; ++n) {
    EXPECT_EQ(sum_of(mass), sum) << n;  // powers of two and their sums are exact
    mass.push_back(std::exp2(static_cast<float>(n % 5) - 20));
    sum += mass.back();
  }
  mass[9] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(sum_of(mass)));
}

// --- the factor

// Attention whose rest has the value `value` and the mass `mass`, and which needs the factor.
ResidualSample SampleFor(double factor, double mass, std::vector<float> out,
                         std::vector<float> value) {
  ResidualSample sample = {std::move(out), {}, mass, {}};
  for (std::size_t d = 0; d < sample.out.size(); ++d) {
    sample.rest.push_back(static_cast<float>(mass * value[d]));
    sample.dense.push_back(
        static_cast<float>((sample.out[d] + factor * mass * value[d]) / (1 + factor * mass)));
  }
  return sample;
}

TEST(ResidualFactor, FindsTheBest) {
  for (const double factor : {0.0, 0.05, 0.35, 1.0, 1.2}) {
    const std::vector<ResidualSample> samples = {
        SampleFor(factor, 0.5, {1, 0, -1}, {0, 2, 1}),
        SampleFor(factor, 2.0, {0, 3, -1}, {1, 1, 1}),
    };
    EXPECT_NEAR(FitResidualFactor(samples), factor, 1e-6);
  }
  const ResidualSample far = SampleFor(7, 0.5, {1, 0}, {0, 1});
  EXPECT_NEAR(FitResidualFactor(std::vector{far}), 1.2, 1e-6);
  // A rest that leads away from dense attention is left out.
  const ResidualSample away = SampleFor(-0.2, 0.5, {1, 0}, {0, 1});
  EXPECT_EQ(FitResidualFactor(std::vector{away}), 0);
}

TEST(ResidualFactor, WithoutSamplesIsOff) {
  EXPECT_EQ(FitResidualFactor({}), 0);
  // Dense attention of zero says nothing of relative errors.
  EXPECT_EQ(FitResidualFactor(std::vector{ResidualSample{{1, 1}, {1, 1}, 1, {0, 0}}}), 0);
}

// Decode leaves such an estimate out; the fit does the same.
TEST(ResidualFactor, EstimatesThatAreNoNumbersDoNotCount) {
  const ResidualSample good = SampleFor(0.6, 0.5, {1, 0}, {0, 1});
  for (const float bad : {kNan, kInf, -kInf}) {
    ResidualSample mass = good, rest = good;
    mass.mass = bad;
    rest.rest[1] = bad;
    EXPECT_NEAR(FitResidualFactor(std::vector{good, mass, rest}), 0.6, 1e-6) << bad;
    EXPECT_NEAR(FitResidualFactor(std::vector{rest, mass, good}), 0.6, 1e-6) << bad;
    EXPECT_EQ(FitResidualFactor(std::vector{mass, rest}), 0) << bad;
  }
  ResidualSample dense = good;
  dense.dense = {kNan, 1};  // nothing to compare with
  EXPECT_NEAR(FitResidualFactor(std::vector{dense, good}), 0.6, 1e-6);
}

// --- mean values

std::vector<double> DirectMean(const std::vector<Half>& rows, std::size_t dim, std::int64_t first,
                               std::int64_t end) {
  std::vector<double> mean(dim);
  for (std::int64_t t = first; t < end; ++t) {
    for (std::size_t d = 0; d < dim; ++d) {
      mean[d] += HalfToFloat(rows[Size(t) * 2 * dim + dim + d]) / static_cast<double>(end - first);
    }
  }
  return mean;
}

void ExpectMeans(const ValueMeans& means, ResidualRule rule, const std::vector<Half>& rows,
                 std::int64_t skip) {
  constexpr std::size_t kDim = 48;
  const std::vector<double> all = DirectMean(rows, kDim, skip, means.n_tokens());
  EXPECT_TRUE(Near(means.mean(), all, 1e-6));
  if (rule != ResidualRule::kBlock) {
    EXPECT_EQ(means.block_means(), nullptr);
    return;
  }
  for (std::int64_t b = 0; b < means.n_tokens() / kBlockTokens; ++b) {
    const std::int64_t first = b * kBlockTokens + (b == 0 ? skip : 0);
    std::vector<float> mean(kDim);
    ConvertHalfToFloat(means.block_means() + b * 48, 48, mean.data());
    EXPECT_TRUE(Near(mean, DirectMean(rows, kDim, first, (b + 1) * kBlockTokens), 1e-3));
  }
}

TEST(ValueMeans, AreThoseOfThePrefixForthAndBack) {
  const std::vector<Half> rows = test::RandomRows(test::DataKind::kNormal, 64 * 20, 48, 5);
  for (const ResidualRule rule : {ResidualRule::kMean, ResidualRule::kBlock}) {
    for (const std::int64_t skip : {std::int64_t{0}, std::int64_t{kSinks}}) {
      ValueMeans means(48, rule);
      for (const std::int64_t blocks : {1, 2, 9, 20, 20, 8, 12, 1}) {
        means.MoveTo(rows.data(), blocks * kBlockTokens, skip);
        ASSERT_EQ(means.n_tokens(), blocks * kBlockTokens);
        EXPECT_EQ(means.MemoryBytes(), rule == ResidualRule::kBlock ? blocks * 48 * 2 : 0);
        EXPECT_TRUE(means.is_finite());
        ExpectMeans(means, rule, rows, skip);
        // What was reached on a way does not depend on the way.
        ValueMeans fresh(48, rule);
        fresh.MoveTo(rows.data(), blocks * kBlockTokens, skip);
        EXPECT_TRUE(std::ranges::equal(means.mean(), fresh.mean()));
      }
      means.Clear();
      EXPECT_EQ(means.n_tokens(), 0);
      EXPECT_EQ(means.MemoryBytes(), 0);
      EXPECT_TRUE(std::ranges::all_of(means.mean(), [](float x) { return x == 0; }));
    }
  }
}

TEST(ValueMeans, LeaveSinksOut) {
  std::vector<Half> rows = test::RandomRows(test::DataKind::kNormal, 64 * 3, 48, 6);
  for (std::size_t i = 0; i < std::size_t{kSinks} * 2 * 48; ++i) rows[i] = FloatToHalf(kNan);
  for (const ResidualRule rule : {ResidualRule::kMean, ResidualRule::kBlock}) {
    ValueMeans means(48, rule);
    means.MoveTo(rows.data(), 64 * 3, kSinks);
    ExpectMeans(means, rule, rows, kSinks);
    EXPECT_TRUE(means.is_finite());
  }
}

TEST(ValueMeans, KnowWhenTheyAreNotFinite) {
  std::vector<Half> rows = test::RandomRows(test::DataKind::kNormal, 64 * 3, 48, 6);
  rows[(64 + 7) * 2 * 48 + 48 + 5] = FloatToHalf(kInf);
  ValueMeans means(48, ResidualRule::kMean);
  means.MoveTo(rows.data(), 64, kSinks);
  EXPECT_TRUE(means.is_finite());
  means.MoveTo(rows.data(), 64 * 3, kSinks);
  EXPECT_FALSE(means.is_finite());
  means.MoveTo(rows.data(), 64, kSinks);
  EXPECT_TRUE(means.is_finite());
}

// The residual reads the means of the blocks that have more than a thousandth of some head's mass.
TEST(ValueMeans, AreReadWhereABlockMatters) {
  constexpr std::int64_t kN = 64 * 40;
  LayeredSession session(1, {2, 1, 64}, kN, 50);
  // A thousandth of the blocks' mass is far below 1/40 of it: make the keys of all blocks but five
  // point away from the queries.
  const auto q = session.Query(51);
  for (std::int64_t t = 0; t < kN; ++t) {
    const bool matters = t / kBlockTokens % 8 == 3;
    for (std::int32_t d = 0; d < 64; ++d) {
      const float toward = q[Size(d)] + q[Size(64 + d)];
      session.Key(0, t, 0, d) = (matters ? 1.0F : -2.0F) * toward;
    }
  }
  session.Write();
  const std::string spec = "exact:residual=block,k=60,min=0";
  const Calibration calibration = session.WithFactor(spec, 1);
  const auto method = session.Make(spec, &calibration);
  session.Attend(*method, q);
  EXPECT_EQ(method->counters().value_mean_bytes, 5 * 64 * 2);
  method->ResetCounters();
  EXPECT_EQ(method->counters().value_mean_bytes, 0);
}

// --- the fit on the prefill's queries

const std::vector<std::string> kFitted = {"fathom:bits=20,residual=mean,", "exact:residual=block,",
                                          "thumbnail:planes=1,residual=mean,"};
std::string Without(const std::string& spec) {
  return spec.substr(0, spec.find("residual")) + "residual=off,";
}

TEST(ResidualFit, WithoutQueriesItIsOff) {
  LayeredSession session(1, {4, 2, 64}, 1500, 7);
  session.Write();
  for (const std::string& spec : kFitted) {
    const auto with = session.Make(spec + "k=100,min=0");
    const auto without = session.Make(Without(spec) + "k=100,min=0");
    with->BuildIndex(1500);
    without->BuildIndex(1500);
    const auto q = session.Query(8);
    EXPECT_EQ(session.Attend(*with, q), session.Attend(*without, q)) << spec;
  }
}

// Queries at positions that were dense, or that come after what was indexed, are no samples.
TEST(ResidualFit, LeavesOutQueriesThatDoNotFit) {
  constexpr std::int64_t kBuilt = 1200, kN = 1500;
  LayeredSession few(1, {4, 2, 64}, kN, 9), more(1, {4, 2, 64}, kN, 9), other(1, {4, 2, 64}, kN, 9);
  few.AddRecent({1000, 1100, kBuilt - 1}, 10);
  // Queries that would lead to other factors: `other` has them where they are samples.
  const auto strange = few.Query(11, 4);
  QuerySamples& recent = more.queries[0].recent;
  for (const std::int64_t p : {50, 99, 898}) recent.Add(p, strange.data());  // k = 100, min = 900
  for (std::int64_t i = 0; i < 3; ++i) {
    const std::int64_t position = few.queries[0].recent.positions()[Size(i)];
    recent.Add(position, few.queries[0].recent.query(i));
    other.queries[0].recent.Add(position - 1, strange.data());
    other.queries[0].recent.Add(position, few.queries[0].recent.query(i));
  }
  for (const std::int64_t p : {kBuilt, kBuilt + 100}) recent.Add(p, strange.data());
  const auto q = few.Query(12);
  const auto attend = [&](LayeredSession& session, const std::string& spec) {
    session.Write();
    const auto method = session.Make(spec + "k=100,min=900");
    method->BuildIndex(kBuilt);
    return session.Attend(*method, q);
  };
  for (const std::string& spec : kFitted) {
    EXPECT_EQ(attend(more, spec), attend(few, spec)) << spec;
    EXPECT_NE(attend(other, spec), attend(few, spec)) << spec;
  }
}

// The first turn of a conversation may be shorter than k, or than min; a later one brings samples.
TEST(ResidualFit, WaitsForTheFirstSample) {
  for (const std::string limits : {"k=700,min=0", "k=100,min=700"}) {
    LayeredSession session(1, {4, 2, 64}, 1500, 40);
    session.AddRecent({400, 599}, 41);
    session.Write();
    for (const std::string& spec : kFitted) {
      const auto with = session.Make(spec + limits);
      const auto without = session.Make(Without(spec) + limits);
      for (Method* method : {with.get(), without.get()}) method->BuildIndex(600);
      const auto q = session.Query(42);
      EXPECT_EQ(session.Attend(*with, q, 0, 1000), session.Attend(*without, q, 0, 1000)) << spec;
      const LayerQueries first_turn = session.queries[0];
      session.AddRecent({1100, 1200, 1300}, 43);
      EXPECT_NE(session.Attend(*with, q), session.Attend(*without, q)) << spec << limits;
      session.queries[0] = first_turn;
    }
  }
}

TEST(ResidualFit, BringsAttentionNearerToDense) {
  LayeredSession session(2, {8, 2, 64}, 2000, 12);
  session.AddRecent({1500, 1600, 1700, 1800, 1900, 1999}, 13);
  session.Write();
  for (const std::string& spec : kFitted) {
    const auto with = session.Make(spec + "k=100,min=0");
    const auto without = session.Make(Without(spec) + "k=100,min=0");
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const auto q = session.Query(14);
      const auto dense = test::DenseAttention(session.rows, layer, 2000, q);
      const auto error = [&](Method& method) {
        const auto out = session.Attend(method, q, layer);
        const auto d = test::Compare(std::span(std::as_const(out)), std::span(dense));
        return d.matched() ? d.relative_l2 : kInf;
      };
      EXPECT_LT(error(*with), 0.8 * error(*without)) << spec << " layer " << layer;
    }
  }
}

TEST(ResidualFit, DoesNotDependOnTheNumberOfThreads) {
  LayeredSession one(2, {8, 4, 64}, 2000, 15, 1), two(2, {8, 4, 64}, 2000, 15, 2);
  for (LayeredSession* session : {&one, &two}) {
    session->AddRecent({1500, 1700, 1900}, 16);
    session->Write();
  }
  for (const std::string& spec : kFitted) {
    const auto first = one.Make(spec + "k=100,min=0");
    const auto second = two.Make(spec + "k=100,min=0");
    first->BuildIndex(1900);
    second->BuildIndex(1900);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const auto q = one.Query(17);
      EXPECT_EQ(one.Attend(*first, q, layer), two.Attend(*second, q, layer)) << spec;
    }
  }
}

// --- the mass of the rest

// log of the sum of exp over tokens 0 .. n - 1 whose key is (not) in `in`, by exact scores.
double LogSum(const LayeredSession& session, const float* q, std::int32_t kv, std::int64_t n,
              const std::vector<char>& in, bool wanted) {
  const std::int32_t dim = session.heads.head_dim;
  double sum = 0;
  for (std::int64_t t = 0; t < n; ++t) {
    if ((in[Size(t)] != 0) != wanted) continue;
    double score = 0;
    for (std::int32_t d = 0; d < dim; ++d) {
      score += static_cast<double>(q[d]) * HalfToFloat(session.rows.rows(0, kv)[t * 2 * dim + d]);
    }
    sum += std::exp(score / std::sqrt(dim));
  }
  return std::log(sum);
}

// Scores are conditional means, so that exp of them is too small; half the variance of their error
// makes up for it. Measured where the fit asks for masses: one fitting query after the other.
TEST(ResidualMass, NoiseBringsItNearerToTheTruth) {
  constexpr std::int64_t kN = 2000;
  constexpr std::int32_t kDim = 64;
  LayeredSession session(1, {4, 2, kDim}, kN, 18);
  session.AddRecent({kN - 1, kN, kN + 1, kN + 2}, 19);  // only the first is fitted
  session.Write();
  int calls = 0;
  double with = 0, without = 0;
  session.spy.on_mass = [&](const MassArgs& args) {
    ++calls;
    for (std::int32_t h = 0; h < 4; ++h) {
      const MassHead& head = args.heads[Size(h / 2)];
      const float* scores = head.scores + h % 2 * head.stride;
      const float* q = session.queries[0].recent.query(0) + h * kDim;
      std::vector<char> attended(Size(kN), 1);
      std::vector<double> mean(Size(kDim));
      double estimate = 0, mass = 0, offset = 0;
      for (std::int64_t t = 0; t < args.n_blocks * kBlockTokens; ++t) {
        attended[Size(t)] = std::isfinite(scores[t]) ? 0 : 1;
        estimate += std::exp(args.scale * static_cast<double>(scores[t]));
      }
      for (std::int64_t t = kStatsSkip; t < kN; ++t) {
        for (std::int32_t d = 0; d < kDim; ++d) {
          offset += static_cast<double>(q[d]) *
                    HalfToFloat(session.rows.rows(0, h / 2)[t * 2 * kDim + d]) / (kN - kStatsSkip);
        }
      }
      for (std::int64_t b = 0; b < args.n_blocks; ++b) {
        mass += head.mass[h % 2 * args.n_blocks + b];
      }
      const double lse = LogSum(session, q, h / 2, kN, attended, true);
      const double truth = LogSum(session, q, h / 2, kN, attended, false) - lse;
      without += std::fabs(std::log(estimate) + offset * args.scale - lse - truth) / 4;
      with += std::fabs(std::log(mass) - truth) / 4;
    }
  };
  const auto method = session.Make("fathom:bits=10,store=paper,residual=mean,k=100,min=0");
  method->BuildIndex(kN);
  ASSERT_EQ(calls, 1);
  EXPECT_GT(without, 0.2) << "the plan has to be coarse";
  EXPECT_LT(with, 0.3 * without);
}

// The one pass of Backend::Rank and the ops it replaces come to the same attention.
TEST(ResidualMass, OfOnePassIsThatOfScores) {
  for (const char* rule : {"mean", "block"}) {
    LayeredSession session(1, {8, 2, 64}, 3000, 31);
    session.AddRecent({2900, 2950}, 32);
    session.Write();
    const std::string spec = std::string("fathom:bits=20,k=200,min=0,residual=") + rule;
    const auto method = session.Make(spec);
    method->BuildIndex(3000);
    EXPECT_GT(std::ranges::max(method->residual_factors()), 0.1F);
    for (const double size : {0.5, 2.0, 6.0}) {
      const auto q = session.Query(33, size);
      session.spy.compose_rank = false;
      const auto one_pass = session.Attend(*method, q);
      session.spy.compose_rank = true;
      EXPECT_TRUE(Near(one_pass, session.Attend(*method, q), 0.005)) << rule << " " << size;
    }
  }
}

// --- estimates that are no numbers

TEST(ResidualNumbers, NanAndInfScoresLeaveAttendedTokensAlone) {
  for (const float bad : {kNan, -kInf}) {
    LayeredSession session(1, {4, 2, 64}, 1000, 20);
    session.AddRecent({900, 950}, 21);
    auto q = session.Query(22);
    for (std::size_t h = 0; h < 4; ++h) q[h * 64 + 5] = 1;  // -inf scores lose, +inf ones win
    session.Key(0, 300, 0, 5) = bad;
    session.Write();
    for (const std::string spec :
         {"exact:residual=mean,k=100,min=0", "exact:residual=block,k=100,min=0"}) {
      const Calibration calibration = session.WithFactor(spec, 1);
      const auto out = session.Attend(*session.Make(spec, &calibration), q);
      const auto off = session.Attend(*session.Make("exact:residual=off,k=100,min=0"), q);
      for (const float x : out) ASSERT_TRUE(std::isfinite(x)) << spec << " " << bad;
      // The other KV head has its rest; the damaged one as well, unless its scores are NaN.
      EXPECT_TRUE(!std::equal(out.begin() + 128, out.end(), off.begin() + 128));
      EXPECT_EQ(std::equal(out.begin(), out.begin() + 128, off.begin()), std::isnan(bad));
    }
    for (const std::string& spec : kFitted) {
      const auto method = session.Make(spec + "k=100,min=0");
      for (const float x : session.Attend(*method, q)) {
        ASSERT_TRUE(std::isfinite(x)) << spec << " " << bad;
      }
    }
  }
}

// A mass just below the largest float times values of a thousand is beyond it.
TEST(ResidualNumbers, MassesNearTheLargestFloatDoNoHarm) {
  LayeredSession session(1, {1, 1, 64}, 1000, 23);
  for (float& v : session.values[0]) v *= 1000;
  session.AddRecent({999}, 24);
  session.Write();
  int large = 0;
  session.spy.on_mass = [&](const MassArgs& args) {
    double mass = 0;
    for (std::int64_t b = 0; b < args.n_blocks; ++b) mass += args.heads[0].mass[b];
    large += mass > 1e35 && mass < 3.4e38 ? 1 : 0;
  };
  // One bit: nearly all the spread of the scores is noise, and half its variance goes into exp.
  const auto method =
      session.Make("fathom:bits=1,store=paper,plan=measured,residual=mean,k=100,min=0");
  for (int eighths = 80; eighths < 176; ++eighths) {
    const double size = eighths / 8.0;
    for (const float x : session.Attend(*method, session.Query(25, size))) {
      ASSERT_TRUE(std::isfinite(x)) << size;
    }
  }
  EXPECT_GT(large, 0);
}

}  // namespace
}  // namespace fathom
