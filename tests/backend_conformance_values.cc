// SPDX-License-Identifier: MIT
// Every backend against `ref`: values that are read only where they matter, by attend and by weigh.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/attend_cases.h"
#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// --- lazy values --------------------------------------------------------------------------------

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Keys of varied length, so that weights span many orders of magnitude.
AttendCase MakeLazy(std::int32_t dim, std::int32_t group, std::int64_t n, float least_weight) {
  AttendCase c = MakeAttend(dim, group, n, false);
  c.least_weight = least_weight;
  c.mean_value = RandomNormal(dim, 21);
  Random random(22);
  for (auto& rows : c.rows) {
    for (const std::int32_t token : c.tokens) {
      const double length = 4 * random.Uniform();
      for (std::int32_t d = 0; d < dim; ++d) {
        Half& k = rows[Size((2 * std::int64_t{token}) * dim + d)];
        k = FloatToHalf(static_cast<float>(length * HalfToFloat(k)));
      }
    }
  }
  return c;
}

// s - base - log(least_weight) of a query head for each listed row; NaN where it does not attend.
std::vector<double> Excess(const AttendCase& c, std::size_t kv, std::int32_t h) {
  const OffsetBuffer<float> q = AttendQueries(c);
  std::vector<double> score(c.tokens.size(), kNan);
  double base = 0;
  for (std::size_t i = 0; i < score.size(); ++i) {
    if ((c.mask[i] >> h & 1) == 0) continue;
    score[i] = 0;
    for (std::int32_t d = 0; d < c.dim; ++d) {
      score[i] += static_cast<double>(
                      q.data()[(Size(kv) * Size(c.group) + Size(h)) * Size(c.dim) + Size(d)]) *
                  HalfToFloat(c.rows[kv].data()[2 * std::int64_t{c.tokens[i]} * c.dim + d]) /
                  std::sqrt(c.dim);
    }
    const auto at = static_cast<std::int64_t>(i);
    if (at < kSinks || at >= c.n_attended - kWindow) base += std::exp(score[i]);
  }
  for (double& s : score) s -= std::log(base) + std::log(c.least_weight);
  return score;
}

class BackendLazyValues : public BackendTest {
 protected:
  void Check(const AttendCase& c) {
    const AttendState actual = RunAttend(backend(), c);
    ExpectSame(actual, RunAttend(ref(), c),
               "dim " + std::to_string(c.dim) + " group " + std::to_string(c.group) + " n " +
                   std::to_string(c.n_attended) + " least " + std::to_string(c.least_weight));
    AttendCase all = c;
    all.least_weight = 0;
    EXPECT_EQ(Bits(actual.lse), Bits(RunAttend(backend(), all).lse));
  }
};

TEST_P(BackendLazyValues, AreCloseToRef) {
  for (const std::int64_t n :
       {0, 1, 3, 4, 5, 35, 36, 37, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385, 511, 513, 1500}) {
    Check(MakeLazy(64, 4, n, 1e-2F));
  }
  for (const std::int32_t group : {1, 2, 3, 5, 6, 7, 8, 16}) {
    Check(MakeLazy(80, group, 300, 1e-3F));
  }
  for (const std::int32_t dim : {16, 48, 128, 256}) Check(MakeLazy(dim, 4, 600, 1e-2F));
  for (const float least : {1e-30F, 1e-6F, 1e-4F, 0.5F, 10.0F}) {
    Check(MakeLazy(64, 4, 900, least));
  }
  AttendCase without_mean = MakeLazy(64, 4, 900, 0.1F);
  without_mean.mean_value.clear();
  Check(without_mean);
}

TEST_P(BackendLazyValues, ValuesOfLightRowsMayHoldAnything) {
  const AttendCase clean = MakeLazy(64, 3, 700, 1e-2F);
  AttendCase dirty = clean;
  std::vector<std::int64_t> n_light(dirty.rows.size());
  for (std::size_t kv = 0; kv < dirty.rows.size(); ++kv) {
    std::vector<char> heavy(dirty.tokens.size());
    for (std::int32_t h = 0; h < 3; ++h) {
      const std::vector<double> excess = Excess(clean, kv, h);
      for (std::size_t i = 0; i < excess.size(); ++i) {
        EXPECT_FALSE(std::fabs(excess[i]) < 1e-5) << "too near to tell";
        if (excess[i] > 0) heavy[i] = 1;
      }
    }
    for (std::size_t i = 0; i < heavy.size(); ++i) {
      if (heavy[i] != 0) continue;
      ++n_light[kv];
      for (std::size_t d = 64; d < 128; ++d) {
        dirty.rows[kv][Size(dirty.tokens[i]) * 128 + d] = d % 2 == 0 ? 0x7E00 : 0x7C00;
      }
    }
    EXPECT_GT(n_light[kv], 100);
    EXPECT_LT(n_light[kv], 600);
  }
  const AttendState expected = RunAttend(backend(), clean);
  const AttendState actual = RunAttend(backend(), dirty);
  EXPECT_EQ(Bits(actual.out), Bits(expected.out));
  EXPECT_EQ(Bits(actual.lse), Bits(expected.lse));
  for (std::size_t kv = 0; kv < n_light.size(); ++kv) {
    EXPECT_EQ(actual.n_values[kv], 700 - n_light[kv]);
  }
}

TEST_P(BackendLazyValues, AllAreReadWhereNoneIsLight) {
  AttendCase c = MakeLazy(64, 4, 600, 1e-30F);
  const AttendState lazy = RunAttend(backend(), c);
  c.least_weight = 0;
  const AttendState all = RunAttend(backend(), c);
  EXPECT_TRUE(Near(lazy.out, all.out, 1e-6));
  EXPECT_EQ(lazy.n_values, all.n_values);
  EXPECT_EQ(lazy.n_values, (std::vector<std::int64_t>{600, 600}));
}

// Without a row among the first and last there is no bound, and everything is read.
TEST_P(BackendLazyValues, AHeadWithoutABoundReadsAll) {
  AttendCase c = MakeLazy(64, 2, 400, 0.9F);
  for (std::size_t i = 0; i < c.mask.size(); ++i) {
    const bool end = i < Size(kSinks) || i >= c.mask.size() - Size(kWindow);
    c.mask[i] = end ? 1 : 3;
  }
  Check(c);
  EXPECT_GE(RunAttend(backend(), c).n_values[0], 400 - kSinks - kWindow);
  for (auto& m : c.mask) m = 1;  // head 1 attends nothing
  Check(c);
}

TEST_P(BackendLazyValues, NotANumberByPlace) {
  for (const std::size_t row : {std::size_t{2}, std::size_t{300}, std::size_t{590}}) {
    AttendCase c = MakeLazy(64, 4, 600, 1e-2F);
    for (auto& m : c.mask) m = 15;
    c.rows[0][Size(c.tokens[row]) * 128 + 5] = 0x7E00;
    Check(c);
    const AttendState state = RunAttend(backend(), c);
    EXPECT_TRUE(std::isnan(state.out[3]) && std::isnan(state.lse[0]));
    EXPECT_FALSE(std::isnan(state.out[4 * 64]));
  }
}

TEST_P(BackendLazyValues, DenseHeadsReadAll) {
  AttendCase c = MakeAttend(64, 4, 700, true);
  const AttendState all = RunAttend(backend(), c);
  c.least_weight = 0.1F;
  const AttendState lazy = RunAttend(backend(), c);
  EXPECT_EQ(Bits(lazy.out), Bits(all.out));
  EXPECT_EQ(lazy.n_values, all.n_values);
}

TEST_P(BackendLazyValues, ThreadsDoNotChangeResults) {
  const AttendCase c = MakeLazy(64, 4, 3000, 1e-2F);
  const AttendState one = RunAttend(*WithThreads(1), c);
  for (const int threads : {2, 3}) {
    const AttendState more = RunAttend(*WithThreads(threads), c);
    EXPECT_EQ(Bits(more.out), Bits(one.out));
    EXPECT_EQ(Bits(more.lse), Bits(one.lse));
    EXPECT_EQ(more.n_values, one.n_values);
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendLazyValues);

// --- weigh --------------------------------------------------------------------------------------

struct WeighCase {
  std::int32_t dim = 64;
  std::int32_t group = 4;
  std::int64_t n_blocks = 0;
  OffsetBuffer<Half> means;   // [2][n_blocks][dim], of two KV heads
  OffsetBuffer<float> mean;   // [2][dim]
  OffsetBuffer<float> mass;   // [2][group][n_blocks]
  OffsetBuffer<float> least;  // [2][group]
  bool all_light = false;
};

// Masses between 1e-6 and 1; a quarter of them above `least`.
WeighCase MakeWeigh(std::int32_t dim, std::int32_t group, std::int64_t n_blocks) {
  Random random(31);
  std::vector<float> mass(Size(2 * group * n_blocks));
  for (float& m : mass) m = static_cast<float>(std::pow(10.0, -6 * random.Uniform()));
  std::vector<Half> means;
  for (const float x : RandomNormal(2 * n_blocks * dim, 32)) means.push_back(FloatToHalf(x));
  return {dim,
          group,
          n_blocks,
          OffsetBuffer<Half>(means),
          OffsetBuffer<float>(RandomNormal(std::int64_t{2} * dim, 33)),
          OffsetBuffer<float>(mass),
          OffsetBuffer<float>(Size(2 * group), 0.03F)};
}

struct WeighState {
  std::vector<float> out;
  std::vector<std::int64_t> n_read;
};

WeighState RunWeigh(const Backend& backend, const WeighCase& c) {
  const std::size_t out_size = Size(c.group) * Size(c.dim);
  OffsetBuffer<float> out(2 * out_size, 5.0F);
  std::vector<std::int64_t> n_read(2, -1);
  std::vector<WeighHead> heads;
  for (std::size_t h = 0; h < 2; ++h) {
    heads.push_back({c.all_light ? nullptr : c.means.data() + h * Size(c.n_blocks) * Size(c.dim),
                     c.mean.data() + h * Size(c.dim),
                     c.mass.data() + h * Size(c.group) * Size(c.n_blocks),
                     c.all_light ? nullptr : c.least.data() + h * Size(c.group),
                     out.data() + h * out_size, &n_read[h]});
  }
  backend.Weigh({c.dim, c.group, c.n_blocks, heads});
  return {{out.span().begin(), out.span().end()}, n_read};
}

class BackendWeigh : public BackendTest {
 protected:
  void Check(const WeighCase& c) {
    const WeighState actual = RunWeigh(backend(), c);
    const WeighState expected = RunWeigh(ref(), c);
    EXPECT_TRUE(Near(actual.out, expected.out, 2e-6))
        << "dim " << c.dim << " group " << c.group << " blocks " << c.n_blocks;
    EXPECT_EQ(actual.n_read, expected.n_read);
  }
};

TEST_P(BackendWeigh, IsCloseToRef) {
  for (const std::int64_t n : {0, 1, 3, 7, 15, 16, 17, 63, 64, 65, 128, 130, 700}) {
    WeighCase c = MakeWeigh(64, 4, n);
    Check(c);
    c.all_light = true;
    Check(c);
  }
  for (const std::int32_t group : {1, 2, 3, 5, 6, 7, 8, 16}) Check(MakeWeigh(80, group, 130));
  for (const std::int32_t dim : {16, 48, 128, 256}) Check(MakeWeigh(dim, 4, 130));
}

TEST_P(BackendWeigh, ReadsWhatExceedsTheLimitOfAHead) {
  WeighCase c = MakeWeigh(64, 2, 100);
  for (std::size_t i = 0; i < c.mass.size(); ++i) c.mass[i] = 0.03F;  // not above: equal
  c.least[2] = 1;                                                     // KV head 1
  c.mass[2 * 100 + 100 + 70] = 0.04F;                                 // its query head 1
  const WeighState state = RunWeigh(backend(), c);
  EXPECT_EQ(state.n_read, (std::vector<std::int64_t>{0, 1}));
  Check(c);
  for (std::size_t i = 0; i < c.least.size(); ++i) c.least[i] = -1;
  EXPECT_EQ(RunWeigh(backend(), c).n_read, (std::vector<std::int64_t>{100, 100}));
  Check(c);
}

TEST_P(BackendWeigh, MeansThatAreNotReadMayHoldAnything) {
  const WeighCase clean = MakeWeigh(64, 4, 200);
  WeighCase dirty = clean;
  std::int64_t n_light = 0;
  for (std::size_t b = 0; b < 200; ++b) {
    bool read = false;
    for (std::size_t h = 0; h < 4; ++h) read = read || clean.mass.data()[h * 200 + b] > 0.03F;
    if (read) continue;
    ++n_light;
    for (std::size_t d = 0; d < 64; ++d) dirty.means[b * 64 + d] = 0x7E00;
  }
  EXPECT_GT(n_light, 20);
  EXPECT_EQ(Bits(RunWeigh(backend(), dirty).out), Bits(RunWeigh(backend(), clean).out));
}

TEST_P(BackendWeigh, MassesThatAreNotFinite) {
  for (const float bad : {kNan, kInf}) {
    WeighCase c = MakeWeigh(64, 3, 100);
    c.mass[100 + 17] = bad;  // KV head 0, query head 1
    Check(c);
    const WeighState state = RunWeigh(backend(), c);
    EXPECT_FALSE(std::isfinite(state.out[64]));
    EXPECT_TRUE(std::isfinite(state.out[3 * 64]));
  }
  WeighCase c = MakeWeigh(64, 3, 100);
  c.least[0] = kNan;
  c.least[1] = kInf;
  Check(c);
}

TEST_P(BackendWeigh, ThreadsDoNotChangeResults) {
  const WeighCase c = MakeWeigh(64, 4, 1000);
  const WeighState one = RunWeigh(*WithThreads(1), c);
  for (const int threads : {2, 3}) {
    const WeighState more = RunWeigh(*WithThreads(threads), c);
    EXPECT_EQ(Bits(more.out), Bits(one.out));
    EXPECT_EQ(more.n_read, one.n_read);
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendWeigh);

}  // namespace
}  // namespace fathom::test
