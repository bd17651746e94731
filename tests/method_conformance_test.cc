// SPDX-License-Identifier: MIT
// The promises of method.h, for every method of the build. A spy between method and backend records
// what is attended, so that the protocol (always-kept tokens, no repeats, ties, counts) is checked
// on the real selection.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>

#include "base/half.h"
#include "fathom/fathom.h"
#include "support/compare.h"
#include "support/random_data.h"
#include "support/spy_backend.h"

namespace fathom {
namespace {

using test::SpyBackend;

struct Shape {
  std::int32_t group;
  std::int32_t n_kv_heads;
  std::int32_t head_dim;
};

// A session's rows and one query, without a model: keys smooth along tokens in some channels, as
// real ones are.
class Fixture {
 public:
  Fixture(Shape shape, std::int64_t n_tokens, std::uint64_t seed, std::int32_t n_layers = 1,
          int n_threads = 1)
      : heads{shape.group * shape.n_kv_heads, shape.n_kv_heads, shape.head_dim},
        rows(n_layers, heads, n_tokens + 256),
        spy(MakeBackend("cpu", n_threads)),
        rng(seed) {
    Grow(n_tokens);
    const auto width =
        static_cast<std::size_t>(heads.n_heads) * static_cast<std::size_t>(heads.head_dim);
    q = Normal(width);
    for (std::int32_t layer = 0; layer < n_layers; ++layer) {
      const QuerySamples none(heads.n_heads, heads.head_dim);
      LayerQueries sampled = {none, none};
      for (std::int64_t i = 0; i < 32; ++i) {
        sampled.samples.Add(kStatsSkip + 2 * i, Normal(width).data());
      }
      for (const std::int64_t position : {70, 130, 200, 480, 900}) {
        sampled.recent.Add(position, Normal(width).data());
      }
      queries.push_back(std::move(sampled));
    }
  }

  std::vector<float> Normal(std::size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float& value : x) value = normal(rng);
    return x;
  }

  // Appends random rows to all layers.
  void Grow(std::int64_t n) {
    const auto width = static_cast<std::size_t>(heads.n_kv_heads * heads.head_dim);
    for (std::int32_t layer = 0; layer < rows.n_layers(); ++layer) {
      auto k = Normal(static_cast<std::size_t>(n) * width);
      for (std::size_t i = 0; i < k.size(); ++i) {
        const auto channel = i % width;
        const auto token =
            static_cast<float>(std::floor(static_cast<double>(i) / static_cast<double>(width)));
        if (channel % 3 == 0) k[i] = k[i] * 0.2F + 3 * std::sin(0.01F * token);
      }
      const auto v = Normal(k.size());
      rows.Write(layer, rows.n_tokens(), n, k.data(), v.data());
    }
    rows.Commit(rows.n_tokens() + n);
  }

  std::unique_ptr<Method> Make(const std::string& spec) {
    return MakeMethod(MethodSpec::Parse(spec), {&rows, &spy, &queries, true, nullptr});
  }

  std::vector<float> Attend(Method& method, std::int32_t layer = 0, std::int64_t n_tokens = -1) {
    std::vector<float> out(q.size(), NAN);
    method.Attend(layer, n_tokens < 0 ? rows.n_tokens() : n_tokens, q.data(), out.data());
    return out;
  }

  HeadGeometry heads;
  RowStore rows;
  SpyBackend spy;
  std::vector<LayerQueries> queries;
  std::vector<float> q;
  std::mt19937_64 rng;
};

// Every scanning method, in the forms that differ in code, with the least and the most read bits
// per token at D = 128: a budget is never exceeded and nearly used up.
struct SpecCase {
  std::string spec;  // ends so that more options can follow
  double low;
  double high;
};
const std::vector<SpecCase>& SpecCases() {
  // The published budget counts code bits; scales come on top.
  static const std::vector<SpecCase> kCases = {
      {"exact:", 2048, 2048},
      {"exact:residual=block,", 2048, 2048},
      {"fathom:", 2, 120},  // one multiplier for all heads: the bits of a step are what they are
      {"fathom:bits=28,plan=measured,", 26, 28},
      {"fathom:bits=28,plan=measured,residual=off,", 26, 28},
      {"fathom:bits=28,plan=measured,residual=mean,", 26, 28},
      {"fathom:bits=19,plan=measured,meanbits=8,weights=center,range=rms,", 17, 19},
      {"fathom:bits=28,plan=measured,basis=klt,", 26, 28},
      {"fathom:bits=28,plan=measured,basis=balanced,", 26, 28},
      {"fathom:bits=28,plan=published,", 26, 28},
      {"fathom:bits=28,plan=measured,store=paper,residual=mean,", 26, 28},
      {"fathom:preset=paper,budget=48,basis=raw,", 40, 80},
      {"fathom:preset=paper,budget=48,basis=klt,", 40, 80},
      {"fathom:preset=paper,budget=48,basis=balanced,residual=mean,", 40, 80},
      {"h2o:", 0, 0},
      {"h2o:recent=33,", 0, 0},
      {"landmark:", 256, 256},
      {"landmark:basis=klt,residual=mean,", 256, 256},
      {"landmark:rule=author,outliers=2,", 256, 256},
      {"landmark:rule=author,outliers=2,basis=balanced,residual=block,", 256, 256},
      {"quest:", 256, 256},
      {"quest:basis=balanced,", 256, 256},
      {"quest:rule=author,", 256, 256},
      {"random:seed=3,", 0, 0},
      {"streaming:", 0, 0},
      {"double-sparsity:", 136, 136},
      {"double-sparsity:rule=author,", 160, 160},
      {"double-sparsity:rule=author,order=q,labels=fp16,basis=klt,", 2048, 2048},
      {"double-sparsity:rule=author,order=qk,c=24,residual=mean,", 512, 512},
      {"full4:", 544, 544},
      {"loki:", 136, 136},
      {"loki:rule=author,", 512, 512},
      {"loki:rule=author,r=40,residual=block,", 640, 640},
      {"sparq:", 136, 136},
      {"sparq:channels=head,residual=mean,", 136, 544},
      {"sparq:rule=author,", 512, 512},
      {"sparq:rule=author,realloc=off,basis=klt,r=16,", 256, 256},
      {"thumbnail:planes=1,residual=mean,", 160, 160},
      {"thumbnail:rule=ffd,", 288, 288},
  };
  return kCases;
}
// Tokens that a query head attends beside k, where an author counts differently.
std::int64_t KeptBeside(const std::string& spec, std::int64_t k) {
  if (spec.rfind("landmark:rule=author", 0) == 0) return 2 * 8;  // two outliers
  if (spec.rfind("quest:rule=author", 0) == 0) {
    return std::max<std::int64_t>(3, k / 16) * 16 - (k - kAlwaysKept);
  }
  return 0;
}
const std::vector<std::string>& SparseSpecs() {
  static const std::vector<std::string> kSpecs = [] {
    std::vector<std::string> specs;
    for (const SpecCase& item : SpecCases()) specs.push_back(item.spec);
    return specs;
  }();
  return kSpecs;
}

const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> kShapes = {{1, 2, 64},  {3, 3, 64}, {4, 2, 128},
                                             {6, 2, 128}, {7, 1, 80}, {8, 1, 256}};
  return kShapes;
}

TEST(MethodConformance, EveryRegisteredMethodIsCovered) {
  std::set<std::string> covered = {"dense"};
  for (const auto& spec : SparseSpecs())
    covered.insert(MethodSpec::Parse(spec.substr(0, spec.find(':'))).name);
  for (const MethodInfo& method : ListMethods())
    EXPECT_TRUE(covered.count(method.name)) << method.name;
}

TEST(MethodConformance, DenseEqualsReference) {
  for (const Shape& shape : Shapes()) {
    for (const std::int64_t n : {1, 2, 63, 64, 65, 193}) {
      Fixture fixture(shape, n, 1);
      const auto dense = fixture.Make("dense");
      const auto out = fixture.Attend(*dense);
      const auto expected = test::DenseAttention(fixture.rows, 0, n, fixture.q);
      EXPECT_TRUE(test::Near(out, expected, 2e-5))
          << shape.group << " " << shape.head_dim << " n " << n;
    }
  }
}

TEST(MethodConformance, KAtLeastNEqualsDense) {
  for (const Shape& shape : Shapes()) {
    for (const std::int64_t n : {1, 36, 37, 63, 64, 65, 127, 128, 129, 191, 192, 193}) {
      Fixture fixture(shape, n, 2);
      const auto dense = fixture.Make("dense");
      const auto expected = fixture.Attend(*dense);
      for (const auto& spec : SparseSpecs()) {
        const auto method =
            fixture.Make(spec + "k=" + std::to_string(std::max<std::int64_t>(n, 37)) + ",min=0");
        EXPECT_EQ(fixture.Attend(*method), expected) << spec << " n " << n;
      }
    }
  }
}

TEST(MethodConformance, NearlyAllTokensIsDenseToo) {
  // k < n, but the tail is attended beside k, so that every candidate is a winner.
  Fixture fixture({4, 2, 128}, 64 * 3 + 40, 3);
  const auto dense = fixture.Make("dense");
  const auto expected = fixture.Attend(*dense);
  for (const auto& spec : SparseSpecs()) {
    const auto method = fixture.Make(spec + "k=228,min=0");
    EXPECT_TRUE(test::Near(fixture.Attend(*method), expected, 1e-6)) << spec;
  }
}

// What was attended in the last step against the protocol: the always-kept tokens by all heads,
// `keep` others by each, no repeats.
void ExpectProtocol(const Fixture& fixture, std::int64_t n, std::int64_t keep) {
  const std::int64_t last = std::min(n / kBlockTokens * kBlockTokens, n - kWindow);
  const auto group = static_cast<std::size_t>(fixture.heads.group());
  const auto all = static_cast<std::uint16_t>((1U << group) - 1);
  ASSERT_EQ(fixture.spy.attended.size(), static_cast<std::size_t>(fixture.heads.n_kv_heads));
  for (const auto& head : fixture.spy.attended) {
    ASSERT_TRUE(std::ranges::is_sorted(head.tokens));
    ASSERT_EQ(std::ranges::adjacent_find(head.tokens), head.tokens.end());
    std::vector<std::int64_t> winners(group, 0);
    std::int64_t always = 0;
    for (std::size_t i = 0; i < head.tokens.size(); ++i) {
      const std::int64_t token = head.tokens[i];
      if (token < kSinks || token >= last) {
        ++always;
        EXPECT_EQ(head.mask[i], all) << "token " << token;
        continue;
      }
      EXPECT_NE(head.mask[i], 0);
      for (std::size_t h = 0; h < group; ++h) winners[h] += head.mask[i] >> h & 1;
    }
    EXPECT_EQ(always, kSinks + n - last);
    for (const std::int64_t count : winners) EXPECT_EQ(count, keep);
  }
}

// Every method meets every shape and every length, in turn: not every pair of them.
TEST(MethodConformance, ProtocolOfTheSelection) {
  constexpr std::array<std::int64_t, 12> kLengths = {63,  64,  65,  127, 128, 129,
                                                     190, 191, 192, 193, 700, 1000};
  static_assert(kLengths.size() % 6 == 0, "each shape meets as many lengths");
  for (std::size_t s = 0; s < Shapes().size(); ++s) {
    for (std::size_t l = 0; l < kLengths.size(); ++l) {
      const std::int64_t n = kLengths[l];
      Fixture fixture(Shapes()[s], n, 4);
      // Short sessions have few candidates.
      const std::int64_t k = kAlwaysKept + (n < 2 * kBlockTokens ? 7 : 50);
      for (std::size_t m = 0; m < SparseSpecs().size(); ++m) {
        if ((m + s + l) % Shapes().size() != 0) continue;
        const std::string spec = SparseSpecs()[m] + "k=" + std::to_string(k) + ",min=0";
        SCOPED_TRACE(spec + " n " + std::to_string(n));
        const auto method = fixture.Make(spec);
        fixture.Attend(*method);
        const std::int64_t keep = k - kAlwaysKept + KeptBeside(SparseSpecs()[m], k);
        const std::int64_t last = std::min(n / kBlockTokens * kBlockTokens, n - kWindow);
        const bool sparse = last - kSinks > keep;
        EXPECT_EQ(method->counters().sparse_calls, sparse ? fixture.heads.n_kv_heads : 0);
        if (sparse) ExpectProtocol(fixture, n, keep);
      }
    }
  }
}

TEST(MethodConformance, TiesGoToTheSmallerToken) {
  Fixture fixture({4, 2, 64}, 640, 5);
  // All keys alike: every score ties.
  const std::vector<float> same(static_cast<std::size_t>(640 * 2 * 64), 0.5F);
  fixture.rows.Write(0, 0, 640, same.data(), same.data());
  for (const auto& spec : SparseSpecs()) {
    if (spec.rfind("random", 0) == 0 || spec.rfind("streaming", 0) == 0) continue;
    if (spec.find("basis=balanced") != std::string::npos) continue;  // keys without any spread
    if (spec.find("recent=") != std::string::npos) continue;         // newer tokens come first
    const auto method = fixture.Make(spec + "k=46,min=0");
    fixture.Attend(*method);
    for (const auto& head : fixture.spy.attended) {
      std::vector<std::int32_t> expected(
          static_cast<std::size_t>(kSinks + 10 + KeptBeside(spec, 46)));
      std::iota(expected.begin(), expected.end(), 0);
      for (std::int32_t i = 640 - kWindow; i < 640; ++i) expected.push_back(i);
      EXPECT_EQ(head.tokens, expected) << spec;
    }
  }
}

TEST(MethodConformance, ExactChoosesTheTrueTopK) {
  Fixture fixture({3, 2, 80}, 500, 6);
  const auto method = fixture.Make("exact:k=56,min=0");
  fixture.Attend(*method);
  const std::int32_t dim = 80;
  for (std::int32_t h = 0; h < 6; ++h) {
    std::vector<std::pair<double, std::int32_t>> order;
    const Half* rows = fixture.rows.rows(0, h / 3);
    for (std::int32_t i = kSinks; i < 448; ++i) {
      double score = 0;
      for (std::int32_t j = 0; j < dim; ++j)
        score += fixture.q[static_cast<std::size_t>(h * dim + j)] *
                 static_cast<double>(HalfToFloat(rows[i * 2 * dim + j]));
      order.emplace_back(-score, i);
    }
    std::sort(order.begin(), order.end());
    std::set<std::int32_t> expected;
    for (std::size_t i = 0; i < 20; ++i) expected.insert(order[i].second);
    std::set<std::int32_t> winners;
    const auto& head = fixture.spy.attended[static_cast<std::size_t>(h / 3)];
    for (std::size_t i = 0; i < head.tokens.size(); ++i) {
      if (head.tokens[i] >= kSinks && head.tokens[i] < 448 && (head.mask[i] >> (h % 3) & 1))
        winners.insert(head.tokens[i]);
    }
    EXPECT_EQ(winners, expected) << "head " << h;
  }
}

TEST(MethodConformance, MoreBitsFindMoreOfTheTopK) {
  Fixture fixture({4, 1, 128}, 4096, 7);
  const auto recall = [&](const std::string& spec) {
    const auto exact = fixture.Make("exact:k=136,min=0");
    fixture.Attend(*exact);
    const auto truth = fixture.spy.attended[0];
    const auto method = fixture.Make(spec + "k=136,min=0");
    fixture.Attend(*method);
    const auto found = fixture.spy.attended[0];
    double hits = 0;
    for (std::size_t i = 0, j = 0; i < truth.tokens.size(); ++i) {
      while (j < found.tokens.size() && found.tokens[j] < truth.tokens[i]) ++j;
      if (j < found.tokens.size() && found.tokens[j] == truth.tokens[i]) {
        hits += __builtin_popcount(truth.mask[i] & found.mask[j]);
      }
    }
    return (hits / 4 - kAlwaysKept) / 100;
  };
  const double low = recall("fathom:bits=20,");
  const double high = recall("fathom:bits=100,");
  const double all = recall("fathom:bits=600,");
  EXPECT_GT(low, 2 * recall("random:"));
  EXPECT_GT(high, low);
  EXPECT_GT(all, 0.86);
  EXPECT_GT(recall("fathom:preset=paper,budget=512,basis=raw,"), 0.85);
}

TEST(MethodConformance, CountersEqualTheClosedForm) {
  const Shape shape{4, 2, 128};
  const std::int64_t n = 1000;
  const std::int64_t n_index = 960;
  Fixture fixture(shape, n, 8);
  for (const auto& [spec, low, high] : SpecCases()) {
    const auto method = fixture.Make(spec + "k=100,min=0");
    fixture.Attend(*method);
    fixture.Attend(*method);
    const MethodCounters& counters = method->counters();
    EXPECT_EQ(counters.steps, 2);
    EXPECT_EQ(counters.calls, 4);
    EXPECT_EQ(counters.sparse_calls, 4);
    std::int64_t rows = 0;
    for (const auto& head : fixture.spy.attended)
      rows += static_cast<std::int64_t>(head.tokens.size());
    EXPECT_EQ(counters.rows, 2 * rows);
    EXPECT_EQ(counters.value_rows, counters.rows);
    EXPECT_EQ(counters.row_bytes, counters.rows * 4 * shape.head_dim);
    EXPECT_LE(counters.value_mean_bytes, 2 * 2 * n_index / kBlockTokens * 2 * shape.head_dim);
    EXPECT_EQ(counters.value_mean_bytes > 0,
              method->spec().find("residual=block") != std::string::npos)
        << spec;
    EXPECT_NEAR(static_cast<double>(counters.index_bytes),
                counters.read_bits * static_cast<double>(n_index) / 8, 2);
    const double bits = counters.mean_read_bits();
    EXPECT_GE(bits, low) << spec;
    EXPECT_LE(bits, high) << spec;
    if (spec.rfind("fathom", 0) == 0) {
      // The spy counts what the backend was told to read.
      EXPECT_NEAR(2 * fixture.spy.scanned_bits, counters.read_bits, 1e-9) << spec;
    }
    EXPECT_EQ(method->MemoryBytes(),
              IndexBytes(MethodSpec::Parse(spec + "k=100,min=0"), 1, fixture.heads, n))
        << spec;
    method->ResetCounters();
    EXPECT_EQ(method->counters().rows, 0);
  }
}

TEST(MethodConformance, ShortSessionsDecodeDensely) {
  Fixture fixture({4, 2, 128}, 1023, 9);
  for (const auto& spec : SparseSpecs()) {
    const auto method = fixture.Make(spec + "k=64");
    fixture.Attend(*method);
    EXPECT_EQ(method->counters().sparse_calls, 0) << spec;
    method->BuildIndex(1023);
    EXPECT_EQ(method->MemoryBytes(), 0) << spec;
  }
  fixture.Grow(1);
  for (const auto& spec : SparseSpecs()) {
    const auto method = fixture.Make(spec + "k=64");
    fixture.Attend(*method);
    EXPECT_EQ(method->counters().sparse_calls, 2) << spec;
  }
}

TEST(MethodConformance, TruncatedIsAsIfNeverSeen) {
  Fixture fixture({4, 2, 64}, 64 * 84 + 5, 10, 2);
  for (const auto& spec : SparseSpecs()) {
    const auto plain = fixture.Make(spec + "k=100,min=0");
    const auto cut = fixture.Make(spec + "k=100,min=0");
    const std::int64_t start = 64 * 60 + 30;  // a segment is 64 blocks
    plain->BuildIndex(start);
    cut->BuildIndex(start);
    for (std::int32_t layer = 0; layer < 2; ++layer) fixture.Attend(*cut, layer);
    for (const std::int64_t n : {start + 70, start, start + 64 * 20 + 1}) {
      cut->Truncate(std::min<std::int64_t>(n, start));
      for (std::int32_t layer = 0; layer < 2; ++layer) {
        EXPECT_EQ(fixture.Attend(*cut, layer, n), fixture.Attend(*plain, layer, n))
            << spec << " n " << n;
      }
      plain->Truncate(start);
    }
  }
}

TEST(MethodConformance, TruncationBelowTheBuildRebuilds) {
  Fixture fixture({4, 2, 64}, 2000, 11);
  for (const auto& spec : SparseSpecs()) {
    const auto rebuilt = fixture.Make(spec + "k=100,min=0");
    rebuilt->BuildIndex(2000);
    rebuilt->Truncate(1000);
    EXPECT_EQ(rebuilt->MemoryBytes(), 0) << spec;
    const auto fresh = fixture.Make(spec + "k=100,min=0");
    EXPECT_EQ(fixture.Attend(*rebuilt, 0, 1000), fixture.Attend(*fresh, 0, 1000)) << spec;
  }
}

// A session that grew by more than a quarter gets a new index at its next BuildIndex.
TEST(MethodConformance, OutgrownIndexesAreMadeAnew) {
  Fixture fixture({2, 2, 64}, 2000, 15);
  for (const auto& spec : SparseSpecs()) {
    const std::string name = spec.substr(0, spec.find(':'));
    const std::set<std::string> others = {"exact", "h2o",    "landmark",
                                          "quest", "random", "streaming"};
    if (others.count(name) != 0) continue;
    const auto grown = fixture.Make(spec + "k=100,min=0");
    grown->BuildIndex(1000);
    fixture.Attend(*grown, 0, 1000);
    grown->BuildIndex(2000);
    const auto fresh = fixture.Make(spec + "k=100,min=0");
    fresh->BuildIndex(2000);
    EXPECT_EQ(fixture.Attend(*grown), fixture.Attend(*fresh)) << spec;
  }
}

TEST(MethodConformance, GrowingSessionNeverStumbles) {
  for (const auto& spec : SparseSpecs()) {
    Fixture fixture({2, 1, 64}, 30, 12, 2);
    const auto method = fixture.Make(spec + "k=40,min=0");
    for (int step = 0; step < 200; ++step) {
      fixture.Grow(1);
      for (std::int32_t layer = 0; layer < 2; ++layer) {
        const auto out = fixture.Attend(*method, layer);
        for (const float x : out) ASSERT_TRUE(std::isfinite(x)) << spec << " step " << step;
      }
    }
  }
}

TEST(MethodConformance, ThreadsDoNotMatter) {
  Fixture one({4, 3, 64}, 1000, 14, 1, 1);
  Fixture two({4, 3, 64}, 1000, 14, 1, 2);
  for (const auto& spec : SparseSpecs()) {
    const auto first = one.Make(spec + "k=100,min=0");
    const auto second = two.Make(spec + "k=100,min=0");
    EXPECT_EQ(one.Attend(*first), two.Attend(*second)) << spec;
  }
}

TEST(MethodConformance, CanonicalSpecBuildsTheSameMethod) {
  Fixture fixture({4, 2, 128}, 300, 13);
  for (const auto& spec : SparseSpecs()) {
    const auto method = fixture.Make(spec + "k=64,min=0");
    const auto again = fixture.Make(method->spec());
    EXPECT_EQ(again->spec(), method->spec());
    EXPECT_EQ(fixture.Attend(*again), fixture.Attend(*method)) << spec;
  }
}

}  // namespace
}  // namespace fathom
