// SPDX-License-Identifier: MIT
// Double Sparsity, Loki, SparQ, thumbnail (FFD) and all planes: cases worked out by hand from the
// definitions. Comparisons on random sessions: method_rivals_channels_random.cc.
#include <gtest/gtest.h>

#include <array>
#include <map>

#include "method/ffd.h"
#include "method/label_method.h"
#include "support/rival_session.h"

namespace fathom {
namespace {

using test::Size;
using test::Winners;
using Session = test::RivalSession;

// The published example (tests/worked_example_test.cc): its six keys are tokens 20 .. 25 of a
// session of zero keys, its heads A and B are heads 0 and 1. Two winners per head.
constexpr float kExample[6][4] = {{1.8F, .4F, -.2F, .05F},  {-1.1F, .9F, .3F, -.02F},
                                  {.3F, -1.2F, .1F, .04F},  {1.2F, .7F, .4F, .01F},
                                  {-.6F, -.3F, -.5F, .03F}, {.9F, 1.1F, -.3F, -.05F}};

class WorkedExample : public testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 6; ++i) {
      for (int j = 0; j < 4; ++j) session_.Key(20 + i, j) = kExample[i][j];
    }
    session_.q.assign(32, 0.0F);
    std::ranges::copy(std::array{3.F, 1.F, 2.F, .1F}, session_.q.begin());
    std::ranges::copy(std::array{1.F, 2.F, -1.F, .2F}, session_.q.begin() + 16);
    session_.Sample(30, {{3, 1, 2, .1F}, {1, 2, -1, .2F}});
  }
  void Expect(const std::string& spec, const Winners& a, const Winners& b, double bits) {
    session_.Run(spec + ",k=38");
    Winners shifted_a, shifted_b;
    for (const auto t : session_.Of(0)) shifted_a.insert(t - 20);
    for (const auto t : session_.Of(1)) shifted_b.insert(t - 20);
    EXPECT_EQ(shifted_a, a) << spec;
    EXPECT_EQ(shifted_b, b) << spec;
    EXPECT_DOUBLE_EQ(session_.bits(), bits) << spec;
  }
  Session session_{2, 16, 128};
};

// sum |k_j| over the keys: 5.9, 4.6, 1.8, .2; mean |q_j|: 2, 1.5, 1.5, .15: channels 0 and 1. Their
// 4-bit values: channel 0 (cell .225): 1.6875 -1.0125 .3375 1.2375 -.5625 1.0125; channel 1 (cell
// .15): .375 .825 -1.125 .675 -.225 1.125. So A = 3 x0 + x1: 5.44 -2.21 -.11 4.39 -1.91 4.16 and
// B = x0 + 2 x1: 2.44 .64 -1.91 2.59 -1.01 3.26; zero keys, in the cell above zero, .41 and .26.
TEST_F(WorkedExample, DoubleSparsity) {
  Expect("double-sparsity:c=2", {0, 3}, {5, 3}, 8.5);
  session_.queries[0].samples.Clear();  // by the keys alone: the same two
  Expect("double-sparsity:c=2", {0, 3}, {5, 3}, 8.5);
}

// fp16 labels: A = 5.8 -2.4 -.3 4.3 -2.1 3.8, B = 2.600 .7 -2.1 2.601 -1.2 3.1 (1.8 and .4 are
// rounded down to fp16, 1.2 and .7 up).
TEST_F(WorkedExample, DoubleSparsityByItsAuthorsInHalf) {
  Expect("double-sparsity:c=2,rule=author,labels=fp16", {0, 3}, {5, 3}, 32);
}

// Two labels are the minimum and the maximum of their range: codes 0 and 15, hardly any loss, for
// keys and queries alike.
TEST_F(WorkedExample, DoubleSparsityByItsAuthorsInFourBits) {
  session_.Run("double-sparsity:c=2,rule=author,k=37");
  EXPECT_EQ(session_.Of(0), (Winners{20}));
  EXPECT_EQ(session_.Of(1), (Winners{25}));
  EXPECT_DOUBLE_EQ(session_.bits(), 4 * 2 + 32);
  EXPECT_EQ(session_.method->MemoryBytes(), 128 * (1 + 4));
}

// sum |q_j| = 4, 3, 3, .3: of the equal channels 1 and 2 the smaller wins.
TEST_F(WorkedExample, Sparq) { Expect("sparq:r=2", {0, 3}, {5, 3}, 8.5); }

// r = 1: together channel 0. Alone, A takes channel 0 and B channel 1, whose largest values
// are 1.125 (key 5) and .825 (key 1).
TEST_F(WorkedExample, SparqChannelsPerHead) {
  Expect("sparq:r=1", {0, 3}, {0, 3}, 4.25);
  Expect("sparq:r=1,channels=head", {0, 3}, {5, 1}, 8.5);
}

// Temperatures sqrt(6.1 / 4) = 1.2349 and sqrt(4.2 / 3) = 1.1832. Sums: key 0 5.8 * 1.2349 + 2.6 *
// 1.1832 = 10.24, key 3 4.3 * 1.2349 + 2.6 * 1.1832 = 8.39, key 5 3.8 * 1.2349 + 3.1 * 1.1832
// = 8.36. One set for both heads.
TEST_F(WorkedExample, SparqByItsAuthors) {
  Expect("sparq:r=2,rule=author", {0, 3}, {0, 3}, 32);
  EXPECT_EQ(session_.method->MemoryBytes(), 128 * 16 * 2);
}

// Two planes: A = 4.10 -2.40 .70 5.70 -2.40 4.20, B = 2.08 .07 -1.47 2.78 -.67 3.52.
TEST_F(WorkedExample, ThumbnailMisranksBothHeads) {
  Expect("thumbnail:planes=2", {3, 5}, {5, 3}, 2.25 * 16);
}

// As double-sparsity, and channel 2 (cell .0625) -.219 .281 .094 .406 -.469 -.281, channel 3 hardly
// anything: A = 5.00 .. 5.20 .. 3.60, B = 2.67 .. 2.18 .. 3.53.
TEST_F(WorkedExample, Full4RanksBothHeadsRight) {
  Expect("full4:basis=raw", {0, 3}, {5, 0}, 4.25 * 16);
}

// Key channels are sign patterns of the token's bits, so uncorrelated: channel 2 has bit 0 and
// variance 16, channel 9 bit 1 and variance 1, channel 5 bit 2 and variance 4. Queries have energy
// 1, 10^4 and 10^-4 there: score variance is largest in channel 9, explained variance in channel 2.
TEST(Loki, OrdersAxesByItsRule) {
  Session session(1, 16, 128);
  for (std::int64_t i = 0; i < 128; ++i) {
    session.Key(i, 2) = (i & 1) != 0 ? 4.F : -4.F;
    session.Key(i, 9) = (i & 2) != 0 ? 1.F : -1.F;
    session.Key(i, 5) = (i & 4) != 0 ? 2.F : -2.F;
  }
  std::vector<float> sample(16);
  sample[2] = 1;
  sample[9] = 100;
  sample[5] = .01F;
  session.Sample(40, {sample});
  for (const int channel : {2, 5, 9}) session.Q(0, channel) = 1;
  session.Run("loki:r=1,k=38");
  EXPECT_EQ(session.Of(0), (Winners{6, 7}));  // the first two with bit 1
  EXPECT_DOUBLE_EQ(session.bits(), 4.25);
  EXPECT_EQ(session.method->MemoryBytes(), 64 * (4 * 8 + 2));  // a segment of one channel
  session.Run("loki:r=1,k=38,basis=raw");
  EXPECT_EQ(session.Of(0), (Winners{6, 7}));
  session.Run("loki:r=1,k=38,rule=author");
  EXPECT_EQ(session.Of(0), (Winners{5, 7}));  // with bit 0
  EXPECT_DOUBLE_EQ(session.bits(), 16);
  EXPECT_EQ(session.method->MemoryBytes(), 0);
}

// Keys: bit 0 in channel 0 (4), bit 1 in channel 1 (1), bit 2 in channel 2 (8), so k means
// channel 2. Sampled queries (3, 2, 1) and (2, 9, 1): q means channel 0 and channel 1. At the
// samples' tokens the keys are (.5, 1, .1): products (1.5, 2, .1) and (1, 9, .1), qk means channel
// 1 for both.
TEST(DoubleSparsity, OrdersOfItsAuthors) {
  for (const std::string labels : {"4bit", "fp16"}) {
    Session session(2, 16, 128);
    for (std::int64_t i = 0; i < 128; ++i) {
      session.Key(i, 0) = (i & 1) != 0 ? 4.F : -4.F;
      session.Key(i, 1) = (i & 2) != 0 ? 1.F : -1.F;
      session.Key(i, 2) = (i & 4) != 0 ? 8.F : -8.F;
    }
    for (const std::int64_t i : {40, 50}) {
      session.Key(i, 0) = .5F;
      session.Key(i, 1) = 1;
      session.Key(i, 2) = .1F;
      session.Sample(i, {{3, 2, 1}, {2, 9, 1}});
    }
    for (const int head : {0, 1}) {
      for (const int channel : {0, 1, 2}) session.Q(head, channel) = 1;
    }
    const std::string spec = "double-sparsity:c=1,k=38,rule=author,labels=" + labels + ",order=";
    const double bits = labels == "fp16" ? 16 : 36;
    session.Run(spec + "k");
    EXPECT_EQ(session.Of(0), (Winners{4, 5}));
    EXPECT_EQ(session.Of(1), (Winners{4, 5}));
    EXPECT_DOUBLE_EQ(session.bits(), bits);
    session.Run(spec + "q");
    EXPECT_EQ(session.Of(0), (Winners{5, 7}));
    EXPECT_EQ(session.Of(1), (Winners{6, 7}));
    EXPECT_DOUBLE_EQ(session.bits(), 2 * bits);
    EXPECT_EQ(session.method->MemoryBytes(), 2 * 128 * (labels == "fp16" ? 2 : 5));
    session.Run(spec + "qk");
    EXPECT_EQ(session.Of(0), (Winners{6, 7}));
    EXPECT_EQ(session.Of(1), (Winners{6, 7}));
    session.queries[0].samples.Clear();
    session.Run(spec + "qk");
    EXPECT_EQ(session.Of(0), (Winners{4, 5})) << "by the keys without queries";
  }
}

// Range 3.75, scale .25: codes 0, 4, round(6.4) = 6, 15, and 2.5, which goes to the even 2.
TEST(DoubleSparsity, LabelQuantizer) {
  std::vector<float> x = {-1, 0, .6F, 2.75F, -.375F};
  QuantizeLabels(x.data(), x.size());
  EXPECT_EQ(x, (std::vector<float>{-1, 0, .5F, 2.75F, -.5F}));
  std::vector<float> same = {2, 2, 2};
  QuantizeLabels(same.data(), same.size());
  EXPECT_EQ(same, (std::vector<float>{2, 2, 2}));
  std::vector<float> odd = {NAN, 1, 4.75F};
  QuantizeLabels(odd.data(), odd.size());
  EXPECT_EQ(odd, (std::vector<float>{1, 1, 4.75F}));
}

// All keys and scores are 0, so every token has 1/128 of the estimated softmax. Attended are tokens
// 0
// .. 5 and 96 .. 127, whose values, their numbers, sum to 15 + 3568; the other 90 count with the
// mean of all, 63.5: (3583 + 90 * 63.5) / 128.
TEST(Sparq, ReallocatesToTheMeanValue) {
  Session session(2, 16, 128);
  for (std::int64_t i = 0; i < 128; ++i) session.Value(i, 3) = static_cast<float>(i);
  session.Q(0, 1) = 5;  // head 1: |q|_1 = 0
  session.Run("sparq:r=2,rule=author,k=38");
  EXPECT_EQ(session.Of(0), (Winners{4, 5}));
  EXPECT_NEAR(session.out[3], 72.640625, 1e-4);
  EXPECT_NEAR(session.out[16 + 3], 72.640625, 1e-4);
  session.Run("sparq:r=2,rule=author,realloc=off,k=38");
  EXPECT_NEAR(session.out[3], 3583 / 38.0, 1e-4);
  EXPECT_NEAR(session.out[16 + 3], 3583 / 38.0, 1e-4);
}

// Block maximum 3, scale 2: levels -3, -1, 1, 3.
TEST(Ffd, Codes) {
  const std::map<float, int> codes = {{3, 3},    {2.1F, 3}, {2, 2},  {1, 2}, {0, 2},
                                      {-.5F, 1}, {-1, 1},   {-2, 0}, {-3, 0}};
  for (const auto& [k, code] : codes) EXPECT_EQ(FfdCode(k, 2), code) << k;
  EXPECT_EQ(FfdCode(NAN, 2), 0);
  EXPECT_EQ(FfdCode(0, 0), 2);
}

// In every block of 128 one token of channel 0 has m_b and one of channel 1 has n_b: the maxima of
// head 0 are (2 5 1 3 2), of head 1 (10 4 4 12 9). Without delta the thresholds are 2 and 10, so
// the margins are (0 3 -1 2 0): block 1, then 3, 0, 4, 2.
TEST(Ffd, TakesWholeBlocksByMarginOverTheProbes) {
  constexpr std::array<float, 5> kFirst = {2, 5, 1, 3, 2}, kSecond = {10, 4, 4, 12, 9};
  for (const std::int64_t n : {640, 704}) {
    Session session(2, 16, n);
    for (std::size_t b = 0; b < 5; ++b) {
      session.Key(static_cast<std::int64_t>(b) * 128 + 50, 0) = kFirst[b];
      session.Key(static_cast<std::int64_t>(b) * 128 + 90, 1) = kSecond[b];
    }
    session.Q(0, 0) = session.Q(1, 1) = 1;
    session.Run("thumbnail:rule=ffd,k=" + std::to_string(36 + 128 + 10));
    Winners expected;
    // The finished block of 64 that is half of an unfinished one of 128 comes first: 640 .. 671.
    std::int64_t left = 138;
    for (std::int64_t i = 640; i < session.last(); ++i, --left) expected.insert(i);
    for (std::int64_t i = 128; i < 256 && left > 0; ++i, --left) expected.insert(i);
    for (std::int64_t i = 384; left > 0; ++i, --left) expected.insert(i);
    EXPECT_EQ(session.Of(0), expected) << n;
    EXPECT_EQ(session.Of(1), expected) << n;
    EXPECT_DOUBLE_EQ(session.bits(), 2.25 * 16);
    EXPECT_EQ(session.method->MemoryBytes(), 5 * (128 * 16 / 4 + 16 * 4));
  }
}

}  // namespace
}  // namespace fathom
