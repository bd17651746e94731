// SPDX-License-Identifier: MIT
// Backend::Rank against `ref`: the same winners, and the rest within its bound.
#include <gtest/gtest.h>

#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

struct RankCase {
  IndexCase index;
  std::int32_t group = 4;
  std::int64_t first = kSinks;
  std::int64_t window = kWindow;  // last = n_index - window
  std::int64_t tail = 0;          // n_tokens = n_index + tail
  std::int64_t keep = 64;
  double read = 0.4;
  int most_level = 5;
  float q_scale = 1;  // how peaked the softmax is
};

struct Ranked {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<std::vector<std::uint16_t>> mask;
  std::vector<float> rest;  // [heads][group][n_blocks]
  std::vector<float> cut;   // [heads][group]
};

class BackendRank : public BackendTest {
 protected:
  static constexpr std::size_t kHeads = 2;

  // Two KV heads; every other segment reads by a table of its own.
  struct Data {
    RankCase c;
    std::vector<TestIndex> index;
    std::vector<std::vector<ScanTable>> tables;
    std::int64_t n_index = 0;
  };

  Data MakeData(const RankCase& c) const {
    Data d{c, {}, std::vector<std::vector<ScanTable>>(kHeads, std::vector<ScanTable>(2)), 0};
    d.c.index.codec = Codec::kMean;
    for (std::size_t h = 0; h < kHeads; ++h) {
      d.index.push_back(MakeIndex(d.c.index, ref(), 20 + h));
      for (std::size_t s = 0; s < d.index[h].views.size(); ++s) {
        d.index[h].views[s].table = static_cast<std::int32_t>(s % 2);
      }
      const std::int32_t dim = c.index.head_dim;
      for (std::size_t t = 0; t < 2; ++t) {
        auto q = RandomNormal(c.group * dim, 30 + h);
        for (float& x : q) x *= c.q_scale * (t == 0 ? 1.0f : 0.9f);
        const auto level = RandomLevels(dim, c.read, c.most_level, 40 + h);
        BuildScanTable({dim, c.group, c.index.mean_bits, q.data(), level.data(),
                        d.index[h].mean_step.data(), d.index[h].weight.data()},
                       &d.tables[h][t]);
      }
    }
    d.n_index = d.index[0].n_tokens;
    return d;
  }

  static Ranked Run(const Backend& backend, const Data& d, float exp_scale) {
    const RankCase& c = d.c;
    const std::int64_t n_tokens = d.n_index + c.tail;
    const auto capacity = static_cast<std::size_t>(n_tokens);
    const auto n_blocks = static_cast<std::size_t>(d.n_index / kBlockTokens);
    const auto group = static_cast<std::size_t>(c.group);
    Ranked r;
    OffsetBuffer<float> rest(kHeads * group * n_blocks, -7.0f);
    r.cut.assign(kHeads * group, -7.0f);
    r.tokens.assign(kHeads, std::vector<std::int32_t>(capacity, -1));
    r.mask.assign(kHeads, std::vector<std::uint16_t>(capacity, 0));
    std::vector<std::int64_t> n(kHeads, -1);
    std::vector<RankHead> heads(kHeads);
    for (std::size_t h = 0; h < kHeads; ++h) {
      heads[h].segments = d.index[h].views;
      heads[h].tables = d.tables[h];
      heads[h].tokens = r.tokens[h].data();
      heads[h].mask = r.mask[h].data();
      heads[h].n_attended = &n[h];
      heads[h].rest = rest.data() + h * group * n_blocks;
      heads[h].rest_stride = static_cast<std::int64_t>(n_blocks);
      heads[h].cut = r.cut.data() + h * group;
    }
    backend.Rank({c.index.head_dim, c.group, c.index.segment_blocks, c.index.mean_bits, c.first,
                  d.n_index - c.window, n_tokens, c.keep, exp_scale, heads});
    for (std::size_t h = 0; h < kHeads; ++h) {
      r.tokens[h].resize(static_cast<std::size_t>(n[h]));
      r.mask[h].resize(static_cast<std::size_t>(n[h]));
    }
    r.rest.assign(rest.span().begin(), rest.span().end());
    return r;
  }

  // rest is compared in units where a token at the reference's cut weighs 1.
  static void CompareRest(const Ranked& actual, const Ranked& expected, float exp_scale) {
    ASSERT_EQ(actual.rest.size(), expected.rest.size());
    const std::size_t per_head = expected.rest.size() / expected.cut.size();
    for (std::size_t i = 0; i < actual.rest.size(); ++i) {
      const std::size_t h = i / per_head;
      if (std::isnan(expected.cut[h])) {
        EXPECT_TRUE(std::isnan(actual.rest[i]) || expected.rest[i] == 0) << i;
        continue;
      }
      const double factor =
          std::exp(static_cast<double>(exp_scale) * (actual.cut[h] - expected.cut[h]));
      EXPECT_NEAR(actual.rest[i] * factor, expected.rest[i],
                  0.02 * static_cast<double>(expected.rest[i]) + 0.1 * std::max(factor, 1.0))
          << "head " << h << " block " << i % per_head;
    }
  }

  void Check(const RankCase& c, float exp_scale = 0.125f) {
    const Data d = MakeData(c);
    const Ranked expected = Run(ref(), d, exp_scale);
    const Ranked actual = Run(backend(), d, exp_scale);
    ASSERT_EQ(actual.tokens, expected.tokens) << "n " << d.n_index << " keep " << c.keep;
    ASSERT_EQ(actual.mask, expected.mask);
    if (exp_scale != 0) CompareRest(actual, expected, exp_scale);
  }
};

TEST_P(BackendRank, EqualsRef) {
  for (const std::int32_t group : {1, 2, 3, 4, 5, 7, 8, 16}) {
    Check({.index = {.head_dim = 64, .segment_blocks = 16, .blocks = {16, 16, 3}}, .group = group});
  }
}

TEST_P(BackendRank, Shapes) {
  for (const std::int32_t dim : {16, 64, 80, 128, 256}) {
    for (const DataKind kind : {DataKind::kHeavyTailed, DataKind::kSmooth, DataKind::kNormal}) {
      Check({.index = {.head_dim = dim, .segment_blocks = 10, .blocks = {10, 1, 2}, .kind = kind},
             .tail = 5,
             .keep = 100});
    }
  }
  Check({.index = {.segment_blocks = 8, .mean_bits = 8, .blocks = {8, 8}}});
  for (const std::int32_t together : {2, 3}) {
    Check({.index = {.segment_blocks = 64, .blocks = {64, 64, 64, 7}, .row_segments = together}});
  }
}

// Enough tokens for a threshold from a sample, with few and with many winners.
TEST_P(BackendRank, LongIndexes) {
  for (const std::int64_t keep : {1, 16, 300, 2000}) {
    Check({.index = {.head_dim = 32, .segment_blocks = 64, .blocks = {64, 64, 13}},
           .group = 2,
           .keep = keep});
  }
}

TEST_P(BackendRank, EdgesOfTheRange) {
  for (const std::int64_t first : {0, 4, 63, 64, 65}) {
    for (const std::int64_t window : {0, 1, 32, 63, 64, 65, 95}) {
      Check({.index = {.head_dim = 16, .segment_blocks = 8, .blocks = {6}},
             .group = 2,
             .first = first,
             .window = window,
             .keep = 20});
    }
  }
  // The index is ahead of the tokens that are visible.
  Check({.index = {.head_dim = 16, .segment_blocks = 8, .blocks = {6}},
         .window = 100,
         .tail = -70,
         .keep = 20});
  // All candidates win.
  Check({.index = {.head_dim = 16, .segment_blocks = 8, .blocks = {2}}, .keep = 128 - kAlwaysKept});
}

// One, two, four and eight parts.
TEST_P(BackendRank, ManyPlanes) {
  for (const double read : {0.1, 0.5, 0.8, 1.1}) {
    for (const std::int32_t dim : {64, 256}) {
      Check({.index = {.head_dim = dim, .segment_blocks = 20, .blocks = {20, 7}}, .read = read});
    }
  }
}

// Where all scores are equal the first tokens win; nothing read is such a case too.
TEST_P(BackendRank, Ties) {
  RankCase c{.index = {.head_dim = 32, .segment_blocks = 40, .blocks = {40}}, .keep = 70};
  c.index.kind = DataKind::kConstant;
  Check(c);
  c.read = 0;
  Check(c);
  c.most_level = 1;
  c.read = 1.1;  // means only: blocks are equal or not as a whole
  c.index.kind = DataKind::kHeavyTailed;
  Check(c);
}

TEST_P(BackendRank, FlatAndPeakedWeights) {
  for (const float scale : {0.0f, 0.01f, 0.2f, 3.0f, 30.0f}) {
    Check({.index = {.head_dim = 64, .segment_blocks = 64, .blocks = {40}}, .q_scale = scale});
  }
}

TEST_P(BackendRank, WithoutRest) {
  Check({.index = {.head_dim = 64, .segment_blocks = 64, .blocks = {40}}}, 0);
}

TEST_P(BackendRank, NotANumberSpoilsItsOwnHeadOnly) {
  Data d = MakeData({.index = {.head_dim = 16, .segment_blocks = 64, .blocks = {40}}, .group = 3});
  for (ScanTable& t : d.tables[1]) {
    std::vector<float> q(3 * 16, 1.0f);
    q[20] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<std::uint8_t> level(16, 3);
    BuildScanTable(
        {16, 3, 4, q.data(), level.data(), d.index[1].mean_step.data(), d.index[1].weight.data()},
        &t);
  }
  const Ranked expected = Run(ref(), d, 0.25f);
  const Ranked actual = Run(backend(), d, 0.25f);
  EXPECT_EQ(actual.tokens, expected.tokens);
  EXPECT_EQ(actual.mask, expected.mask);
  for (std::size_t h = 0; h < 6; ++h) EXPECT_EQ(std::isnan(actual.cut[h]), h == 4) << h;
  CompareRest(actual, expected, 0.25f);
}

TEST_P(BackendRank, ThreadsDoNotChangeResults) {
  const Data d =
      MakeData({.index = {.head_dim = 32, .segment_blocks = 64, .blocks = {64, 21}}, .keep = 200});
  const Ranked one = Run(*WithThreads(1), d, 0.2f);
  for (const int n : {2, 3, 5, 8}) {
    const Ranked many = Run(*WithThreads(n), d, 0.2f);
    EXPECT_EQ(many.tokens, one.tokens) << n;
    EXPECT_EQ(many.mask, one.mask) << n;
    EXPECT_EQ(Bits(many.rest), Bits(one.rest)) << n;
    EXPECT_EQ(Bits(many.cut), Bits(one.cut)) << n;
  }
}

// Ranges of any size, also of no block, drop what they have too many of the equal scores.
TEST_P(BackendRank, TiesOverManyRanges) {
  for (const std::int32_t blocks : {6, 40}) {
    RankCase c{.index = {.head_dim = 32, .segment_blocks = 40, .blocks = {blocks}},
               .group = 2,
               .keep = 70};
    for (const bool means_only : {false, true}) {
      c.index.kind = means_only ? DataKind::kHeavyTailed : DataKind::kConstant;
      c.read = means_only ? 1.1 : 0.4;
      c.most_level = means_only ? 1 : 5;
      const Data d = MakeData(c);
      for (const float exp_scale : {0.0f, 0.25f}) {
        const Ranked expected = Run(ref(), d, exp_scale);
        for (const int n : {1, 2, 3, 5, 8, 16}) {
          const Ranked actual = Run(*WithThreads(n), d, exp_scale);
          EXPECT_EQ(actual.tokens, expected.tokens) << blocks << " blocks, threads: " << n;
          EXPECT_EQ(actual.mask, expected.mask) << blocks << " blocks, threads: " << n;
          if (exp_scale != 0) CompareRest(actual, expected, exp_scale);
        }
      }
    }
  }
}

// Where the tokens that the CPU samples are the best of all, its threshold leaves too few, and all
// others, whose scores are alike but for their blocks' means, are candidates after all.
TEST_P(BackendRank, UnluckySamples) {
  constexpr std::int32_t kBlocks = 64;
  constexpr std::int64_t kSample = 1024, kFirst = 4;
  Data d = MakeData({.index = {.head_dim = 16, .segment_blocks = kBlocks, .blocks = {64, 64}},
                     .group = 2,
                     .first = kFirst,
                     .keep = 1500});
  for (std::size_t h = 0; h < kHeads; ++h) {
    for (ScanTable& table : d.tables[h]) {
      const std::vector<float> q(2 * 16, 1.0f);
      const std::vector<std::uint8_t> level(16, 2);
      BuildScanTable(
          {16, 2, 4, q.data(), level.data(), d.index[h].mean_step.data(), d.index[h].weight.data()},
          &table);
    }
    for (auto& words : d.index[h].planes) std::ranges::fill(words, 0);
    const std::int64_t range = (d.n_index - kWindow - kFirst) / kSample;
    for (std::int64_t i = 0; i < kSample; ++i) {
      const std::uint32_t scatter = (static_cast<std::uint32_t>(i) * 2654435769u) >> 16;
      const std::int64_t token = kFirst + i * range + (scatter * range >> 16);
      const std::int64_t block = token / kBlockTokens;
      for (int channel = 0; channel < 16; ++channel) {
        d.index[h].planes[static_cast<std::size_t>(block / kBlocks)][layout::PlaneWord(
            channel, 0, static_cast<int>(block % kBlocks), kBlocks)] |= std::uint64_t{1}
                                                                        << token % kBlockTokens;
      }
    }
  }
  const Ranked expected = Run(ref(), d, 0.25f);
  for (const int n : {1, 2, 5}) {
    const Ranked actual = Run(*WithThreads(n), d, 0.25f);
    EXPECT_EQ(actual.tokens, expected.tokens) << n;
    EXPECT_EQ(actual.mask, expected.mask) << n;
    CompareRest(actual, expected, 0.25f);
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendRank);

}  // namespace
}  // namespace fathom::test
