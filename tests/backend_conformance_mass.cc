// SPDX-License-Identifier: MIT
// Every backend against `ref`: the mass of blocks of scores, and scores of tables other than rows.
#include <gtest/gtest.h>

#include <limits>

#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kBound = 1e-5;  // relative error of every mass
constexpr float kUntouched = -7.0f;

// Relative, but for the terms too small for a normal float, which a backend may drop.
void ExpectSame(const std::vector<float>& actual, const std::vector<float>& expected,
                const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    if (std::isfinite(e)) {
      const double slack = kBlockTokens * static_cast<double>(std::numeric_limits<float>::min());
      EXPECT_LE(std::fabs(a - e), kBound * std::fabs(e) + slack)  // false for NaN
          << what << " [" << i << "]: " << a << ", expected " << e;
    } else {
      EXPECT_TRUE(a == e || (std::isnan(a) && std::isnan(e)))
          << what << " [" << i << "]: " << a << ", expected " << e;
    }
  }
}

// --- mass ---------------------------------------------------------------------------------------

struct MassCase {
  std::int32_t group = 1;
  std::int64_t n_blocks = 0;
  std::int64_t gap = 0;  // stride less the tokens
  float scale = 1;
  std::vector<std::vector<float>> scores = {};  // per KV head, [group][n_blocks * 64]
  std::vector<std::vector<float>> shift = {};   // per KV head, [group]

  std::size_t n_tokens() const { return static_cast<std::size_t>(n_blocks) * kBlockTokens; }
};

// Two KV heads; arguments of exp spread over about `spread`.
MassCase MakeMass(std::int32_t group, std::int64_t n_blocks, DataKind kind, double spread) {
  MassCase c{.group = group, .n_blocks = n_blocks, .gap = 3, .scale = 0.125f};
  for (std::uint64_t k = 0; k < 2; ++k) {
    auto x = RandomData(kind, n_blocks * kBlockTokens, group, 60 + k);  // [token][head]
    std::vector<float> scores(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t h = i % static_cast<std::size_t>(group);
      scores[h * c.n_tokens() + i / static_cast<std::size_t>(group)] =
          x[i] * static_cast<float>(spread / 0.125);
    }
    c.scores.push_back(std::move(scores));
    c.shift.push_back(RandomNormal(group, 70 + k, 5));
  }
  return c;
}

// One KV head and query head.
MassCase OneHead(const std::vector<float>& scores, float scale, float shift) {
  MassCase c{.n_blocks = static_cast<std::int64_t>(scores.size()) / kBlockTokens, .scale = scale};
  c.scores.push_back(scores);
  c.shift.push_back({shift});
  return c;
}

// What lies between the heads' scores is NaN, and the last head's end where the buffer ends.
OffsetBuffer<float> Spread(const MassCase& c, const std::vector<float>& scores) {
  const std::size_t stride = c.n_tokens() + static_cast<std::size_t>(c.gap);
  OffsetBuffer<float> out(
      static_cast<std::size_t>(c.group) * stride - static_cast<std::size_t>(c.gap), kNaN);
  for (std::size_t h = 0; h < static_cast<std::size_t>(c.group); ++h) {
    std::copy_n(scores.begin() + static_cast<std::ptrdiff_t>(h * c.n_tokens()), c.n_tokens(),
                out.data() + h * stride);
  }
  return out;
}

class BackendMass : public BackendTest {
 protected:
  // [KV head][group][n_blocks]
  static std::vector<float> Run(const Backend& backend, const MassCase& c) {
    const auto size = static_cast<std::size_t>(c.group * c.n_blocks);
    OffsetBuffer<float> out(c.scores.size() * size + 1, kUntouched);
    std::vector<OffsetBuffer<float>> scores;
    std::vector<OffsetBuffer<float>> shift;
    std::vector<MassHead> heads;
    for (std::size_t k = 0; k < c.scores.size(); ++k) {
      scores.push_back(Spread(c, c.scores[k]));
      shift.emplace_back(c.shift[k]);
    }
    for (std::size_t k = 0; k < c.scores.size(); ++k) {
      heads.push_back({scores[k].data(), static_cast<std::int64_t>(c.n_tokens()) + c.gap,
                       shift[k].data(), out.data() + k * size});
    }
    backend.Mass({c.group, c.n_blocks, c.scale, heads});
    EXPECT_EQ(out[out.size() - 1], kUntouched);
    return {out.span().begin(), out.span().end() - 1};
  }

  void Check(const MassCase& c, const std::string& what) {
    ExpectSame(
        Run(backend(), c), Run(ref(), c),
        what + ", group " + std::to_string(c.group) + ", blocks " + std::to_string(c.n_blocks));
  }
};

TEST_P(BackendMass, IsCloseToRef) {
  for (const DataKind kind : {DataKind::kHeavyTailed, DataKind::kNormal, DataKind::kConstant}) {
    for (const std::int64_t n : {0, 1, 2, 3, 15, 16, 17, 64, 65, 127, 128, 129, 300}) {
      Check(MakeMass(3, n, kind, 1), "sizes");
    }
    for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
      Check(MakeMass(group, 5, kind, 4), "groups");
    }
  }
  for (const double spread : {0.01, 0.3, 20.0, 300.0}) {
    Check(MakeMass(4, 40, DataKind::kHeavyTailed, spread), "spread " + std::to_string(spread));
  }
}

TEST_P(BackendMass, EqualScoresByHand) {
  const std::vector<float> scores(3 * kBlockTokens, 6.0f);
  const std::vector<float> ones(3, 64.0f);
  EXPECT_EQ(Run(backend(), OneHead(scores, 0.5f, 3.0f)), ones);
  const auto two = static_cast<float>(64 * std::exp(2.0));
  for (const float mass : Run(backend(), OneHead(scores, 0.5f, 1.0f))) {
    EXPECT_NEAR(mass, two, 1e-5 * two);
  }
}

// One token counts in a block, so that the mass is exp of its argument.
TEST_P(BackendMass, ExpOverItsWholeRange) {
  std::vector<float> scores;
  for (int step = -4360; step <= 4400; ++step) {  // -87.2 .. 88
    const std::size_t token = scores.size() + scores.size() / kBlockTokens % kBlockTokens;
    scores.resize(scores.size() + kBlockTokens, -kInf);
    scores[token] = static_cast<float>(step) * 0.02f;
  }
  const auto mass = Run(backend(), OneHead(scores, 1, 0));
  for (std::size_t b = 0; b < mass.size(); ++b) {
    const double expected = std::exp(static_cast<double>(scores[b * kBlockTokens + b % 64]));
    EXPECT_LE(std::fabs(mass[b] - expected), 2e-7 * expected) << scores[b * kBlockTokens + b % 64];
  }
}

TEST_P(BackendMass, MinusInfinityCountsNothing) {
  MassCase c = MakeMass(2, 35, DataKind::kNormal, 1);
  for (const std::size_t block : {0, 17, 34}) {
    std::fill_n(c.scores[1].begin() + static_cast<std::ptrdiff_t>(block * kBlockTokens),
                kBlockTokens, -kInf);
  }
  c.scores[0][70] = -kInf;
  for (std::size_t i = 0; i < 63; ++i) c.scores[0][c.n_tokens() + i] = -kInf;
  Check(c, "-inf");
  const auto mass = Run(backend(), c);
  for (const std::size_t block : {0, 17, 34}) EXPECT_EQ(mass[70 + block], 0.0f);
  EXPECT_GT(mass[35], 0.0f);
  for (auto& scores : c.scores) std::fill(scores.begin(), scores.end(), -kInf);
  EXPECT_EQ(Run(backend(), c), std::vector<float>(140, 0.0f));
}

TEST_P(BackendMass, NotANumberByPlace) {
  MassCase c = MakeMass(3, 35, DataKind::kNormal, 1);
  const auto clean = Run(backend(), c);
  c.scores[0][0] = kNaN;                                           // head 0, block 0
  c.scores[1][2 * c.n_tokens() + 33 * kBlockTokens + 63] = -kNaN;  // head 2, block 33
  std::fill_n(c.scores[1].begin(), kBlockTokens, kNaN);
  Check(c, "NaN");
  const auto dirty = Run(backend(), c);
  for (std::size_t i = 0; i < dirty.size(); ++i) {
    const bool hit = i == 0 || i == 3 * 35 || i == 5 * 35 + 33;
    EXPECT_EQ(std::isnan(dirty[i]), hit) << i;
    if (!hit) {
      EXPECT_EQ(dirty[i], clean[i]) << i;
    }
  }
  c.shift[0][1] = kNaN;
  Check(c, "NaN shift");
}

// Block b: b + 1 tokens with the argument x, the others -inf.
TEST_P(BackendMass, LargeArguments) {
  constexpr std::size_t kBlocks = 64;
  for (const float x : {60.0f, 80.0f, 84.0f, 87.9f, 88.0f, 88.5f, 100.0f, 1e6f, 3e38f, kInf}) {
    std::vector<float> scores(kBlocks * kBlockTokens, -kInf);
    for (std::size_t b = 0; b < kBlocks; ++b) {
      std::fill_n(scores.begin() + static_cast<std::ptrdiff_t>(b * kBlockTokens), b + 1, x);
    }
    const MassCase c = OneHead(scores, 1, 0);
    Check(c, "argument " + std::to_string(x));
    const auto mass = Run(backend(), c);
    EXPECT_TRUE(std::isfinite(mass[0])) << x;
    EXPECT_EQ(std::isfinite(mass[kBlocks - 1]), x <= 84) << x;
    if (x >= 88) {
      EXPECT_NEAR(mass[0], std::exp(88.0), kBound * std::exp(88.0)) << x;
      EXPECT_EQ(mass[2], kInf) << x;  // 5e38
    }
  }
}

// scale * score and shift in the thousands, their difference small: one rounding is allowed.
TEST_P(BackendMass, LargeScoresCancelAgainstTheShift) {
  auto scores = RandomNormal(20 * kBlockTokens, 80, 30);
  for (float& s : scores) s += 40000;
  const MassCase c = OneHead(scores, 0.08838835f, 3535.0f);
  Check(c, "cancellation");
  const auto mass = Run(backend(), c);
  EXPECT_GT(mass[0], 1);
  EXPECT_LT(mass[0], 1e9);
}

TEST_P(BackendMass, ThreadsDoNotChangeResults) {
  for (const std::int64_t n : {1, 300}) {
    const MassCase c = MakeMass(3, n, DataKind::kHeavyTailed, 1);
    const auto one = Bits(Run(*WithThreads(1), c));
    EXPECT_EQ(Bits(Run(*WithThreads(2), c)), one);
    EXPECT_EQ(Bits(Run(*WithThreads(3), c)), one);
  }
}

// So callers may cut a context into calls as they like.
TEST_P(BackendMass, ABlockHasTheSameMassWhereverItLies) {
  const auto scores = RandomNormal(150 * kBlockTokens, 81, 2);
  const auto whole = Run(backend(), OneHead(scores, 1, 0.5f));
  for (const std::size_t first : {1, 13, 149}) {
    const std::vector<float> part(
        scores.begin() + static_cast<std::ptrdiff_t>(first * kBlockTokens), scores.end());
    EXPECT_EQ(Bits(Run(backend(), OneHead(part, 1, 0.5f))), Bits(std::span(whole).subspan(first)));
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendMass);

// --- scores of other tables ---------------------------------------------------------------------

class BackendKeyStride : public BackendTest {
 protected:
  static constexpr std::int32_t kGroup = 3;

  // The keys of rows [n][2][dim] at another distance, NaN between them and nothing after the last.
  static OffsetBuffer<Half> Place(const std::vector<Half>& rows, std::int64_t dim,
                                  std::int64_t stride) {
    constexpr Half kHalfNaN = 0x7E00;
    const std::int64_t n = static_cast<std::int64_t>(rows.size()) / (2 * dim);
    OffsetBuffer<Half> out(static_cast<std::size_t>(n == 0 ? 0 : (n - 1) * stride + dim), kHalfNaN);
    for (std::int64_t i = 0; i < n; ++i) {
      std::copy_n(rows.begin() + i * 2 * dim, dim, out.data() + i * stride);
    }
    return out;
  }

  static std::vector<float> Run(const Backend& backend, std::int32_t dim, std::int64_t n,
                                std::int64_t stride, const OffsetBuffer<Half>& keys) {
    const OffsetBuffer<float> q(RandomNormal(kGroup * dim, 6));
    OffsetBuffer<float> out(static_cast<std::size_t>(kGroup * n));
    const std::vector<ScoreHead> heads = {{keys.data(), q.data(), out.data(), n}};
    backend.Score({dim, kGroup, n, heads, stride});
    return {out.span().begin(), out.span().end()};
  }
};

TEST_P(BackendKeyStride, ScoresDoNotDependOnTheStride) {
  for (const std::int32_t dim : {16, 80, 128}) {
    for (const std::int64_t n : {0, 1, 15, 17, 64, 1030}) {  // 1030: more than one task
      const auto rows = RandomRows(DataKind::kNormal, n, dim, 5);
      const auto plain = Run(backend(), dim, n, 0, OffsetBuffer<Half>(rows));
      EXPECT_TRUE(Near(plain, Run(ref(), dim, n, 0, OffsetBuffer<Half>(rows)), 2e-5));
      for (const std::int64_t stride : {dim, dim + 1, 2 * dim, 5 * dim + 7}) {
        const OffsetBuffer<Half> keys = Place(rows, dim, stride);
        EXPECT_EQ(Bits(Run(backend(), dim, n, stride, keys)), Bits(plain)) << stride;
        EXPECT_EQ(Bits(Run(ref(), dim, n, stride, keys)),
                  Bits(Run(ref(), dim, n, 0, OffsetBuffer<Half>(rows))))
            << stride;
      }
    }
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendKeyStride);

}  // namespace
}  // namespace fathom::test
