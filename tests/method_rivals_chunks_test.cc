// SPDX-License-Identifier: MIT
// landmark, quest, streaming and h2o: cases small enough to work out by hand, and random sessions
// against the definitions written out in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fathom/fathom.h"
#include "method/head_stats.h"
#include "support/compare.h"
#include "support/one_layer_session.h"
#include "support/random_data.h"

namespace fathom {
namespace {

using test::Attend;
using test::IndexEnd;
using test::Join;
using test::LastCandidate;
using test::Range;
using test::Session;
using test::Size;
using test::Tokens;

// Score 2 k0 + k1. Chunk 3 holds eight (1, 2): mean score 4. Chunk 5 one (20, 0): mean (2.5, 0), 5.
// Chunk 9 four (4, 0): mean (2, 0), 4. The rest 0.
TEST(LandmarkByHand, TokensInheritTheScoreOfTheirMean) {
  Session session(1, 1, 16, 160);  // candidates end at 128
  for (std::int64_t i = 24; i < 32; ++i) session.Key(i, 0) = 1, session.Key(i, 1) = 2;
  session.Key(43, 0) = 20;
  for (std::int64_t i = 72; i < 80; i += 2) session.Key(i, 0) = 4;
  session.Write();
  const auto q = session.Query({2, 1});
  const auto winners = [&](const std::string& spec) {
    return Attend(*session.Make(spec + ",min=0"), session, 160, q);
  };
  EXPECT_EQ(winners("landmark:k=44"), Range(40, 48));
  EXPECT_EQ(winners("landmark:k=48"), Join({Range(24, 28), Range(40, 48)}));
  EXPECT_EQ(winners("landmark:k=60"), Join({Range(24, 32), Range(40, 48), Range(72, 80)}));
  // Chunks of 16: 2 (32..47) has mean (1.25, 0), 2.5; 1 (16..31) has (.5, 1), 2; 4 (64..79) has 2.
  EXPECT_EQ(winners("landmark:chunk=16,k=68"), Range(16, 48));
}

// q = (2, 0). Keys (0, 1), except chunk 6, half (1, 0): score 1, least cosine .71; chunk 7 with one
// (1, -1): mean (.125, .75), score .25, least cosine -.58; chunk 9 all (.25, 1): score .5, cosine
// 1; and chunk 15 with three (0, -1), cosine -1, which is in the window, where the author's index
// ends.
TEST(LandmarkByHand, OutliersAreKeptBesideK) {
  Session session(1, 1, 16, 152);  // candidates end at 120
  for (std::int64_t i = 0; i < 152; ++i) session.Key(i, 1) = 1;
  for (std::int64_t i = 48; i < 52; ++i) session.Key(i, 0) = 1, session.Key(i, 1) = 0;
  session.Key(58, 0) = 1, session.Key(58, 1) = -1;
  for (std::int64_t i = 72; i < 80; ++i) session.Key(i, 0) = .25F;
  for (std::int64_t i = 122; i < 125; ++i) session.Key(i, 1) = -1;
  session.Write();
  const auto q = session.Query({2, 0});
  const auto winners = [&](const std::string& spec) {
    return Attend(*session.Make(spec + ",k=44,min=0"), session, 152, q);
  };
  EXPECT_EQ(winners("landmark:rule=author,outliers=0"), Range(48, 56));
  EXPECT_EQ(winners("landmark:rule=author,outliers=1"), Range(48, 64));
  EXPECT_EQ(winners("landmark:rule=author,outliers=2"), Join({Range(48, 64), Range(72, 80)}));
  EXPECT_EQ(winners("landmark:outliers=1"), Range(48, 64));
  const std::string spec = session.Make("landmark:rule=author")->spec();
  EXPECT_EQ(spec.find("landmark:rule=author,chunk=8,outliers=48"), 0U) << spec;
}

// Head A sees k0, head B k1; 1/sqrt(D) = 1/4. A: 40 in chunk 2, else 0: probability
// e^10 / (e^10 + 14) = .9994. B: 104 in chunk 4, else 100: e / (e + 14) = .16, others .06. The best
// logit is B's, the best probability A's. Chunk 15 is in the window and must not weigh: it would
// leave A nothing.
TEST(LandmarkByHand, HeadsOfAGroupMeetInProbability) {
  Session session(2, 1, 16, 150);  // candidates end at 118
  for (std::int64_t i = 0; i < 150; ++i) session.Key(i, 1) = 100;
  for (std::int64_t i = 16; i < 24; ++i) session.Key(i, 0) = 40;
  for (std::int64_t i = 32; i < 40; ++i) session.Key(i, 1) = 104;
  for (std::int64_t i = 120; i < 128; ++i) session.Key(i, 0) = 400;
  session.Write();
  std::vector<float> q(32);
  q[0] = 1, q[17] = 1;
  const auto winners = [&](const std::string& spec, std::int32_t head) {
    return Attend(*session.Make(spec + ",min=0"), session, 150, q, head);
  };
  for (const std::int32_t head : {0, 1}) {
    EXPECT_EQ(winners("landmark:rule=author,outliers=0,k=44", head), Range(16, 24));
    EXPECT_EQ(winners("landmark:rule=author,outliers=0,k=52", head),
              Join({Range(16, 24), Range(32, 40)}));
  }
  EXPECT_EQ(winners("landmark:k=44", 0), Range(16, 24));
  EXPECT_EQ(winners("landmark:k=44", 1), Range(32, 40));
}

// q = (1, -2). Page 2: a (3, 0) and a (0, -4), bound 3 + 8 = 11 though no key scores above 8. Page
// 4: one (5, -2.5), bound 10. Page 5: one (-7, 3), bound 0 by its zero keys, like the rest.
TEST(QuestByHand, PagesByTheirBound) {
  Session session(1, 1, 16, 160);
  session.Key(33, 0) = 3;
  session.Key(40, 1) = -4;
  session.Key(70, 0) = 5, session.Key(70, 1) = -2.5F;
  session.Key(85, 0) = -7, session.Key(85, 1) = 3;
  session.Write();
  const auto q = session.Query({1, -2});
  const auto winners = [&](const std::string& spec) {
    return Attend(*session.Make(spec + ",min=0"), session, 160, q);
  };
  EXPECT_EQ(winners("quest:k=52"), Range(32, 48));
  EXPECT_EQ(winners("quest:k=60"), Join({Range(32, 48), Range(64, 72)}));
  // Pages of 32: 1 (32..63) keeps 11, 2 (64..95) has maximum (5, 3) and minimum (-7, -2.5), 10.
  EXPECT_EQ(winners("quest:page=32,k=100"), Range(32, 96));
  // Three pages at least; the third is page 0, whose sinks are kept anyway: page 1 gets four
  // places.
  const Tokens three = Join({Range(4, 20), Range(32, 48), Range(64, 80)});
  EXPECT_EQ(winners("quest:rule=author,k=37"), three);
  EXPECT_EQ(winners("quest:rule=author,k=63"), three);
  EXPECT_EQ(winners("quest:rule=author,k=64"), Join({Range(4, 52), Range(64, 80)}));
}

TEST(StreamingByHand, NewestTokensWithoutAScan) {
  Session session(2, 2, 16, 1100);
  session.Write();
  const auto method = session.Make("streaming:k=100,min=0");
  const std::vector<float> q(64, 1.0F);
  // Candidates end at 1068: the newest 96 are k - 4.
  EXPECT_EQ(Attend(*method, session, 1100, q), Range(1004, 1068));
  // 1087 = 16 * 64 + 63: the tail is longer than the window and comes beside k.
  EXPECT_EQ(Attend(*method, session, 1087, q, 3), Range(960, 1024));
  EXPECT_EQ(method->counters().read_bits, 0);
  EXPECT_EQ(method->counters().index_bytes, 0);
  EXPECT_EQ(method->counters().sparse_calls, 4);
  EXPECT_EQ(method->counters().rows, 2 * (100 + 4 + 64 + 63));
  EXPECT_EQ(method->MemoryBytes(), 0);
}

// 1/sqrt(D) = 1/4: a key channel of 4 ln(w) gives a token w times the weight of a zero key.
//
// Prompt of 96 tokens, candidates 4 .. 63. One sampled query, at 79, along channel 0, where token
// 10 has w = 100, token 20 w = 2 and token 40 w = 1.5: the sum over its 80 tokens is 180.5, and
// scaled by 96 token 10 gets 53.2, token 20 1.06, token 40 .80, the others .53. k = 39 leaves these
// three.
class H2oByHand : public testing::Test {
 protected:
  H2oByHand() : session_(1, 1, 16, 256) {
    const auto weigh = [&](std::int64_t token, std::int32_t channel, double weight) {
      session_.Key(token, channel) = static_cast<float>(4 * std::log(weight));
    };
    weigh(10, 0, 100);
    weigh(20, 0, 2);
    weigh(40, 0, 1.5);
    weigh(70, 1, 200);
    weigh(80, 1, 20);
    weigh(30, 1, 1e6);  // what any retrieval would fetch
    session_.Write();
    session_.queries[0].samples.Add(79, session_.Query({1}).data());
  }

  Tokens Step(Method& method, std::int64_t n, std::initializer_list<float> q) {
    return Attend(method, session_, n, session_.Query(q));
  }

  Session session_;
};

TEST_F(H2oByHand, WhatWasDroppedStaysAway) {
  const auto method = session_.Make("h2o:k=39,min=0");
  method->BuildIndex(96);
  EXPECT_EQ(method->MemoryBytes(), 4 * (3 + 32));
  EXPECT_EQ(Step(*method, 97, {0, 1}), (Tokens{10, 20, 40}));
  EXPECT_EQ(method->MemoryBytes(), 4 * (3 + 33));
  EXPECT_EQ(method->counters().read_bits, 0);
  // Of 40 attended tokens 70 has weight 200 and 80 weight 20: they get 200/258 and 20/258, and a
  // little less in the next step: 1.55 and .155 together.
  EXPECT_EQ(Step(*method, 98, {0, 1}), (Tokens{10, 20, 40}));
  // Candidates now end at 96. 10 (53), 70 (1.55) and 20 (1.07) stay; 40 (.81) and 80 go.
  EXPECT_EQ(Step(*method, 128, {0, 1}), (Tokens{10, 20, 70}));
  EXPECT_EQ(Step(*method, 129, {0, 1}), (Tokens{10, 20, 70}));
}

TEST_F(H2oByHand, TruncationReturnsToTheBuild) {
  const auto method = session_.Make("h2o:k=39,min=0");
  method->BuildIndex(96);
  const auto advance = [&] {
    for (const std::int64_t n : {97, 98, 128}) Step(*method, n, {0, 1});
  };
  advance();
  method->Truncate(128);  // forgets nothing
  EXPECT_EQ(Step(*method, 129, {0, 1}), (Tokens{10, 20, 70}));
  for (const std::int64_t n : {96, 100, 128}) {
    method->Truncate(n);
    EXPECT_EQ(method->MemoryBytes(), 4 * (3 + 32));
    EXPECT_EQ(Step(*method, 127, {0, 1}), (Tokens{10, 20, 40}));
    advance();
    Step(*method, 129, {0, 1});
  }
  method->Truncate(95);
  EXPECT_EQ(method->MemoryBytes(), 0);
  // Made anew from a prompt that ends before the sample: nothing has a score.
  method->Truncate(79);
  method->BuildIndex(79);
  EXPECT_EQ(Step(*method, 79, {0, 1}), (Tokens{4, 5, 6}));
}

TEST_F(H2oByHand, RecentTokensComeOutOfK) {
  // 97 - 40 = 57: tokens 57 .. 63 are recent, one place of the eight is left.
  const auto method = session_.Make("h2o:k=44,recent=40,min=0");
  EXPECT_EQ(Step(*method, 97, {0, 1}), Join({{10}, Range(57, 64)}));
  // Candidates end at 96: 88 .. 95 are recent.
  EXPECT_EQ(Step(*method, 128, {0, 1}), Range(88, 96));
  EXPECT_THROW(ValidateMethodSpec(MethodSpec::Parse("h2o:k=44,recent=41")), Error);
}

// Winners must be the best of the candidates, up to eps. scores: by token; infinite ones are sure.
void ExpectBest(const std::vector<double>& scores, std::int64_t last, const Tokens& winners,
                std::size_t keep, double eps, const std::string& what) {
  ASSERT_EQ(winners.size(), keep) << what;
  std::vector<double> sorted(scores.begin() + kSinks, scores.begin() + last);
  std::ranges::sort(sorted, std::greater<>());
  const double lowest = sorted[keep - 1];
  std::size_t next = 0;
  for (std::int64_t i = kSinks; i < last; ++i) {
    const bool won = next < winners.size() && winners[next] == i;
    if (won) ++next;
    ASSERT_TRUE(won ? scores[Size(i)] >= lowest - eps : scores[Size(i)] <= lowest + eps)
        << what << " token " << i << " score " << scores[Size(i)] << " kth " << lowest;
  }
}

class Random : public testing::Test {
 protected:
  static constexpr std::int32_t kGroup = 3, kKvHeads = 2, kDim = 48;
  static constexpr std::int64_t kTokens = 1003;  // candidates end at 960

  Random() : session_(kGroup, kKvHeads, kDim, kTokens) {
    session_.keys = test::RandomData(test::DataKind::kSmooth, kTokens, kKvHeads * kDim, 21);
    for (float& k : session_.keys) k *= 0.25F;
    session_.Write();
    for (std::int64_t i = 0; i < 40; ++i) session_.queries[0].samples.Add(7 + 20 * i, NewQuery());
  }
  const float* NewQuery() {
    q_ = test::RandomNormal(kGroup * kKvHeads * kDim, seed_++);
    return q_.data();
  }
  // Keys of one KV head in a basis, [n][D], and q_ likewise.
  std::vector<float> Mapped(const Basis& basis, std::int32_t kv) const {
    std::vector<float> in, out(Size(kTokens * kDim));
    for (std::int64_t i = 0; i < kTokens; ++i) {
      for (std::int32_t j = 0; j < kDim; ++j) {
        in.push_back(static_cast<float>(session_.RowKey(i, j, kv)));
      }
    }
    basis.MapKeys(in.data(), kTokens, out.data());
    return out;
  }
  Basis BasisOf(std::int32_t kv, BasisRule rule) const {
    return MeasureHead(session_.Context(), 0, kv, kTokens, rule, false).basis;
  }

  Session session_;
  std::vector<float> q_;
  std::uint64_t seed_ = 1000;
};

double Dot(const float* a, const float* b, std::int32_t n) {
  double sum = 0;
  for (std::int32_t j = 0; j < n; ++j) sum += static_cast<double>(a[j]) * b[j];
  return sum;
}

const std::vector<std::pair<std::string, BasisRule>>& Bases() {
  static const std::vector<std::pair<std::string, BasisRule>> kBases = {
      {"raw", BasisRule::kRaw}, {"klt", BasisRule::kKlt}, {"balanced", BasisRule::kBalanced}};
  return kBases;
}

// A mean scores the mean of its keys' scores, in any basis up to the rounding of the table.
TEST_F(Random, LandmarkScoresAreMeansOfScores) {
  for (const auto& [name, rule] : Bases()) {
    const auto method = session_.Make("landmark:k=100,min=0,basis=" + name);
    for (std::int32_t h = 0; h < kGroup * kKvHeads; ++h) {
      NewQuery();
      std::vector<double> scores(Size(IndexEnd(kTokens)));
      for (std::size_t i = 0; i < scores.size(); ++i) {
        for (std::int64_t t = 0; t < 8; ++t) {
          for (std::int32_t j = 0; j < kDim; ++j) {
            scores[i] += q_[Size(h * kDim + j)] / 8.0 *
                         session_.RowKey(static_cast<std::int64_t>(i) / 8 * 8 + t, j, h / kGroup);
          }
        }
      }
      ExpectBest(scores, 960, Attend(*method, session_, kTokens, q_, h), 64, 0.03, name);
    }
  }
}

// Mapped keys are centred; what the scores lack then is the same number for all tokens of a head,
// and the residual must get it back.
TEST_F(Random, LandmarkResidualDoesNotDependOnTheBasis) {
  // An offset that rounding to fp16 hardly feels.
  session_.keys = test::RandomNormal(kTokens * kKvHeads * kDim, 31, 0.5);
  for (std::size_t i = 0; i < session_.keys.size(); ++i) {
    session_.keys[i] += 0.5F * (static_cast<float>(i % kDim % 5) - 2);
  }
  session_.Write();
  for (const std::int64_t position : {900, 940, 980}) {
    session_.queries[0].recent.Add(position, NewQuery());
  }
  NewQuery();
  const auto attend = [&](const std::string& options) {
    std::vector<float> out(q_.size());
    session_.Make("landmark:k=60,min=0," + options)->Attend(0, kTokens, q_.data(), out.data());
    return out;
  };
  const auto raw = attend("residual=mean");
  EXPECT_TRUE(test::Near(attend("residual=mean,basis=klt"), raw, 0.01));
  EXPECT_TRUE(test::Near(attend("residual=mean,basis=balanced"), raw, 0.01));
  EXPECT_FALSE(test::Near(attend("residual=off"), raw, 0.05)) << "the residual adds nothing here";
}

TEST_F(Random, QuestScoresAreBounds) {
  for (const auto& [name, rule] : Bases()) {
    const auto method = session_.Make("quest:k=100,min=0,basis=" + name);
    for (std::int32_t h = 0; h < kGroup * kKvHeads; ++h) {
      NewQuery();
      const Basis basis = BasisOf(h / kGroup, rule);
      const auto x = Mapped(basis, h / kGroup);
      std::vector<float> q(kDim);
      basis.MapQueries(q_.data() + h * kDim, 1, q.data());
      std::vector<double> scores(Size(IndexEnd(kTokens)));
      for (std::size_t i = 0; i < scores.size(); ++i) {
        for (std::size_t j = 0; j < kDim; ++j) {
          double best = -INFINITY;
          for (std::size_t t = i / 16 * 16; t < i / 16 * 16 + 16; ++t) {
            best = std::max(best, static_cast<double>(q[j]) * x[t * kDim + j]);
          }
          scores[i] += best;
        }
      }
      ExpectBest(scores, 960, Attend(*method, session_, kTokens, q_, h), 64, 0.05, name);
    }
  }
}

TEST_F(Random, ShadowKvChoosesOutliersAndTheLargestSoftmax) {
  constexpr std::int64_t kChunks = 960 / 8;
  const auto method = session_.Make("landmark:rule=author,outliers=5,k=100,min=0");
  for (int step = 0; step < 5; ++step) {
    NewQuery();
    for (std::int32_t kv = 0; kv < kKvHeads; ++kv) {
      const auto x = Mapped(RawBasis(kDim, {}), kv);
      std::vector<std::vector<float>> means;
      std::vector<std::pair<double, std::int64_t>> cosines;
      for (std::int64_t c = 0; c < kChunks; ++c) {
        std::vector<float> mean(kDim);
        for (std::int64_t i = 0; i < 8 * kDim; ++i)
          mean[Size(i % kDim)] += x[Size(c * 8 * kDim + i)] / 8;
        double least = 2;
        for (std::int64_t t = 0; t < 8; ++t) {
          const float* key = x.data() + (c * 8 + t) * kDim;
          least = std::min(
              least, Dot(key, mean.data(), kDim) /
                         std::sqrt(Dot(key, key, kDim) * Dot(mean.data(), mean.data(), kDim)));
        }
        cosines.emplace_back(least, c);
        means.push_back(std::move(mean));
      }
      std::ranges::sort(cosines);
      std::vector<double> scores(960, -INFINITY);
      for (std::size_t i = 0; i < 5; ++i) {
        std::fill_n(scores.begin() + cosines[i].second * 8, 8, INFINITY);
      }
      for (std::int32_t g = 0; g < kGroup; ++g) {
        const float* q = q_.data() + (kv * kGroup + g) * kDim;
        std::vector<double> logit;
        logit.reserve(means.size());
        double sum = 0;
        for (const auto& mean : means) logit.push_back(Dot(q, mean.data(), kDim) / std::sqrt(kDim));
        for (std::size_t c = 0; c < kChunks; ++c)
          sum += scores[c * 8] < INFINITY ? std::exp(logit[c]) : 0;
        for (std::size_t i = 0; i < 960; ++i) {
          scores[i] = std::max(scores[i], logit[i / 8] - std::log(sum));
        }
      }
      ExpectBest(scores, 960, Attend(*method, session_, kTokens, q_, kv * kGroup + step % kGroup),
                 64 + 40, 0.005, "shadowkv");
    }
  }
}

// Softmax of one query over tokens, in double, added to sum.
void AddProbabilities(const Session& session, const float* q, std::int32_t kv, const Tokens& tokens,
                      double factor, std::map<std::int32_t, double>* sum) {
  const std::int32_t dim = session.heads.head_dim;
  std::vector<double> weight;
  double total = 0;
  weight.reserve(tokens.size());
  for (const std::int32_t token : tokens) {
    double dot = 0;
    for (std::int32_t j = 0; j < dim; ++j) dot += q[j] * session.RowKey(token, j, kv);
    weight.push_back(std::exp(dot / std::sqrt(static_cast<double>(dim))));
    total += weight.back();
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) (*sum)[tokens[i]] += factor * weight[i] / total;
}

TEST_F(Random, H2oAccumulatesOverGroupAndSteps) {
  // A short prompt, so that what decode adds decides.
  constexpr std::int64_t kBuild = 150, kSamples = 8;
  const auto method = session_.Make("h2o:k=100,recent=50,min=0");
  method->BuildIndex(kBuild);
  // Of what is attended too, so that the state is followed where scores nearly tie.
  std::vector<std::map<std::int32_t, double>> state(kKvHeads);
  const auto& samples = session_.queries[0].samples;
  ASSERT_LT(samples.positions()[kSamples - 1], kBuild);
  ASSERT_GE(samples.positions()[kSamples], kBuild);
  for (std::int32_t kv = 0; kv < kKvHeads; ++kv) {
    for (std::int64_t s = 0; s < kSamples; ++s) {
      for (std::int32_t g = 0; g < kGroup; ++g) {
        AddProbabilities(session_, samples.query(s) + (kv * kGroup + g) * kDim, kv,
                         Range(0, samples.positions()[Size(s)] + 1),
                         static_cast<double>(kBuild) / kSamples, &state[Size(kv)]);
      }
    }
    for (std::int32_t i = 0; i < kBuild; ++i) state[Size(kv)][i] += 0;
    // Evicted after the prompt: candidates 4 .. 117 down to 64, of which 100 .. 117 are recent.
    std::vector<std::pair<double, std::int32_t>> old;
    for (std::int32_t i = kSinks; i < kBuild - 50; ++i) old.emplace_back(state[Size(kv)][i], i);
    std::ranges::sort(old, std::greater<>());
    for (std::size_t i = 64 - 18; i < old.size(); ++i) state[Size(kv)].erase(old[i].second);
  }
  for (std::int64_t n = kBuild + 1; n <= kTokens; n += n % 3 == 0 ? 2 : 1) {
    NewQuery();
    Attend(*method, session_, n, q_);
    for (std::int32_t kv = 0; kv < kKvHeads; ++kv) {
      const AttendedTokens step = method->attended(kv);
      const Tokens tokens(step.tokens.begin(), step.tokens.end());
      auto& kept = state[Size(kv)];
      for (auto i = static_cast<std::int32_t>(kept.rbegin()->first); i < n; ++i) kept[i] += 0;
      const std::int64_t last = LastCandidate(n);
      std::vector<double> scores(Size(IndexEnd(n)), -INFINITY);
      for (const auto& [token, score] : kept) {
        if (token < last) scores[Size(token)] = token >= n - 50 ? INFINITY : score;
      }
      const Tokens winners(tokens.begin() + kSinks, tokens.end() - (n - last));
      ExpectBest(scores, last, winners, 64, 1e-3, "step " + std::to_string(n));
      if (HasFatalFailure()) return;
      for (std::int32_t g = 0; g < kGroup; ++g) {
        AddProbabilities(session_, q_.data() + (kv * kGroup + g) * kDim, kv, tokens, 1, &kept);
      }
      std::erase_if(kept, [&](const auto& item) {
        return !std::binary_search(tokens.begin(), tokens.end(), item.first);
      });
    }
  }
}

TEST(Rivals, KeysThatAreNoNumbersDoNoHarm) {
  for (const std::string spec : {"landmark:", "landmark:rule=author,outliers=3,",
                                 "quest:", "quest:rule=author,", "h2o:", "streaming:"}) {
    Session session(2, 1, 16, 512);
    session.keys = test::RandomNormal(512 * 16, 5);
    session.Key(100, 3) = NAN;
    session.Key(200, 0) = INFINITY;
    session.Write();
    const auto method = session.Make(spec + "k=100,min=0");
    std::vector<float> out(32);
    const auto q = test::RandomNormal(32, 6);
    for (const std::int64_t n : {500, 511}) {
      method->Attend(0, n, q.data(), out.data());
      EXPECT_GE(method->attended(0).tokens.size(), 100U) << spec;
    }
  }
}

}  // namespace
}  // namespace fathom
