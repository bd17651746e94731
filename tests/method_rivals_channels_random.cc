// SPDX-License-Identifier: MIT
// Random sessions: rival methods against plain re-implementations in double.
#include <gtest/gtest.h>

#include <Eigen/Eigenvalues>
#include <functional>
#include <numeric>

#include "support/compare.h"
#include "support/rival_session.h"

namespace fathom {
namespace {

using test::Size;
using test::Winners;
using Session = test::RivalSession;
using Channels = std::vector<std::int64_t>;

constexpr std::int32_t kGroup = 3, kDim = 16;
constexpr std::int64_t kTokens = 500, kIndexed = 448;

Session RandomSession(std::uint64_t seed) {
  Session session(kGroup, kDim, kTokens);
  session.keys = test::RandomData(test::DataKind::kHeavyTailed, kTokens, kDim, seed);
  for (std::size_t i = 0; i < session.keys.size(); ++i) {
    session.keys[i] += 0.1F * static_cast<float>(i % kDim);
  }
  session.values = test::RandomNormal(kTokens * kDim, seed + 1);
  session.q = test::RandomNormal(kGroup * kDim, seed + 2, 0.4);
  session.RandomSamples(seed + 3);
  return session;
}

// Keys and queries in the coordinates of a basis.
struct Coordinates {
  Eigen::MatrixXd keys;      // [n][D]
  Eigen::MatrixXd queries;   // [group][D]
  Eigen::MatrixXd samples;   // [samples * group][D]
  Eigen::VectorXd variance;  // [D]

  Coordinates(const Session& session, bool klt)
      : keys(kTokens, kDim),
        queries(kGroup, kDim),
        samples(session.queries[0].samples.size() * kGroup, kDim) {
    for (Eigen::Index j = 0; j < kDim; ++j) {
      for (Eigen::Index i = 0; i < kTokens; ++i) keys(i, j) = session.K(i, j);
      for (Eigen::Index h = 0; h < kGroup; ++h) queries(h, j) = session.q[Size(h * kDim + j)];
      for (Eigen::Index s = 0; s < samples.rows(); ++s) {
        samples(s, j) = session.queries[0].samples.query(s / kGroup)[s % kGroup * kDim + j];
      }
    }
    if (klt) Rotate();
  }

 private:
  // Principal axes, by falling key variance times mean square of the sampled queries.
  void Rotate() {
    const Eigen::MatrixXd seen = keys.bottomRows(kTokens - 16);
    const Eigen::RowVectorXd mean = seen.colwise().mean();
    const Eigen::MatrixXd centred = seen.rowwise() - mean;
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(centred.transpose() * centred /
                                                                (kTokens - 17.0));
    Eigen::MatrixXd axes = solver.eigenvectors();
    Channels order(kDim);
    std::iota(order.begin(), order.end(), 0);
    const Eigen::VectorXd energy = (samples * axes).colwise().squaredNorm();
    std::ranges::sort(order, [&](auto a, auto b) {
      return energy[a] * solver.eigenvalues()[a] > energy[b] * solver.eigenvalues()[b];
    });
    Eigen::MatrixXd sorted(kDim, kDim);
    variance.resize(kDim);
    for (Eigen::Index j = 0; j < kDim; ++j) {
      Eigen::Index largest = 0;
      axes.col(order[Size(j)]).cwiseAbs().maxCoeff(&largest);
      sorted.col(j) = axes.col(order[Size(j)]) * (axes(largest, order[Size(j)]) < 0 ? -1 : 1);
      variance[j] = solver.eigenvalues()[order[Size(j)]];
    }
    keys = (keys.rowwise() - mean) * sorted;
    queries *= sorted;
    samples *= sorted;
  }
};

Channels Largest(const Eigen::VectorXd& weight, std::size_t n) {
  Channels order(Size(weight.size()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](auto a, auto b) { return weight[a] > weight[b]; });
  order.resize(n);
  return order;
}

// No token left out has a better score than a winner, up to `bound` of the largest score.
using ScoreFn = std::function<double(std::int64_t head, std::int64_t token)>;
void ExpectBest(const Session& session, const ScoreFn& score, double bound,
                const std::string& name) {
  for (std::int32_t h = 0; h < kGroup; ++h) {
    const Winners winners = session.Of(h);
    ASSERT_EQ(winners.size(), 44U) << name;
    double worst = INFINITY, best_left = -INFINITY, largest = 0;
    for (std::int64_t i = kSinks; i < session.last(); ++i) {
      const double s = score(h, i);
      largest = std::max(largest, std::fabs(s));
      if (winners.count(i) != 0) {
        worst = std::min(worst, s);
      } else {
        best_left = std::max(best_left, s);
      }
    }
    EXPECT_GE(worst, best_left - bound * largest) << name << " head " << h;
  }
}

// Scale of a channel in the token's block.
float BlockScale(const Coordinates& x, std::int64_t token, std::int64_t channel) {
  const double top = x.keys.block(token / 64 * 64, channel, 64, 1).cwiseAbs().maxCoeff();
  return HalfToFloat(FloatToHalf(static_cast<float>(top)));
}

// Value of a key in `planes` bits, in units of the scale.
double Coded(const Coordinates& x, std::int64_t token, std::int64_t channel, int planes,
             float scale) {
  const float cell = std::floor(static_cast<float>(x.keys(token, channel)) / (scale / 8));
  const int code = static_cast<int>(std::clamp(cell, -8.F, 7.F)) + 8;
  const int half = 1 << (planes - 1);
  return ((code >> (4 - planes)) + .5 - half) / half;
}

// The products of query and scale are rounded to 127 steps of the block's largest.
ScoreFn CodedScore(const Coordinates& x, std::vector<Channels> channels, int planes) {
  return [&x, channels = std::move(channels), planes](std::int64_t h, std::int64_t token) {
    std::vector<float> scales, products;
    float most = 0;
    for (const auto c : channels[Size(h)]) {
      scales.push_back(BlockScale(x, token, c));
      products.push_back(static_cast<float>(x.queries(h, c)) * scales.back());
      most = std::max(most, std::fabs(products.back()));
    }
    double sum = 0;
    for (std::size_t i = 0; i < scales.size(); ++i) {
      sum += std::nearbyint(products[i] * (127 / most)) *
             Coded(x, token, channels[Size(h)][i], planes, scales[i]);
    }
    return sum * most / 127;
  };
}

ScoreFn ExactScore(const Coordinates& x, Channels channels) {
  return [&x, channels = std::move(channels)](std::int64_t h, std::int64_t token) {
    double sum = 0;
    for (const auto c : channels) sum += x.queries(h, c) * x.keys(token, c);
    return sum;
  };
}

// The common rules in one basis.
void CheckCommon(std::uint64_t seed, bool klt) {
  Session session = RandomSession(100 * seed);
  const Coordinates x(session, klt);
  const std::string basis = klt ? ",basis=klt" : ",basis=raw";
  const auto check = [&](const std::string& spec, const std::vector<Channels>& channels,
                         int planes) {
    session.Run(spec + basis + ",k=80");
    // In a basis of our own making one of the products may lie on the other side of a half.
    ExpectBest(session, CodedScore(x, channels, planes), klt ? 4e-3 : 1e-5, spec + basis);
  };
  const auto shared = [](const Channels& channels) {
    return std::vector<Channels>(kGroup, channels);
  };
  Channels all(kDim);
  std::iota(all.begin(), all.end(), 0);
  const Eigen::VectorXd abs_key = x.keys.topRows(kIndexed).cwiseAbs().colwise().sum();
  const Eigen::VectorXd abs_query = x.samples.cwiseAbs().colwise().sum();
  const Eigen::MatrixXd q = x.queries.cwiseAbs();
  check("double-sparsity:c=5", shared(Largest(abs_key.cwiseProduct(abs_query), 5)), 4);
  check("sparq:r=5", shared(Largest(q.colwise().sum(), 5)), 4);
  check("sparq:r=4,channels=head",
        {Largest(q.row(0), 4), Largest(q.row(1), 4), Largest(q.row(2), 4)}, 4);
  check("full4:residual=off", shared(all), 4);
  for (int planes = 1; planes <= 4; ++planes) {
    check("thumbnail:planes=" + std::to_string(planes), shared(all), planes);
  }
  if (klt) check("loki:r=3", shared({0, 1, 2}), 4);
}

TEST(RivalsAtRandom, CommonRules) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CheckCommon(seed, false);
    CheckCommon(seed, true);
  }
}

// Tables are fp16: relative errors of up to 2^-11 per product.
constexpr double kHalfBound = 2e-3;

TEST(RivalsAtRandom, LokiByItsAuthors) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Session session = RandomSession(300 * seed);
    const Coordinates x(session, true);
    session.Run("loki:rule=author,r=3,k=80");
    ExpectBest(session, ExactScore(x, Largest(x.variance, 3)), kHalfBound, "loki");
  }
}

// Asymmetric 15 steps over the channels of one vector; minimum and scale in fp16.
std::vector<double> Labels(const Eigen::VectorXd& x, const Channels& channels) {
  double low = INFINITY, high = -INFINITY;
  for (const auto c : channels) {
    low = std::min(low, x[c]);
    high = std::max(high, x[c]);
  }
  const auto half = [](double v) { return HalfToFloat(FloatToHalf(static_cast<float>(v))); };
  const double scale = half((high - low) / 15), minimum = half(low);
  std::vector<double> labels;
  for (const auto c : channels) {
    const double code = std::clamp(std::nearbyint((x[c] - minimum) / scale), 0.0, 15.0);
    labels.push_back(code * scale + minimum);
  }
  return labels;
}

TEST(RivalsAtRandom, DoubleSparsityByItsAuthors) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Session session = RandomSession(700 * seed);
    const Coordinates x(session, false);
    const Channels by_key = Largest(x.keys.topRows(kIndexed).cwiseAbs().colwise().sum(), 6);
    session.Run("double-sparsity:rule=author,c=6,labels=fp16,k=80");
    ExpectBest(session, ExactScore(x, by_key), 1e-5, "fp16");
    const auto score_of = [&](const std::vector<Channels>& channels) -> ScoreFn {
      return [&x, channels](std::int64_t h, std::int64_t token) {
        const auto q = Labels(x.queries.row(h), channels[Size(h)]);
        const auto k = Labels(x.keys.row(token), channels[Size(h)]);
        return std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
      };
    };
    session.Run("double-sparsity:rule=author,c=6,k=80");
    ExpectBest(session, score_of({by_key, by_key, by_key}), kHalfBound, "4bit");
    std::vector<Channels> by_product;
    for (std::int64_t h = 0; h < kGroup; ++h) {
      Eigen::VectorXd sum = Eigen::VectorXd::Zero(kDim);
      for (Eigen::Index s = h; s < x.samples.rows(); s += kGroup) {
        const auto position = session.queries[0].samples.positions()[Size(s / kGroup)];
        sum += x.samples.row(s).cwiseProduct(x.keys.row(position)).cwiseAbs().transpose();
      }
      by_product.push_back(Largest(sum, 6));
    }
    session.Run("double-sparsity:rule=author,c=6,k=80,order=qk");
    ExpectBest(session, score_of(by_product), kHalfBound, "4bit, qk");
  }
}

// SparQ's authors: estimated logits of all tokens, 1/sqrt(D) included. [n][group]
Eigen::MatrixXd SparqLogits(const Coordinates& x, std::size_t r) {
  Eigen::MatrixXd logits = Eigen::MatrixXd::Zero(kTokens, kGroup);
  const Eigen::MatrixXd q = x.queries.cwiseAbs();
  const Channels channels = Largest(q.colwise().sum(), r);
  for (Eigen::Index h = 0; h < kGroup; ++h) {
    double chosen = 0;
    for (const auto c : channels) {
      chosen += q(h, c);
      logits.col(h) += x.queries(h, c) * x.keys.col(c);
    }
    logits.col(h) /= std::sqrt(kDim * chosen / q.row(h).sum());
  }
  return logits;
}

// w attention + (1 - w) mean value of one head, given what was selected.
Eigen::RowVectorXd Reallocated(const Session& session, const Eigen::VectorXd& estimate,
                               std::int32_t head) {
  const Coordinates x(session, false);
  Eigen::MatrixXd values(kTokens, kDim);
  for (Eigen::Index i = 0; i < kTokens; ++i) {
    for (Eigen::Index d = 0; d < kDim; ++d) {
      values(i, d) = HalfToFloat(FloatToHalf(session.values[Size(i * kDim + d)]));
    }
  }
  const Eigen::VectorXd logits = x.keys * x.queries.row(head).transpose() / std::sqrt(1.0 * kDim);
  const Winners winners = session.Of(head);
  double chosen = 0, exact = 0;
  Eigen::RowVectorXd out = Eigen::RowVectorXd::Zero(kDim);
  for (std::int64_t i = 0; i < kTokens; ++i) {
    if (i >= kSinks && i < session.last() && winners.count(i) == 0) continue;
    chosen += std::exp(estimate[i]);
    exact += std::exp(logits[i]);
    out += std::exp(logits[i]) * values.row(i);
  }
  const double w = chosen / estimate.array().exp().sum();
  return w * out / exact + (1 - w) * values.topRows(kIndexed).colwise().mean();
}

TEST(RivalsAtRandom, SparqByItsAuthors) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    for (const bool klt : {false, true}) {
      Session session = RandomSession(1000 * seed);
      const Eigen::MatrixXd logits = SparqLogits(Coordinates(session, klt), 5);
      session.Run(std::string("sparq:r=5,rule=author,k=80,basis=") + (klt ? "klt" : "raw"));
      const auto sum = [&](std::int64_t, std::int64_t token) { return logits.row(token).sum(); };
      ExpectBest(session, sum, klt ? kHalfBound : 1e-5, "sparq");
      std::vector<double> expected;
      for (std::int32_t h = 0; h < kGroup; ++h) {
        const Eigen::RowVectorXd out = Reallocated(session, logits.col(h), h);
        expected.insert(expected.end(), out.begin(), out.end());
      }
      EXPECT_TRUE(test::Near(session.out, expected, klt ? 1e-3 : 1e-5)) << seed;
    }
  }
}

// FFD: blocks of 128 by the largest margin of a head over its probes; tokens 384 .. 447 are half an
// unfinished block and come first.
TEST(RivalsAtRandom, Ffd) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Session session = RandomSession(5000 * seed);
    const Coordinates x(session, false);
    Eigen::VectorXd margin = Eigen::VectorXd::Constant(3, -INFINITY);
    for (Eigen::Index h = 0; h < kGroup; ++h) {
      Eigen::VectorXd top = Eigen::VectorXd::Constant(3, -INFINITY);
      for (Eigen::Index i = 0; i < 384; ++i) {
        double score = 0;
        for (Eigen::Index j = 0; j < kDim; ++j) {
          const double scale = x.keys.block(i / 128 * 128, j, 128, 1).cwiseAbs().maxCoeff() / 1.5;
          const double code = std::clamp(std::nearbyint(x.keys(i, j) / scale + 1.5), 0.0, 3.0);
          score += x.queries(h, j) * (code - 1.5) * scale;
        }
        top[i / 128] = std::max(top[i / 128], score);
      }
      margin = margin.cwiseMax(top - Eigen::VectorXd::Constant(3, std::max(top[0], top[2])));
    }
    Winners expected;
    for (std::int64_t i = 384; i < session.last(); ++i) expected.insert(i);
    for (const auto block : Largest(margin, 3)) {
      for (std::int64_t i = std::max<std::int64_t>(block * 128, kSinks);
           i < (block + 1) * 128 && expected.size() < 264; ++i) {
        expected.insert(i);
      }
    }
    session.Run("thumbnail:rule=ffd,k=300");
    for (std::int32_t h = 0; h < kGroup; ++h) EXPECT_EQ(session.Of(h), expected) << seed;
  }
}

TEST(RivalsAtRandom, KeysThatAreNoNumbers) {
  for (const std::string spec :
       {"double-sparsity:c=5", "double-sparsity:rule=author,c=5",
        "double-sparsity:rule=author,c=5,labels=fp16,order=qk", "loki:basis=raw,r=5",
        "loki:basis=raw,r=5,rule=author", "sparq:r=5", "sparq:r=5,channels=head",
        "sparq:r=5,rule=author", "thumbnail:planes=2", "thumbnail:rule=ffd", "full4:basis=raw"}) {
    Session session = RandomSession(9);
    session.Key(100, 3) = NAN;
    for (std::int64_t j = 0; j < kDim; ++j) session.Key(301, j) = NAN;
    session.Key(200, 5) = INFINITY;
    session.Run(spec + ",k=80");
    for (std::int32_t h = 0; h < kGroup; ++h) EXPECT_EQ(session.Of(h).size(), 44U) << spec;
  }
}

}  // namespace
}  // namespace fathom
