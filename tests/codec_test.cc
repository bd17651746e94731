// SPDX-License-Identifier: MIT
// What the index computes from keys: steps, codes, decoders and measured distortions, each against
// its definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fathom/backend.h"
#include "fathom/store.h"
#include "support/compare.h"
#include "support/index_probe.h"
#include "support/random_data.h"

namespace fathom {
namespace {

using test::DataKind;
using test::IndexProbe;
using test::MappedKeys;

constexpr std::int32_t kSegment = 6;
constexpr std::int64_t kBuilt = 15, kAll = 20;  // segments of 6, 6, 6 and 2 blocks

struct Case {
  DataKind kind;
  std::int32_t dim, mean_bits;
  bool klt;
};

class CodecTest : public testing::TestWithParam<Case> {
 protected:
  CodecTest() : index_(IndexShape{Codec::kMean, c_.dim, c_.mean_bits, kSegment}, MakeBasis()) {
    index_.Build(rows_.data(), kBuilt, *backend_);
    x_ = MappedKeys(rows_, kAll * kBlockTokens, index_.basis());
  }

  Basis MakeBasis() const {
    const std::int64_t n = kBuilt * kBlockTokens;
    const std::vector<float> keys = MappedKeys(rows_, n, RawBasis(c_.dim, {}));
    Moments moments(c_.dim, c_.klt);
    moments.Add(keys.data() + kStatsSkip * c_.dim, n - kStatsSkip);
    return c_.klt ? KltBasis(moments, SecondMoment(c_.dim)) : RawBasis(c_.dim, moments.mean());
  }

  float X(std::int64_t token, int channel) const {
    return x_[static_cast<std::size_t>(token * c_.dim + channel)];
  }
  // Block mean by the rule of Backend::Pack.
  float BlockMean(std::int64_t block, int channel) const {
    float sum = 0;
    for (std::int64_t i = 0; i < kBlockTokens; ++i) sum += X(block * kBlockTokens + i, channel);
    return sum / 64.0f;
  }
  double Residual(std::int64_t token, int channel) const {
    const IndexProbe probe(index_);
    const std::int64_t block = token / kBlockTokens;
    const float step = probe.CodecOf(block).mean_step[static_cast<std::size_t>(channel)];
    return X(token, channel) - static_cast<float>(probe.Mean(block, channel)) * step;
  }

  const Case c_ = GetParam();
  const std::vector<Half> rows_ = test::RandomRows(c_.kind, kAll* kBlockTokens, c_.dim,
                                                   21 + static_cast<std::uint64_t>(c_.dim));
  const std::unique_ptr<Backend> backend_ = MakeBackend("ref", 1);
  HeadIndex index_;
  std::vector<float> x_;  // [kAll * 64][D] keys in the basis
};

TEST_P(CodecTest, StepsFollowTheSpreadOfMeansAndResiduals) {
  const MeanCodec& codec = index_.codecs()[0];
  HeadIndex by_rms(index_.shape(), index_.basis(), {.ranges = Ranges::kRms});
  by_rms.Build(rows_.data(), kBuilt, *backend_);
  ASSERT_EQ(by_rms.codecs()[0].mean_step, codec.mean_step);
  const int limit = (1 << (c_.mean_bits - 1)) - 1;
  for (int j = 0; j < c_.dim; ++j) {
    double mean = 0, square = 0, residual = 0;
    for (std::int64_t b = 0; b < kBuilt; ++b) mean += BlockMean(b, j) / kBuilt;
    for (std::int64_t b = 0; b < kBuilt; ++b) {
      square += std::pow(BlockMean(b, j) - mean, 2) / kBuilt;
    }
    for (std::int64_t i = 0; i < kBuilt * kBlockTokens; ++i) {
      residual += std::pow(Residual(i, j), 2) / static_cast<double>(kBuilt * kBlockTokens);
    }
    const auto at = static_cast<std::size_t>(j);
    const double step = 4 * std::sqrt(square) / limit + 1e-9;
    EXPECT_NEAR(codec.mean_step[at], step, 1e-6 * step) << j;
    const auto range = [residual](int multiple) { return multiple * std::sqrt(residual) + 1e-9; };
    EXPECT_NEAR(by_rms.codecs()[0].range[at], range(2), 1e-6 * range(2)) << j;
    // Which multiple is measured: tests/range_fit_test.cc.
    const std::array multiples = {2, 3, 4, 6, 8, 11};
    EXPECT_TRUE(std::ranges::any_of(multiples,
                                    [&](int multiple) {
                                      return std::fabs(codec.range[at] - range(multiple)) <=
                                             1e-6 * range(multiple);
                                    }))
        << j << ": " << codec.range[at] << " of rms " << std::sqrt(residual);
  }
}

TEST_P(CodecTest, CodesFollowTheRuleOfPack) {
  index_.Append(rows_.data(), kAll, *backend_);
  const IndexProbe probe(index_);
  const auto limit = static_cast<float>((1 << (c_.mean_bits - 1)) - 1);
  for (std::int64_t i = 0; i < kAll * kBlockTokens; i += 7) {
    const std::int64_t block = i / kBlockTokens;
    for (int j = 0; j < c_.dim; ++j) {
      const auto at = static_cast<std::size_t>(j);
      const MeanCodec& codec = probe.CodecOf(block);
      const float mean =
          std::clamp(std::nearbyint(BlockMean(block, j) / codec.mean_step[at]), -limit, limit);
      ASSERT_EQ(probe.Mean(block, j), static_cast<int>(mean));
      const float y = X(i, j) - mean * codec.mean_step[at];
      const float cell = std::clamp(std::floor(y / (codec.range[at] / 8.0f)), -8.0f, 7.0f);
      ASSERT_EQ(probe.Code(i, j), static_cast<int>(cell) + 8) << i << " " << j;
    }
  }
}

// Of all linear decoders of t bits none is better: the error is orthogonal to every bit, up to the
// ridge and to the weights' rounding to single precision, which every token feels once. Where
// planes are nearly alike, as in channels with rare large values, weights are large and cancel.
TEST_P(CodecTest, DecodersSolveTheNormalEquations) {
  const IndexProbe probe(index_);
  const std::int64_t n = kBuilt * kBlockTokens;
  for (int j = 0; j < c_.dim; j += 3) {
    double energy = 0;
    for (std::int64_t i = 0; i < n; ++i) energy += std::fabs(Residual(i, j));
    for (int t = 1; t <= kPlanes; ++t) {
      const float* w =
          index_.codecs()[0].weight.data() +
          (static_cast<std::size_t>(j) * kPlanes + static_cast<std::size_t>(t) - 1) * kPlanes;
      std::array<double, kPlanes> gradient{};
      for (std::int64_t i = 0; i < n; ++i) {
        const int code = probe.Code(i, j);
        const auto sigma = [code](int p) { return 2 * ((code >> (3 - p)) & 1) - 1; };
        double error = Residual(i, j);
        for (int p = 0; p < t; ++p) error -= sigma(p) * static_cast<double>(w[p]);
        for (int p = 0; p < t; ++p) gradient[static_cast<std::size_t>(p)] += sigma(p) * error;
      }
      double weights = 0;
      for (int p = 0; p < t; ++p) weights += std::fabs(w[p]);
      const double bound = static_cast<double>(n) * 0x1p-24 * weights + 1e-9 * energy;
      for (int p = 0; p < kPlanes; ++p) {
        if (p >= t) {
          EXPECT_EQ(w[p], 0.0f);
          continue;
        }
        const double ridge = 1e-6 * static_cast<double>(n) * static_cast<double>(w[p]);
        EXPECT_NEAR(gradient[static_cast<std::size_t>(p)], ridge, bound) << j << " " << t;
      }
    }
  }
}

TEST_P(CodecTest, DistortionsAreTheMeasuredErrors) {
  const auto check = [this](std::int64_t n_blocks) {
    ASSERT_EQ(index_.n_blocks(), n_blocks);
    const IndexProbe probe(index_);
    const std::vector<double> distortion = index_.Distortions();
    const std::int64_t n = n_blocks * kBlockTokens;
    ASSERT_EQ(distortion.size(), static_cast<std::size_t>(kLevels * c_.dim));
    for (int level = 0; level < kLevels; ++level) {
      for (int j = 0; j < c_.dim; ++j) {
        double direct = 0, energy = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          direct += std::pow(X(i, j) - probe.Decode(i, j, level), 2);
          energy += std::pow(static_cast<double>(X(i, j)), 2);
        }
        // Residuals are single precision: nothing smaller than its last bit of the key can be seen.
        const double bound = 1e-6 * direct + 1e-12 * energy;
        EXPECT_NEAR(distortion[static_cast<std::size_t>(level * c_.dim + j)],
                    direct / static_cast<double>(n), bound / static_cast<double>(n))
            << "level " << level << " channel " << j;
      }
    }
  };
  check(kBuilt);
  index_.Append(rows_.data(), kAll, *backend_);  // two codecs now
  ASSERT_EQ(index_.codecs().size(), 2u);
  check(kAll);
  index_.Truncate(rows_.data(), 8);
  check(8);
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  static constexpr std::array kKinds = {"Normal", "HeavyTailed", "Constant", "Smooth"};
  const Case& c = info.param;
  return std::string(kKinds[static_cast<std::size_t>(c.kind)]) + (c.klt ? "Klt" : "Raw") + "D" +
         std::to_string(c.dim) + "Mean" + std::to_string(c.mean_bits);
}

INSTANTIATE_TEST_SUITE_P(All, CodecTest,
                         testing::Values(Case{DataKind::kNormal, 64, 4, false},
                                         Case{DataKind::kSmooth, 128, 4, false},
                                         Case{DataKind::kSmooth, 80, 8, true},
                                         Case{DataKind::kHeavyTailed, 128, 4, true},
                                         Case{DataKind::kHeavyTailed, 64, 8, false},
                                         Case{DataKind::kConstant, 64, 4, false},
                                         Case{DataKind::kConstant, 64, 8, true},
                                         Case{DataKind::kNormal, 256, 8, false}),
                         CaseName);

TEST(Codec, MeansAndPlanesEachLowerTheErrorOfSmoothKeys) {
  const std::vector<Half> rows = test::RandomRows(DataKind::kSmooth, 64 * 40, 64, 5);
  const std::vector<float> keys = MappedKeys(rows, 64 * 40, RawBasis(64, {}));
  Moments moments(64);
  moments.Add(keys.data(), 64 * 40);
  HeadIndex index({Codec::kMean, 64, 4, 64}, RawBasis(64, moments.mean()));
  index.Build(rows.data(), 40, *MakeBackend("ref", 1));
  const std::vector<double> d = index.Distortions();
  for (std::size_t j = 0; j < 64; ++j) {
    for (std::size_t level = 2; level < kLevels; ++level) {
      EXPECT_LT(d[level * 64 + j], d[(level - 1) * 64 + j]) << j << " level " << level;
    }
    EXPECT_LT(d[2 * 64 + j], 0.45 * d[64 + j]) << "one plane takes most of the residual";
    EXPECT_LT(d[5 * 64 + j], 0.03 * d[64 + j]) << "four planes nearly all";
  }
}

TEST(Codec, PaperStoreHoldsHalfMaximaAndTheirCodes) {
  constexpr std::int64_t kBlocks = 5;
  std::vector<float> keys = test::RandomData(DataKind::kHeavyTailed, kBlocks * 64, 80, 6);
  for (std::size_t i = 0; i < keys.size(); i += 80) keys[i] = 0;  // a channel of zeros
  const std::vector<Half> rows = test::MakeRows(keys, keys, 80);
  HeadIndex index({Codec::kPaper, 80, 4, 2}, RawBasis(80, {}));
  index.Build(rows.data(), kBlocks, *MakeBackend("ref", 1));
  EXPECT_TRUE(index.codecs().empty());
  const std::vector<float> x = MappedKeys(rows, kBlocks * 64, index.basis());
  const IndexProbe probe(index);
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    for (int j = 0; j < 80; ++j) {
      float top = 0;
      for (std::int64_t i = b * 64; i < b * 64 + 64; ++i) {
        top = std::max(top, std::fabs(x[static_cast<std::size_t>(i * 80 + j)]));
      }
      ASSERT_EQ(probe.Scale(b, j), HalfToFloat(FloatToHalf(top)));
      for (std::int64_t i = b * 64; i < b * 64 + 64; ++i) {
        const float v = x[static_cast<std::size_t>(i * 80 + j)];
        const float cell =
            top == 0 ? 0 : std::clamp(std::floor(v / (probe.Scale(b, j) / 8)), -8.0f, 7.0f);
        ASSERT_EQ(probe.Code(i, j), static_cast<int>(cell) + 8);
      }
    }
  }
}

TEST(Codec, NanAndInfKeysSpoilOnlyTheirChannels) {
  std::vector<Half> rows = test::RandomRows(DataKind::kNormal, 64 * 8, 64, 7);
  const std::vector<Half> clean = rows;
  const std::unique_ptr<Backend> backend = MakeBackend("ref", 1);
  HeadIndex good({Codec::kMean, 64, 4, 2}, RawBasis(64, {}));
  good.Build(clean.data(), 6, *backend);
  good.Append(clean.data(), 8, *backend);
  rows[100 * 128 + 3] = FloatToHalf(std::numeric_limits<float>::quiet_NaN());
  rows[300 * 128 + 9] = FloatToHalf(std::numeric_limits<float>::infinity());
  HeadIndex damaged({Codec::kMean, 64, 4, 2}, RawBasis(64, {}));
  damaged.Build(rows.data(), 6, *backend);
  damaged.Append(rows.data(), 8, *backend);
  const std::vector<double> expected = good.Distortions(), actual = damaged.Distortions();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (i % 64 == 3 || i % 64 == 9) {
      EXPECT_FALSE(std::isfinite(actual[i]));
    } else {
      EXPECT_EQ(actual[i], expected[i]);
    }
  }
}

}  // namespace
}  // namespace fathom
