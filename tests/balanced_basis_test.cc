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

// [n][dim] of coupled channels: half of each vector is mixed from the others.
std::vector<float> Coupled(std::int64_t n, std::int32_t dim, std::uint64_t seed) {
  const std::vector<float> z = test::RandomNormal(n * dim, seed);
  const std::vector<float> mix =
      test::RandomNormal(std::int64_t{dim} * dim, seed + 1, 1.0 / std::sqrt(dim));
  std::vector<float> x = z;
  for (std::int64_t t = 0; t < n; ++t) {
    for (std::int64_t i = 0; i < dim; ++i) {
      for (std::int64_t j = 0; j < dim; ++j) {
        x[Size(t * dim + j)] += z[Size(t * dim + i)] * mix[Size(i * dim + j)];
      }
    }
  }
  return x;
}

// The shrunk matrix of the definition.
std::vector<double> Shrunk(std::vector<double> m, std::size_t dim, double towards,
                           double identity) {
  double trace = 0;
  for (std::size_t j = 0; j < dim; ++j) trace += m[j * dim + j];
  for (std::size_t i = 0; i < dim * dim; ++i) {
    if (i / dim == i % dim) {
      m[i] += identity * trace / static_cast<double>(dim);
    } else {
      m[i] *= 1 - towards;
    }
  }
  return m;
}

// map^T m map.
std::vector<double> Congruent(const std::vector<double>& m, const std::vector<float>& map,
                              std::size_t dim) {
  std::vector<double> half(dim * dim), out(dim * dim);
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t k = 0; k < dim; ++k) {
      for (std::size_t j = 0; j < dim; ++j) {
        half[i * dim + j] += m[i * dim + k] * map[k * dim + j];
      }
    }
  }
  for (std::size_t k = 0; k < dim; ++k) {
    for (std::size_t i = 0; i < dim; ++i) {
      for (std::size_t j = 0; j < dim; ++j) {
        out[i * dim + j] += map[k * dim + i] * half[k * dim + j];
      }
    }
  }
  return out;
}

std::vector<double> Diagonal(const std::vector<double>& m, std::size_t dim) {
  std::vector<double> d(dim);
  for (std::size_t j = 0; j < dim; ++j) d[j] = m[j * dim + j];
  return d;
}

Moments MomentsOf(const std::vector<float>& keys, std::int32_t dim) {
  Moments moments(dim, true);
  moments.Add(keys.data(), static_cast<std::int64_t>(keys.size()) / dim);
  return moments;
}

SecondMoment SecondMomentOf(const std::vector<float>& queries, std::int32_t dim) {
  SecondMoment second(dim);
  second.Add(queries.data(), static_cast<std::int64_t>(queries.size()) / dim, dim);
  return second;
}

// Largest |q~ . x - q . (k - mu)| / (|q| |k - mu|) over all pairs; inf where that is NaN.
double WorstScoreError(const Basis& basis, const std::vector<float>& keys,
                       const std::vector<float>& queries) {
  const std::size_t dim = Size(basis.dim);
  const std::size_t n = keys.size() / dim, n_queries = queries.size() / dim;
  std::vector<float> x(keys.size()), q(queries.size());
  basis.MapKeys(keys.data(), static_cast<std::int64_t>(n), x.data());
  basis.MapQueries(queries.data(), static_cast<std::int64_t>(n_queries), q.data());
  double worst = 0;
  for (std::size_t h = 0; h < n_queries; ++h) {
    for (std::size_t t = 0; t < n; ++t) {
      double exact = 0, mapped = 0, k2 = 0, q2 = 0;
      for (std::size_t j = 0; j < dim; ++j) {
        const double k = static_cast<double>(keys[t * dim + j]) - basis.center[j];
        exact += queries[h * dim + j] * k;
        mapped += static_cast<double>(q[h * dim + j]) * x[t * dim + j];
        k2 += k * k;
        q2 += static_cast<double>(queries[h * dim + j]) * queries[h * dim + j];
      }
      const double error = std::fabs(mapped - exact) / std::sqrt(k2 * q2);
      worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
  }
  return worst;
}

std::string RefusalOf(const Moments& keys, const SecondMoment& queries) {
  try {
    BalancedBasis(keys, queries);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "no error";
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Coupled keys with a bias, one channel 500 times as large as the others and one 500 times smaller;
// queries that prefer some directions.
class BalancedBasisTest : public testing::TestWithParam<std::int32_t> {
 protected:
  void SetUp() override {
    dim_ = GetParam();
    const std::int64_t tokens = 3 * std::int64_t{dim_};
    keys_ = Coupled(tokens, dim_, 1);
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const std::size_t j = i % Size(dim_);
      keys_[i] += static_cast<float>(j % 7) * 3.0f;
      if (j == 5) keys_[i] *= 500.0f;
      if (j == 9) keys_[i] /= 500.0f;
    }
    queries_ = Coupled(40, dim_, 3);
    for (std::size_t i = 0; i < queries_.size(); i += 3) queries_[i] *= 4.0f;
  }

  std::int32_t dim_ = 0;
  std::vector<float> keys_, queries_;
};

TEST_P(BalancedBasisTest, KeepsScores) {
  const SecondMoment none(dim_);
  const Moments keys = MomentsOf(keys_, dim_);
  const Basis basis = BalancedBasis(keys, SecondMomentOf(queries_, dim_));
  ASSERT_FALSE(basis.is_identity());
  EXPECT_LT(WorstScoreError(basis, keys_, queries_), 1e-4);
  EXPECT_LT(WorstScoreError(BalancedBasis(keys, none), keys_, queries_), 1e-4);
}

TEST_P(BalancedBasisTest, MakesBothSidesDiagonalWithFallingEnergy) {
  const std::size_t dim = Size(dim_);
  const Moments keys = MomentsOf(keys_, dim_);
  const SecondMoment queries = SecondMomentOf(queries_, dim_);
  const Basis basis = BalancedBasis(keys, queries);
  const std::vector<double> c_k = Shrunk(keys.Covariance(), dim, 0.2, 1e-4);
  const std::vector<double> c_q = Shrunk(queries.Matrix(), dim, 0.5, 1e-3);

  std::vector<double> identity(dim * dim);
  for (std::size_t j = 0; j < dim; ++j) identity[j * dim + j] = 1;
  EXPECT_TRUE(Near(Congruent(c_k, basis.key_map, dim), identity, 1e-4));
  const std::vector<double> q = Congruent(c_q, basis.query_map, dim);
  std::vector<double> diagonal(dim * dim);
  for (std::size_t j = 0; j < dim; ++j) diagonal[j * dim + j] = q[j * dim + j];
  EXPECT_TRUE(Near(q, diagonal, 1e-5));
  const std::vector<double> s = Diagonal(q, dim);
  for (std::size_t j = 0; j + 1 < dim; ++j) EXPECT_GE(s[j] * (1 + 1e-4), s[j + 1]) << j;
  EXPECT_GT(s[0], 1e3 * s[dim - 1]);

  // As uneven as can be: no basis has a smaller geometric mean of variance times energy.
  const Basis klt = KltBasis(keys, queries);
  const std::vector<double> klt_k = Diagonal(Congruent(c_k, klt.key_map, dim), dim);
  const std::vector<double> klt_q = Diagonal(Congruent(c_q, klt.query_map, dim), dim);
  double balanced = 0, by_klt = 0, raw = 0;
  for (std::size_t j = 0; j < dim; ++j) {
    balanced += std::log(s[j]);
    by_klt += std::log(klt_k[j] * klt_q[j]);
    raw += std::log(c_k[j * dim + j] * c_q[j * dim + j]);
  }
  EXPECT_LT(balanced, by_klt);
  EXPECT_LT(balanced, raw);
}

TEST_P(BalancedBasisTest, IsTheSameEveryTimeAndFixesSigns) {
  const std::size_t dim = Size(dim_);
  const Basis a = BalancedBasis(MomentsOf(keys_, dim_), SecondMomentOf(queries_, dim_));
  const Basis b = BalancedBasis(MomentsOf(keys_, dim_), SecondMomentOf(queries_, dim_));
  EXPECT_EQ(a.center, b.center);
  EXPECT_EQ(a.key_map, b.key_map);
  EXPECT_EQ(a.query_map, b.query_map);
  for (std::size_t j = 0; j < dim; ++j) {
    float largest = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      const float v = a.query_map[i * dim + j];
      if (std::fabs(v) > std::fabs(largest)) largest = v;
    }
    EXPECT_GT(largest, 0.0f) << j;
  }
}

TEST_P(BalancedBasisTest, WithoutQueriesIsTheKltOfTheShrunkKeys) {
  const std::size_t dim = Size(dim_);
  const Moments keys = MomentsOf(keys_, dim_);
  const Basis basis = BalancedBasis(keys, SecondMoment(dim_));
  // query_map = V diag(sqrt(lambda)): its columns are orthogonal, the longest first.
  std::vector<double> identity(dim * dim);
  for (std::size_t j = 0; j < dim; ++j) identity[j * dim + j] = 1;
  const std::vector<double> gram = Congruent(identity, basis.query_map, dim);
  std::vector<double> diagonal(dim * dim);
  for (std::size_t j = 0; j < dim; ++j) diagonal[j * dim + j] = gram[j * dim + j];
  EXPECT_TRUE(Near(gram, diagonal, 1e-5));
  for (std::size_t j = 0; j + 1 < dim; ++j) {
    EXPECT_GE(diagonal[j * dim + j] * (1 + 1e-4), diagonal[(j + 1) * dim + j + 1]);
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, BalancedBasisTest, testing::Values(64, 80, 128, 256));

TEST(BalancedBasis, OfDegenerateKeysKeepsScores) {
  const std::vector<float> queries = Coupled(8, 64, 7);
  const SecondMoment second = SecondMomentOf(queries, 64);
  for (const std::int64_t tokens : {2, 3, 20, 200}) {  // also fewer than channels
    std::vector<float> keys = Coupled(tokens, 64, 5);
    for (std::size_t i = 0; i < keys.size(); i += 64) {
      keys[i + 3] = 7.0f;         // a constant channel
      keys[i + 4] = keys[i + 5];  // a repeated one
    }
    const Basis basis = BalancedBasis(MomentsOf(keys, 64), second);
    EXPECT_LT(WorstScoreError(basis, keys, queries), 1e-4) << tokens;
  }
  // Queries that are zero say nothing; the map stays exact.
  const std::vector<float> keys = Coupled(200, 64, 5);
  const SecondMoment zero = SecondMomentOf(std::vector<float>(64 * 4), 64);
  EXPECT_LT(WorstScoreError(BalancedBasis(MomentsOf(keys, 64), zero), keys, queries), 1e-4);
}

TEST(BalancedBasis, RefusesWhatHasNoCovariance) {
  const SecondMoment queries = SecondMomentOf(Coupled(8, 64, 7), 64);
  const std::vector<float> constant = RandomData(DataKind::kConstant, 100, 64, 9);
  const std::string message = RefusalOf(MomentsOf(constant, 64), queries);
  EXPECT_TRUE(Contains(message, "100 tokens")) << message;
  EXPECT_TRUE(Contains(message, "basis=raw")) << message;
  const std::vector<float> one = test::RandomNormal(64, 9);
  EXPECT_TRUE(Contains(RefusalOf(MomentsOf(one, 64), queries), "of 1 token"));
  EXPECT_TRUE(Contains(RefusalOf(Moments(64, true), queries), "of 0 tokens"));
}

TEST(BalancedBasis, RefusesNanInfAndWhatFloatsCannotHold) {
  const std::vector<float> keys = Coupled(100, 64, 5), queries = Coupled(8, 64, 7);
  for (const float bad : {NAN, HUGE_VALF}) {
    std::vector<float> bad_keys = keys, bad_queries = queries;
    bad_keys[130] = bad;
    bad_queries[130] = bad;
    const std::string of_keys = RefusalOf(MomentsOf(bad_keys, 64), SecondMomentOf(queries, 64));
    const std::string of_queries = RefusalOf(MomentsOf(keys, 64), SecondMomentOf(bad_queries, 64));
    EXPECT_TRUE(Contains(of_keys, "NaN") && Contains(of_keys, "100 tokens")) << of_keys;
    EXPECT_TRUE(Contains(of_queries, "queries") && Contains(of_queries, "basis=raw")) << of_queries;
  }
  std::vector<float> tiny = keys;
  for (float& k : tiny) k *= 1e-42f;
  EXPECT_TRUE(Contains(RefusalOf(MomentsOf(tiny, 64), SecondMomentOf(queries, 64)), "precision"));
}

}  // namespace
}  // namespace fathom
