// SPDX-License-Identifier: MIT
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fathom/error.h"
#include "fathom/stats.h"
#include "support/compare.h"
#include "support/random_data.h"

namespace fathom {
namespace {

using test::DataKind;
using test::Near;
using test::RandomData;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Two-pass covariance in long double; the diagonal is the variance.
struct Direct {
  std::vector<double> mean, covariance;
};
Direct DirectMoments(const std::vector<float>& x, std::size_t dim) {
  const std::size_t n = x.size() / dim;
  std::vector<long double> mean(dim), c(dim * dim);
  for (std::size_t i = 0; i < x.size(); ++i) mean[i % dim] += x[i];
  for (long double& m : mean) m /= static_cast<long double>(n);
  for (std::size_t t = 0; t < n; ++t) {
    for (std::size_t a = 0; a < dim; ++a) {
      for (std::size_t b = 0; b < dim; ++b) {
        c[a * dim + b] += (x[t * dim + a] - mean[a]) * (x[t * dim + b] - mean[b]);
      }
    }
  }
  for (long double& v : c) v /= static_cast<long double>(n - 1);
  return {{mean.begin(), mean.end()}, {c.begin(), c.end()}};
}

std::vector<double> Diagonal(const std::vector<double>& matrix, std::size_t dim) {
  std::vector<double> d(dim);
  for (std::size_t j = 0; j < dim; ++j) d[j] = matrix[j * dim + j];
  return d;
}

TEST(Moments, EqualTheDirectSums) {
  for (const DataKind kind : {DataKind::kNormal, DataKind::kHeavyTailed, DataKind::kSmooth}) {
    const std::vector<float> x = RandomData(kind, 777, 16, 1);
    const Direct direct = DirectMoments(x, 16);
    Moments full(16, true), diagonal(16);
    full.Add(x.data(), 777);
    diagonal.Add(x.data(), 777);
    EXPECT_TRUE(Near(full.mean(), direct.mean, 1e-12));
    EXPECT_TRUE(Near(full.Covariance(), direct.covariance, 1e-12));
    EXPECT_TRUE(Near(diagonal.Variance(), Diagonal(direct.covariance, 16), 1e-12));
    EXPECT_TRUE(Near(full.Variance(), diagonal.Variance(), 1e-12));
  }
}

TEST(Moments, AreStableFarFromZero) {
  std::vector<float> x = RandomData(DataKind::kNormal, 5000, 16, 2);
  for (float& v : x) v = 4096.0f + v * 0x1p-4f;
  Moments moments(16);
  for (std::int64_t i = 0; i < 5000; ++i) moments.Add(x.data() + i * 16, 1);
  EXPECT_TRUE(Near(moments.Variance(), Diagonal(DirectMoments(x, 16).covariance, 16), 1e-9));
}

TEST(Moments, MergeInAnyOrderIsTheWhole) {
  constexpr std::int64_t kTokens = 1000;
  const std::vector<float> x = RandomData(DataKind::kSmooth, kTokens, 32, 3);
  Moments whole(32, true);
  whole.Add(x.data(), kTokens);
  std::vector<Moments> parts;
  const std::vector<std::int64_t> cuts = {0, 1, 1, 17, 500, 999, kTokens};  // with an empty part
  for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
    Moments part(32, true);
    part.Add(x.data() + cuts[c] * 32, cuts[c + 1] - cuts[c]);
    parts.push_back(part);
  }
  Moments forward(32, true), backward(32, true);
  for (std::size_t c = 0; c < parts.size(); ++c) {
    forward.Merge(parts[c]);
    backward.Merge(parts[parts.size() - 1 - c]);
  }
  for (const Moments* merged : {&forward, &backward}) {
    EXPECT_EQ(merged->count(), kTokens);
    EXPECT_TRUE(Near(merged->mean(), whole.mean(), 1e-12));
    EXPECT_TRUE(Near(merged->Covariance(), whole.Covariance(), 1e-12));
  }
}

TEST(Moments, OfTheTokensAfterTheSkipIgnoreTheFirstOnes) {
  std::vector<float> x = RandomData(DataKind::kNormal, 200, 16, 4);
  Moments clean(16);
  clean.Add(x.data() + kStatsSkip * 16, 200 - kStatsSkip);
  for (std::size_t i = 0; i < kStatsSkip * 16; ++i) x[i] = 1e6f;
  Moments skipped(16);
  skipped.Add(x.data() + kStatsSkip * 16, 200 - kStatsSkip);
  EXPECT_EQ(skipped.Variance(), clean.Variance());
}

TEST(Moments, OfFewerThanTwoTokensHaveNoVariance) {
  Moments moments(16, true);
  EXPECT_EQ(moments.Variance(), std::vector<double>(16));
  const std::vector<float> x(16, 3.0f);
  moments.Add(x.data(), 0);
  EXPECT_EQ(moments.count(), 0);
  moments.Add(x.data(), 1);
  EXPECT_EQ(moments.Covariance(), std::vector<double>(256));
  EXPECT_EQ(moments.mean()[7], 3.0);
  moments.Add(x.data(), 1);
  EXPECT_EQ(moments.Variance(), std::vector<double>(16)) << "constant data";
}

TEST(SecondMoment, EqualsTheDirectSumWithAnyStrideAndMerge) {
  constexpr std::int64_t kQueries = 600, kStride = 50;  // rows of 16 inside rows of 50
  const std::vector<float> q = RandomData(DataKind::kSmooth, kQueries, kStride, 5);
  std::vector<double> direct(256);
  for (std::size_t i = 0; i < kQueries; ++i) {
    for (std::size_t a = 0; a < 16; ++a) {
      for (std::size_t b = 0; b < 16; ++b) {
        direct[a * 16 + b] +=
            static_cast<double>(q[i * kStride + a]) * q[i * kStride + b] / kQueries;
      }
    }
  }
  SecondMoment whole(16), first(16), second(16);
  EXPECT_EQ(whole.Matrix(), std::vector<double>(256));
  whole.Add(q.data(), kQueries, kStride);
  first.Add(q.data(), 123, kStride);
  second.Add(q.data() + 123 * kStride, kQueries - 123, kStride);
  first.Merge(second);
  EXPECT_TRUE(Near(whole.Matrix(), direct, 1e-12));
  EXPECT_TRUE(Near(first.Matrix(), direct, 1e-12));
  EXPECT_EQ(first.count(), kQueries);
}

// Samples of 4 heads of 3 channels: the value tells position, head and channel.
QuerySamples SamplesAt(const std::vector<std::int64_t>& positions) {
  QuerySamples samples(4, 3);
  for (const std::int64_t position : positions) {
    std::vector<float> q(12);
    for (std::size_t i = 0; i < 12; ++i) {
      q[i] = static_cast<float>(position) * 100.0f + static_cast<float>(i);
    }
    samples.Add(position, q.data());
  }
  return samples;
}

void ExpectSamplesAt(const QuerySamples& samples, const std::vector<std::int64_t>& positions) {
  ASSERT_EQ(samples.size(), static_cast<std::int64_t>(positions.size()));
  EXPECT_TRUE(std::ranges::equal(samples.positions(), positions));
  for (std::size_t s = 0; s < positions.size(); ++s) {
    for (std::size_t i = 0; i < 12; ++i) {
      EXPECT_EQ(samples.query(static_cast<std::int64_t>(s))[i],
                static_cast<float>(positions[s]) * 100.0f + static_cast<float>(i));
    }
  }
}

TEST(QuerySamples, ThinAndKeepTheLast) {
  QuerySamples samples = SamplesAt({0, 7, 8, 20, 33});
  EXPECT_EQ(samples.n_heads(), 4);
  EXPECT_EQ(samples.head_dim(), 3);
  ExpectSamplesAt(samples, {0, 7, 8, 20, 33});
  samples.KeepEverySecond();
  ExpectSamplesAt(samples, {0, 8, 33});
  samples.KeepLast(5);
  ExpectSamplesAt(samples, {0, 8, 33});
  samples.KeepLast(2);
  ExpectSamplesAt(samples, {8, 33});
  samples.KeepEverySecond();
  ExpectSamplesAt(samples, {8});
  samples.KeepEverySecond();
  ExpectSamplesAt(samples, {8});
  samples.KeepLast(0);
  ExpectSamplesAt(samples, {});
  samples.KeepEverySecond();
  ExpectSamplesAt(samples, {});
  const std::vector<float> q(12, 1.0f);
  samples.Add(3, q.data());  // any position after the samples are gone
  EXPECT_EQ(samples.size(), 1);
  samples.Clear();
  ExpectSamplesAt(samples, {});
  EXPECT_EQ(samples.head_dim(), 3);
  EXPECT_EQ(QuerySamples().size(), 0);
}

TEST(QuerySamples, GiveTheQueriesOfAGroup) {
  const QuerySamples samples = SamplesAt({1, 2, 5});
  EXPECT_EQ(samples.OfGroup(1, 2, 1),
            (std::vector<float>{206, 207, 208, 209, 210, 211, 506, 507, 508, 509, 510, 511}));
  EXPECT_EQ(samples.OfGroup(3, 1),
            (std::vector<float>{109, 110, 111, 209, 210, 211, 509, 510, 511}));
  EXPECT_EQ(samples.OfGroup(0, 4).size(), 36U);
  EXPECT_TRUE(samples.OfGroup(0, 4, 3).empty());
}

// Keys with strongly coupled channels and queries that prefer some of them.
class KltTest : public testing::TestWithParam<std::int32_t> {
 protected:
  void SetUp() override {
    const std::int32_t dim = GetParam();
    const std::vector<float> z = RandomData(DataKind::kNormal, kTokens, dim, 6);
    const std::vector<float> mix = test::RandomNormal(dim * dim, 7);
    keys_.assign(z.size(), 0.0f);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t i = 0; i < dim; ++i) {
        for (std::int64_t j = 0; j < dim; ++j) {
          keys_[Size(t * dim + j)] += z[Size(t * dim + i)] * mix[Size(i * dim + j)];
        }
      }
      for (std::int64_t j = 0; j < dim; ++j) keys_[Size(t * dim + j)] += static_cast<float>(j);
    }
    queries_ = RandomData(DataKind::kNormal, kQueries, dim, 8);
    moments_ = Moments(dim, true);
    moments_.Add(keys_.data(), kTokens);
    second_ = SecondMoment(dim);
    second_.Add(queries_.data(), kQueries, dim);
  }

  static constexpr std::int64_t kTokens = 1500, kQueries = 50;
  std::vector<float> keys_, queries_;
  Moments moments_{1};
  SecondMoment second_{1};
};

TEST_P(KltTest, DiagonalisesTheKeys) {
  const std::int32_t dim = GetParam();
  const Basis basis = KltBasis(moments_, second_);
  std::vector<float> x(keys_.size());
  basis.MapKeys(keys_.data(), kTokens, x.data());
  Moments mapped(dim, true);
  mapped.Add(x.data(), kTokens);
  const std::vector<double> c = mapped.Covariance();
  std::vector<double> diagonal(c.size());
  for (std::size_t j = 0; j < Size(dim); ++j) diagonal[j * Size(dim) + j] = c[j * Size(dim) + j];
  EXPECT_TRUE(Near(c, diagonal, 1e-5));
}

TEST_P(KltTest, KeepsScores) {
  const std::int32_t dim = GetParam();
  const Basis basis = KltBasis(moments_, second_);
  std::vector<float> x(keys_.size()), q(queries_.size());
  basis.MapKeys(keys_.data(), kTokens, x.data());
  basis.MapQueries(queries_.data(), kQueries, q.data());
  std::vector<double> exact, mapped;
  for (std::int64_t h = 0; h < kQueries; ++h) {
    for (std::int64_t t = 0; t < kTokens; t += 10) {
      double a = 0, b = 0;
      for (std::int64_t j = 0; j < dim; ++j) {
        const double k = static_cast<double>(keys_[Size(t * dim + j)]) - basis.center[Size(j)];
        a += queries_[Size(h * dim + j)] * k;
        b += static_cast<double>(q[Size(h * dim + j)]) * x[Size(t * dim + j)];
      }
      exact.push_back(a);
      mapped.push_back(b);
    }
  }
  EXPECT_TRUE(Near(mapped, exact, 1e-5));
}

TEST_P(KltTest, OrdersByEnergyAndFixesSigns) {
  const auto dim = Size(GetParam());
  const Basis basis = KltBasis(moments_, second_);
  const SecondMoment none(GetParam());
  const std::vector<double> c = moments_.Covariance(), m = second_.Matrix();
  const auto quadratic = [dim](const std::vector<double>& a, const std::vector<float>& v,
                               std::size_t j) {
    double sum = 0;
    for (std::size_t i = 0; i < dim * dim; ++i) {
      sum += a[i] * v[i / dim * dim + j] * v[i % dim * dim + j];
    }
    return sum;
  };
  const std::vector<float> by_lambda = KltBasis(moments_, none).key_map;
  for (std::size_t j = 0; j < dim; ++j) {
    if (j > 0) {
      EXPECT_GE(
          quadratic(c, basis.key_map, j - 1) * quadratic(m, basis.key_map, j - 1) * (1 + 1e-5),
          quadratic(c, basis.key_map, j) * quadratic(m, basis.key_map, j));
      EXPECT_GE(quadratic(c, by_lambda, j - 1) * (1 + 1e-5), quadratic(c, by_lambda, j));
    }
    float largest = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      const float v = basis.key_map[i * dim + j];
      if (std::fabs(v) > std::fabs(largest)) largest = v;
    }
    EXPECT_GT(largest, 0.0f);
  }
  EXPECT_EQ(basis.query_map, basis.key_map);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, KltTest, testing::Values(16, 64, 80, 128));

TEST(KltBasis, OfConstantKeysIsOrthonormal) {
  const std::vector<float> x = RandomData(DataKind::kConstant, 100, 16, 9);
  Moments moments(16, true);
  moments.Add(x.data(), 100);
  const Basis basis = KltBasis(moments, SecondMoment(16));
  for (std::size_t a = 0; a < 16; ++a) {
    for (std::size_t b = 0; b < 16; ++b) {
      double dot = 0;
      for (std::size_t i = 0; i < 16; ++i) {
        dot += static_cast<double>(basis.key_map[i * 16 + a]) * basis.key_map[i * 16 + b];
      }
      EXPECT_NEAR(dot, a == b ? 1.0 : 0.0, 1e-6);
    }
  }
}

TEST(KltBasis, RefusesNanWithTheRemedy) {
  std::vector<float> x = RandomData(DataKind::kNormal, 100, 16, 9);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  Moments moments(16, true);
  moments.Add(x.data(), 100);
  try {
    KltBasis(moments, SecondMoment(16));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("basis=raw"), std::string::npos);
  }
}

TEST(RawBasis, CentresKeysAndKeepsQueries) {
  const std::vector<double> center = {1.5, -2.0, 0.0, 100.25};
  const Basis basis = RawBasis(4, center);
  const Basis zero = RawBasis(4, {});
  EXPECT_TRUE(basis.is_identity());
  const std::vector<float> in = {1, 2, 3, 4, -1, -2, -3, -4};
  std::vector<float> out(8);
  basis.MapKeys(in.data(), 2, out.data());
  EXPECT_EQ(out, (std::vector<float>{-0.5, 4, 3, -96.25, -2.5, 0, -3, -104.25}));
  zero.MapKeys(in.data(), 2, out.data());
  EXPECT_EQ(out, in);
  out.assign(8, 0);
  basis.MapQueries(in.data(), 2, out.data());
  EXPECT_EQ(out, in);
}

// The contract of MapKeys: a sum in single precision over ascending i, whatever the kernel and the
// number of rows.
TEST(Basis, MapsEveryRowByTheSameSums) {
  for (const std::int32_t dim : {16, 72, 80, 128, 256}) {
    const std::vector<float> x = RandomData(DataKind::kHeavyTailed, 13, dim, 10);
    const auto d = static_cast<std::size_t>(dim);
    Basis basis = RawBasis(dim, std::vector<double>(d, 0.125));
    basis.key_map = test::RandomNormal(dim * dim, 11);
    basis.query_map = test::RandomNormal(dim * dim, 12);
    std::vector<float> keys(x.size()), queries(x.size());
    for (std::size_t at = 0; at < x.size(); ++at) {
      for (std::size_t i = 0; i < d; ++i) {
        const float value = x[at / d * d + i];
        keys[at] += (value - 0.125f) * basis.key_map[i * d + at % d];
        queries[at] += value * basis.query_map[i * d + at % d];
      }
    }
    for (std::int64_t n = 1; n <= 13; ++n) {
      const std::size_t size = Size(n) * d;
      std::vector<float> out(size);  // exact size: a sanitizer sees an overrun
      basis.MapKeys(x.data(), n, out.data());
      EXPECT_TRUE(std::equal(out.begin(), out.end(), keys.begin())) << dim << " " << n;
      basis.MapQueries(x.data(), n, out.data());
      EXPECT_TRUE(std::equal(out.begin(), out.end(), queries.begin())) << dim << " " << n;
    }
  }
}

}  // namespace
}  // namespace fathom
