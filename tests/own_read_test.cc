// SPDX-License-Identifier: MIT
// The options of our own read: plans, stores, bases, and what a calibration decides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "fathom/fathom.h"
#include "fathom/plan.h"
#include "method/head_stats.h"
#include "store/codec_fit.h"
#include "support/compare.h"
#include "support/index_probe.h"
#include "support/layered_session.h"

namespace fathom {
namespace {

using test::LayeredSession;
using test::Near;
using test::Size;

constexpr std::int32_t kLayers = 3, kKv = 2, kGroup = 3, kDim = 64;
constexpr HeadGeometry kHeads = {kGroup * kKv, kKv, kDim};
constexpr std::int64_t kN = 1500, kBuilt = 1300;
constexpr int kFitting = 5;  // queries of each layer

// Layers and heads whose scores spread very differently, and channels of different spread in each.
std::unique_ptr<LayeredSession> MakeSession(bool with_queries) {
  auto session = std::make_unique<LayeredSession>(kLayers, kHeads, kN, 41);
  test::Random random(42);
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    for (std::int32_t kv = 0; kv < kKv; ++kv) {
      for (std::int32_t d = 0; d < kDim; ++d) {
        const double spread = std::exp2(2.0 * layer - 2.0 * kv - 3.0 * random.Uniform());
        for (std::int64_t t = 0; t < kN; ++t) {
          session->Key(layer, t, kv, d) *= static_cast<float>(spread);
        }
      }
    }
  }
  if (with_queries) {
    for (std::int64_t i = 0; i < 32; ++i) {
      for (LayerQueries& layer : session->queries) {
        layer.samples.Add(20 + 30 * i, session->Query(500 + static_cast<std::uint64_t>(i)).data());
      }
    }
    session->AddRecent({900, 950, 999, 1200, 1250}, 43);
  }
  session->Write();
  return session;
}

// Mean read bits per KV head of the fitting queries, with the index of kBuilt tokens.
double MeanReadBits(const LayeredSession& session, Method& method, std::int64_t n_tokens) {
  method.ResetCounters();
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const QuerySamples& recent = session.queries[Size(layer)].recent;
    for (std::int64_t i = 0; i < kFitting; ++i) {
      const std::vector<float> q(recent.query(i), recent.query(i) + Size(kHeads.n_heads * kDim));
      session.Attend(method, q, layer, n_tokens);
    }
  }
  return method.counters().mean_read_bits();
}

std::string Common(double bits, const std::string& more = "") {
  return "fathom:plan=common,k=100,min=0,bits=" + std::to_string(bits) + more;
}

// --- plan=common

TEST(CommonPlan, SpendsTheBitsOnAverageOverLayersAndHeads) {
  const auto session = MakeSession(true);
  constexpr double kPairs = kLayers * kKv * kFitting;
  for (const double bits : {8.0, 20.0, 28.0, 60.0}) {
    for (const char* more : {"", ",basis=klt", ",basis=balanced", ",store=paper"}) {
      const auto method = session->Make(Common(bits, more));
      method->BuildIndex(kBuilt);
      const double mean = MeanReadBits(*session, *method, kBuilt);
      EXPECT_LE(mean, bits + 1e-9) << more;
      // The next step would have gone beyond: a hull's step reads at most all four planes.
      EXPECT_GT(mean, bits - 4.25 / kPairs) << more;
    }
  }
}

TEST(CommonPlan, GivesMoreToHeadsThatSpreadMore) {
  const auto session = MakeSession(true);
  const auto method = session->Make(Common(20));
  method->BuildIndex(kBuilt);
  std::vector<double> bits;
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    method->ResetCounters();
    session->Attend(*method, session->Query(44), layer, kBuilt);
    bits.push_back(method->counters().mean_read_bits());
  }
  EXPECT_LT(bits[0], 0.7 * bits[1]);
  EXPECT_LT(bits[1], bits[2]);
}

TEST(CommonPlan, WithoutQueriesIsTheMeasuredOne) {
  const auto session = MakeSession(false);
  const auto common = session->Make(Common(20));
  const auto measured = session->Make("fathom:plan=measured,k=100,min=0,bits=20");
  for (Method* method : {common.get(), measured.get()}) method->BuildIndex(kBuilt);
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const auto q = session->Query(45);
    EXPECT_EQ(session->Attend(*common, q, layer), session->Attend(*measured, q, layer));
  }
  EXPECT_EQ(common->counters().read_bits, measured->counters().read_bits);
}

TEST(CommonPlan, IsFittedAgainWhereTheIndexIs) {
  auto session = MakeSession(true);
  const auto method = session->Make(Common(20));
  method->BuildIndex(kBuilt);
  const double before = MeanReadBits(*session, *method, kBuilt);
  method->Truncate(1000);
  for (LayerQueries& layer : session->queries) {
    layer.recent.Clear();
    layer.recent.Add(999, session->Query(46, 4).data());
  }
  method->BuildIndex(1000);
  const auto fresh = session->Make(Common(20));
  fresh->BuildIndex(1000);
  method->ResetCounters();
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const auto q = session->Query(47);
    EXPECT_EQ(session->Attend(*method, q, layer, 1000), session->Attend(*fresh, q, layer, 1000));
  }
  EXPECT_EQ(method->counters().read_bits, fresh->counters().read_bits);
  // Truncating what came after the build keeps the fit: the same queries read the same bits.
  const auto kept = session->Make(Common(20));
  kept->BuildIndex(kBuilt);
  const auto q = session->Query(48);
  const auto out = session->Attend(*kept, q, 1, kBuilt);
  session->Attend(*kept, q, 1, kN);
  for (LayerQueries& layer : session->queries) layer.recent.Clear();
  kept->Truncate(kBuilt);
  EXPECT_EQ(session->Attend(*kept, q, 1, kBuilt), out);
  EXPECT_GT(before, 19);
}

// --- plan=published and store=paper

// With the read bits of the published store, only the first plane has another price (its scale's
// quarter bit) than in the published plan, which counts code bits. At the multiplier of its theta
// depths of 2 and more are the same; a depth of 1 is taken where it is worth 1.25 instead of 1.
TEST(PublishedPlan, DiffersFromTheCodeBitPlanInTheFirstPlaneOnly) {
  test::Random random(49);
  int ones = 0, zeros = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::vector<double> variance(kDim);
    std::ranges::generate(variance, [&] { return std::exp2(10 * random.Uniform() - 6); });
    const auto q = test::RandomNormal(2 * kDim, seed);
    const PaperPlan paper = PlanPaper(q.data(), 2, variance, 24.0 + static_cast<double>(seed));
    const double multiplier = 1.5 * std::exp2(paper.theta);
    const DistortionHull hull(PublishedDistortions(variance), PaperLevelCosts());
    const MeasuredPlan plan = PlanAtMultiplier(q.data(), 2, hull, multiplier, PlanWeights::kSum);
    for (std::size_t j = 0; j < kDim; ++j) {
      const int depth = plan.level[j] > 0 ? plan.level[j] - 1 : 0;
      if (paper.depth[j] != 1) {
        EXPECT_EQ(depth, paper.depth[j]) << seed << " " << j;
        continue;
      }
      const double energy =
          static_cast<double>(q[j]) * q[j] + static_cast<double>(q[kDim + j]) * q[kDim + j];
      EXPECT_EQ(depth, 0.75 * energy * variance[j] / 1.25 > multiplier ? 1 : 0);
      ++(depth == 1 ? ones : zeros);
    }
  }
  EXPECT_GT(ones, 0);
  EXPECT_GT(zeros, 0);
}

// Where everything is read, both reads see the same scores, whatever their plans count.
TEST(PublishedPlan, OfAllBitsIsThePublishedRead) {
  const auto session = MakeSession(true);
  for (const std::string basis : {"klt", "balanced"}) {
    const std::string tail = ",basis=" + basis + ",k=100,min=0";
    const auto own =
        session->Make("fathom:store=paper,plan=published,residual=off,bits=272" + tail);
    const auto paper = session->Make("fathom:preset=paper,budget=256" + tail);
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      const auto q = session->Query(50);
      EXPECT_EQ(session->Attend(*own, q, layer), session->Attend(*paper, q, layer)) << basis;
    }
    EXPECT_EQ(own->counters().mean_read_bits(), 272);
    EXPECT_EQ(paper->counters().mean_read_bits(), 272);
  }
}

TEST(PaperStore, DistortionsAreThoseOfItsDecoder) {
  for (const test::DataKind kind : {test::DataKind::kNormal, test::DataKind::kHeavyTailed,
                                    test::DataKind::kSmooth, test::DataKind::kConstant}) {
    constexpr std::int64_t kBlocks = 11;
    const auto rows = test::RandomRows(kind, kBlocks * kBlockTokens, 80, 51);
    HeadIndex index({Codec::kPaper, 80, 4, 4}, RawBasis(80, {}), {.distortions = true});
    const auto backend = MakeBackend("ref", 1);
    index.Build(rows.data(), 6, *backend);
    index.Append(rows.data(), kBlocks, *backend);
    const auto x = test::MappedKeys(rows, kBlocks * kBlockTokens, index.basis());
    const test::IndexProbe probe(index);
    const std::vector<double> distortion = index.Distortions();
    for (int j = 0; j < 80; ++j) {
      double energy = 0;
      std::vector<double> direct(kPlanes + 1);
      for (std::int64_t i = 0; i < kBlocks * kBlockTokens; ++i) {
        const double key = x[Size(i * 80 + j)];
        const double scale = probe.Scale(i / kBlockTokens, j);
        energy += key * key / (kBlocks * kBlockTokens);
        for (int t = 0; t <= kPlanes; ++t) {
          const double top = t == 0 ? 1 : 1 << (t - 1);  // of a t-bit code, mid-rise
          const double value =
              t == 0 ? 0 : ((probe.Code(i, j) >> (kPlanes - t)) + 0.5 - top) * scale / top;
          direct[Size(t)] += (key - value) * (key - value) / (kBlocks * kBlockTokens);
        }
      }
      EXPECT_EQ(distortion[Size(j)], distortion[Size(80 + j)]) << "there is no mean to read";
      for (int t = 0; t <= kPlanes; ++t) {
        const int level = t == 0 ? 0 : t + 1;
        EXPECT_NEAR(distortion[Size(level * 80 + j)], direct[Size(t)],
                    1e-6 * direct[Size(t)] + 1e-12 * energy)
            << "depth " << t << " channel " << j;
      }
    }
  }
}

// --- the scan with all bits

// Scores as the selection sees them, without the constant that centring takes off every token.
std::vector<double> Scores(LayeredSession* session, const std::string& spec,
                           const std::vector<float>& q) {
  std::vector<double> scores;
  session->spy.on_select = [&](const SelectArgs& args) {
    for (const SelectHead& head : args.heads) {
      for (std::int32_t h = 0; h < args.group; ++h) {
        const float* s = head.scores + h * head.stride;
        double mean = 0;
        for (std::int64_t t = 0; t < args.last; ++t) mean += s[t] / static_cast<double>(args.last);
        for (std::int64_t t = 0; t < args.last; ++t) scores.push_back(s[t] - mean);
      }
    }
  };
  session->Attend(*session->Make(spec + ",k=100,min=0"), q, 1);
  session->spy.on_select = nullptr;
  return scores;
}

TEST(OwnRead, ScoresOfAllBitsAreCloseInEveryBasis) {
  auto session = MakeSession(true);
  const auto q = session->Query(52);
  const std::vector<double> exact = Scores(session.get(), "exact:residual=off", q);
  ASSERT_EQ(exact.size(), Size(kHeads.n_heads) * Size(kN - kWindow))
      << "the last block is in the window";
  for (const char* basis : {"raw", "klt", "balanced"}) {
    for (const char* store : {"mean", "paper"}) {
      const std::string spec =
          std::string("fathom:bits=1000,residual=off,store=") + store + ",basis=" + basis;
      // Four bits of normal residuals leave about 1 % of the variance.
      EXPECT_TRUE(Near(Scores(session.get(), spec, q), exact, 0.15)) << spec;
      EXPECT_FALSE(Near(Scores(session.get(), spec, q), exact, 0.02)) << "quantized at all";
    }
  }
}

// --- calibration

// Statistics of the session itself in centred raw coordinates, all that the tests below use.
Calibration MakeCalibration(const LayeredSession& session) {
  Calibration calibration;
  for (std::int32_t layer = 0; layer < kLayers; ++layer) calibration.layers.push_back(layer);
  calibration.heads = kHeads;
  calibration.head_calibrations.resize(Size(kLayers) * kKv * kBasisRules);
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    for (std::int32_t kv = 0; kv < kKv; ++kv) {
      HeadCalibration& head =
          calibration.head_calibrations[Size(layer * kKv + kv) * kBasisRules +
                                        static_cast<std::size_t>(BasisRule::kCentred)];
      head.stats = MeasureHead(session.Context(), layer, kv, kBuilt, BasisRule::kCentred, true);
      BlockReader reader(session.rows.rows(layer, kv), head.stats.basis);
      for (const int bits : {4, 8}) {
        head.codec[bits == 8 ? 1 : 0] =
            FitCodec(reader, 0, kBuilt / kBlockTokens, {Codec::kMean, kDim, bits, 64}, {},
                     kMeanReach, session.spy);
      }
    }
  }
  return calibration;
}

const char* const kBudgeted = "fathom:bits=28,plan=measured,k=100,min=0,budgets=";

TEST(Calibrated, LayersReadTheirBudgets) {
  const auto session = MakeSession(true);
  Calibration calibration = MakeCalibration(*session);
  std::string spec = session->Make(std::string(kBudgeted) + "flat")->spec();
  spec.replace(spec.find("budgets=flat"), 12, "budgets=file");
  const std::vector<double> budgets = {10, 46, 28};
  calibration.budgets[CalibrationKey(spec)] = budgets;
  const auto method = session->Make(std::string(kBudgeted) + "file", &calibration);
  EXPECT_EQ(method->spec(), spec);
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    method->ResetCounters();
    session->Attend(*method, session->Query(53), layer);
    EXPECT_LE(method->counters().mean_read_bits(), budgets[Size(layer)]);
    EXPECT_GT(method->counters().mean_read_bits(), budgets[Size(layer)] - 2);
  }
}

std::string ErrorOf(const LayeredSession& session, const std::string& spec,
                    const Calibration* calibration) {
  try {
    session.Make(spec, calibration);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "no error";
}

TEST(Calibrated, MissingBudgetsAreNamedWithWhatIsThere) {
  const auto session = MakeSession(false);
  Calibration calibration = MakeCalibration(*session);
  const std::string spec = std::string(kBudgeted) + "file";
  calibration.budgets["fathom:one"] = {1, 2, 3};
  calibration.budgets["fathom:two"] = {1, 2, 3};
  const std::string message = ErrorOf(*session, spec, &calibration);
  for (const char* part : {"budgets=file", "bits=28", "fathom:one fathom:two", "--budgets"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << ": " << message;
  }
  EXPECT_NE(ErrorOf(*session, spec, nullptr).find("--stats-file"), std::string::npos);
}

TEST(Calibrated, TheIndexHasTheStepsOfTheFile) {
  const auto session = MakeSession(true);
  Calibration calibration = MakeCalibration(*session);
  const IndexShape four = {Codec::kMean, kDim, 4, 64}, eight = {Codec::kMean, kDim, 8, 64};
  const MethodContext context = session->Context(&calibration);
  const auto codec = [&](const IndexShape& shape) {
    return CalibratedCodec(context, 2, 1, BasisRule::kCentred, shape);
  };
  const HeadCalibration& head = calibration.head(2, 1, BasisRule::kCentred);
  EXPECT_EQ(codec(four), head.codec.data());
  EXPECT_EQ(codec(eight), head.codec.data() + 1);
  EXPECT_EQ(codec({Codec::kPaper, kDim, 4, 64}), nullptr);
  EXPECT_EQ(CalibratedCodec(session->Context(), 2, 1, BasisRule::kCentred, four), nullptr);

  MeanCodec given = *codec(four);
  for (float& step : given.mean_step) step *= 1.5F;
  for (float& range : given.range) range *= 0.75F;
  for (float& weight : given.weight) weight *= 0.875F;
  for (const Decoders decoders : {Decoders::kLeastSquares, Decoders::kCentre}) {
    HeadIndex index(four, head.stats.basis, {.decoders = decoders});
    index.Build(session->rows.rows(2, 1), kBuilt / kBlockTokens, session->spy, &given);
    ASSERT_EQ(index.codecs().size(), 1U);
    EXPECT_EQ(index.codecs()[0].mean_step, given.mean_step);
    EXPECT_EQ(index.codecs()[0].range, given.range);
    EXPECT_EQ(index.codecs()[0].weight,
              decoders == Decoders::kCentre ? CentreWeights(given.range) : given.weight);
  }
}

// The same statistics from the file and from the session itself give the same reads.
TEST(Calibrated, StatisticsOfTheSessionGiveTheSameAnswer) {
  const auto session = MakeSession(true);
  Calibration calibration = MakeCalibration(*session);
  for (const std::string spec :
       {"fathom:bits=28,k=100,min=0", "fathom:bits=19,meanbits=8,k=80,min=0"}) {
    const auto own = session->Make(spec);
    const auto from_file = session->Make(spec, &calibration);
    for (Method* method : {own.get(), from_file.get()}) method->BuildIndex(kBuilt);
    const auto q = session->Query(54);
    const auto expected = session->Attend(*own, q, 2);
    EXPECT_EQ(session->Attend(*from_file, q, 2), expected) << spec;
    for (HeadCalibration& head : calibration.head_calibrations) {
      for (MeanCodec& codec : head.codec) {
        for (float& range : codec.range) range *= 8;
      }
    }
    const auto coarse = session->Make(spec, &calibration);
    coarse->BuildIndex(kBuilt);
    EXPECT_NE(session->Attend(*coarse, q, 2), expected) << spec;
    calibration = MakeCalibration(*session);
  }
}

}  // namespace
}  // namespace fathom
