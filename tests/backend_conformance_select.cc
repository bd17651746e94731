// SPDX-License-Identifier: MIT
// Every backend against `ref`: selection, equal to the last index.
#include <gtest/gtest.h>

#include "support/backend_cases.h"

namespace fathom::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Selected {
  std::vector<std::int32_t> winners, tokens;
  std::vector<std::uint16_t> mask;
  bool operator==(const Selected&) const = default;
};

struct SelectCase {
  std::int32_t group;
  std::int64_t first, last, n_tokens, keep;
};

class BackendSelect : public BackendTest {
 protected:
  // Buffers of exactly the promised capacity. scores: [n_heads][group][n_tokens].
  static std::vector<Selected> Run(const Backend& backend, const SelectCase& c,
                                   const std::vector<float>& scores) {
    const OffsetBuffer<float> input(scores);
    const std::int64_t per_head = c.group * c.n_tokens;
    const std::size_t n_heads =
        scores.size() / static_cast<std::size_t>(std::max<std::int64_t>(per_head, 1));
    const std::int64_t most =
        c.first + c.n_tokens - c.last + std::min(c.group * c.keep, c.last - c.first);
    std::vector<OffsetBuffer<std::int32_t>> winners, tokens;
    std::vector<OffsetBuffer<std::uint16_t>> mask;
    std::vector<std::int64_t> n(n_heads, -1);
    std::vector<SelectHead> heads(n_heads);
    for (std::size_t h = 0; h < n_heads; ++h) {
      winners.emplace_back(static_cast<std::size_t>(c.group * c.keep), -1);
      tokens.emplace_back(static_cast<std::size_t>(most), -1);
      mask.emplace_back(static_cast<std::size_t>(most));
    }
    for (std::size_t h = 0; h < n_heads; ++h) {
      heads[h] = {input.data() + static_cast<std::int64_t>(h) * per_head,
                  c.n_tokens,
                  winners[h].data(),
                  tokens[h].data(),
                  mask[h].data(),
                  &n[h]};
    }
    backend.Select({c.group, c.first, c.last, c.n_tokens, c.keep, heads});
    std::vector<Selected> result(n_heads);
    for (std::size_t h = 0; h < n_heads; ++h) {
      const auto w = winners[h].span();
      const auto t = tokens[h].span().first(static_cast<std::size_t>(n[h]));
      const auto m = mask[h].span().first(static_cast<std::size_t>(n[h]));
      result[h] = {{w.begin(), w.end()}, {t.begin(), t.end()}, {m.begin(), m.end()}};
    }
    return result;
  }

  void Check(const SelectCase& c, const std::vector<float>& scores) {
    const auto expected = Run(ref(), c, scores);
    const auto actual = Run(backend(), c, scores);
    ASSERT_TRUE(actual == expected)
        << "group " << c.group << " candidates " << c.last - c.first << " keep " << c.keep;
  }
};

TEST_P(BackendSelect, RandomScores) {
  for (const std::int32_t group : {1, 2, 3, 4, 8, 16}) {
    for (const std::int64_t n : {40, 63, 64, 65, 100, 1000}) {
      const auto scores = RandomNormal(2 * group * n, 1 + static_cast<std::uint64_t>(n));
      for (const std::int64_t keep : {0, 1, 3}) Check({group, 4, n - 32, n, keep}, scores);
      Check({group, 4, n - 32, n, n - 36}, scores);
      Check({group, 0, n, n, n / 2}, scores);
      Check({group, 0, n, n, n}, scores);
    }
  }
}

TEST_P(BackendSelect, ManyScoresUseTheSample) {
  for (const std::int64_t n : {4095, 4096, 4097, 20011}) {
    const auto scores = RandomNormal(3 * n, 2);
    for (const std::int64_t keep : {std::int64_t{0}, std::int64_t{1}, std::int64_t{17}, n / 70,
                                    n / 9, n / 8, n / 7, n - 1, n}) {
      Check({3, 0, n, n, keep}, scores);
    }
  }
}

// Scores whose sample tells little: sorted, periodic, a few peaks, two values.
TEST_P(BackendSelect, MisleadingScores) {
  constexpr std::int64_t kN = 10000;
  std::vector<float> up(kN), down(kN), periodic(kN), peaks(kN, 0.0f), two(kN);
  for (std::int64_t i = 0; i < kN; ++i) {
    const auto at = static_cast<std::size_t>(i);
    up[at] = static_cast<float>(i);
    down[at] = static_cast<float>(-i);
    periodic[at] = static_cast<float>(i % 9 == 0 ? i : -i);
    two[at] = i % 3 == 0 ? 1.0f : -1.0f;
  }
  for (std::size_t i = 0; i < 200; ++i) peaks[5000 + i] = 1e30f;
  for (const auto& scores : {up, down, periodic, peaks, two}) {
    for (const std::int64_t keep : {1, 150, 200, 201, 1111, 3334, 5000}) {
      Check({1, 0, kN, kN, keep}, scores);
    }
  }
}

TEST_P(BackendSelect, SmallerIndexWinsAmongEqualScores) {
  for (const std::int64_t n : {70, 500, 6000}) {
    Check({2, 4, n - 32, n, n / 10}, std::vector<float>(static_cast<std::size_t>(2 * n), 0.25f));
    std::vector<float> steps(static_cast<std::size_t>(2 * n));
    Random random(3);
    for (float& s : steps) s = static_cast<float>(random.Integer(-3, 3));
    for (const std::int64_t keep : {std::int64_t{1}, n / 20, n / 5, n / 3}) {
      Check({2, 4, n - 32, n, keep}, steps);
    }
    for (float& s : steps) s = random.Uniform() < 0.5 ? -0.0f : 0.0f;  // equal
    Check({2, 4, n - 32, n, n / 10}, steps);
  }
}

TEST_P(BackendSelect, TieRuleByHand) {
  const std::vector<float> scores = {9, 1, 3, 3, kNaN, 3, -kInf, 9};
  const auto result = Run(backend(), {1, 1, 7, 8, 2}, scores);
  EXPECT_EQ(result[0].winners, (std::vector<std::int32_t>{2, 3}));
  EXPECT_EQ(result[0].tokens, (std::vector<std::int32_t>{0, 2, 3, 7}));
  EXPECT_EQ(result[0].mask, (std::vector<std::uint16_t>{1, 1, 1, 1}));
  const auto five = Run(backend(), {1, 1, 7, 8, 5}, scores);
  EXPECT_EQ(five[0].winners, (std::vector<std::int32_t>{1, 2, 3, 5, 6}));  // -inf above NaN
}

TEST_P(BackendSelect, NotANumberLosesAndInfinityIsANumber) {
  for (const std::int64_t n : {80, 5000}) {
    std::vector<float> scores(static_cast<std::size_t>(2 * n), kNaN);
    Check({2, 0, n, n, n / 9}, scores);
    Check({2, 0, n, n, n}, scores);
    Random random(4);
    for (float& s : scores) {
      const std::int64_t dice = random.Integer(0, 9);
      s = dice < 4 ? kNaN : static_cast<float>(random.Normal());
      if (dice == 4) s = -kInf;
      if (dice == 5) s = kInf;
      if (dice == 6) s = -kNaN;
    }
    for (const std::int64_t keep : {std::int64_t{1}, n / 20, n / 3, n * 2 / 3, n - 1}) {
      Check({2, 0, n, n, keep}, scores);
    }
  }
}

TEST_P(BackendSelect, NoCandidates) {
  Check({2, 0, 0, 0, 0}, {});
  Check({2, 4, 4, 20, 0}, RandomNormal(40, 1));
  Check({2, 20, 20, 20, 0}, RandomNormal(40, 1));
}

TEST_P(BackendSelect, ThreadsDoNotChangeResults) {
  constexpr std::int64_t kN = 9000;
  const auto scores = RandomNormal(2 * 4 * kN, 6);
  const SelectCase c{4, 4, kN - 32, kN, 200};
  const auto one = Run(*WithThreads(1), c, scores);
  EXPECT_TRUE(Run(*WithThreads(2), c, scores) == one);
  EXPECT_TRUE(Run(*WithThreads(3), c, scores) == one);
}

FATHOM_TEST_ALL_BACKENDS(BackendSelect);

}  // namespace
}  // namespace fathom::test
