// SPDX-License-Identifier: MIT
// Every backend against `ref`: what reads the fp16 rows, exact scores, attention and prefill.
#include <gtest/gtest.h>

#include "support/attend_cases.h"
#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

constexpr double kBound = 2e-5;  // relative L2
constexpr Half kHalfInf = 0x7C00;
constexpr Half kHalfNaN = 0x7E00;

// --- exact scores -------------------------------------------------------------------------------

class BackendScore : public BackendTest {
 protected:
  static std::vector<float> Run(const Backend& backend, std::int32_t dim, std::int32_t group,
                                const OffsetBuffer<Half>& rows, const OffsetBuffer<float>& q) {
    const auto n = static_cast<std::int64_t>(rows.size()) / (2 * dim);
    OffsetBuffer<float> out(static_cast<std::size_t>(group * n));
    const std::vector<ScoreHead> heads = {{rows.data(), q.data(), out.data(), n}};
    backend.Score({dim, group, n, heads});
    return {out.span().begin(), out.span().end()};
  }

  void Check(std::int32_t dim, std::int32_t group, std::int64_t n, DataKind kind) {
    const OffsetBuffer<Half> rows(RandomRows(kind, n, dim, 5));
    const OffsetBuffer<float> q(RandomNormal(group * dim, 6));
    EXPECT_TRUE(Near(Run(backend(), dim, group, rows, q), Run(ref(), dim, group, rows, q), kBound))
        << "dim " << dim << " group " << group << " n " << n;
  }
};

TEST_P(BackendScore, IsCloseToRef) {
  for (const std::int64_t n : {0, 1, 15, 16, 17, 63, 64, 65, 2100}) {
    Check(64, 3, n, DataKind::kHeavyTailed);
  }
  for (const std::int32_t group : {1, 2, 4, 5, 8, 16}) Check(80, group, 70, DataKind::kNormal);
  for (const std::int32_t dim : {16, 128, 256}) Check(dim, 4, 70, DataKind::kSmooth);
}

TEST_P(BackendScore, NotANumberAndInfinityByPlace) {
  constexpr std::int32_t kDim = 32;
  OffsetBuffer<Half> rows(RandomRows(DataKind::kNormal, 40, kDim, 5));
  rows[3 * 2 * kDim + 1] = kHalfNaN;
  rows[17 * 2 * kDim + 30] = kHalfInf;
  rows[18 * 2 * kDim + kDim] = kHalfNaN;  // a value: no score sees it
  rows[19 * 2 * kDim + 2] = 0x0001;       // subnormal
  const OffsetBuffer<float> q(RandomNormal(2 * kDim, 6));
  EXPECT_TRUE(Near(Run(backend(), kDim, 2, rows, q), Run(ref(), kDim, 2, rows, q), kBound));
}

FATHOM_TEST_ALL_BACKENDS(BackendScore);

// --- attend -------------------------------------------------------------------------------------

class BackendAttend : public BackendTest {
 protected:
  void Check(const AttendCase& c) {
    ExpectSame(RunAttend(backend(), c), RunAttend(ref(), c),
               "dim " + std::to_string(c.dim) + " group " + std::to_string(c.group) + " n " +
                   std::to_string(c.n_attended) + (c.dense ? " dense" : " listed"));
  }
};

TEST_P(BackendAttend, IsCloseToRef) {
  for (const bool dense : {false, true}) {
    for (const std::int64_t n : {0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 1500}) {
      Check(MakeAttend(64, 4, n, dense));
    }
    for (const std::int32_t group : {1, 2, 3, 5, 6, 7, 8, 16}) {
      Check(MakeAttend(80, group, 130, dense));
    }
    for (const std::int32_t dim : {16, 48, 128, 256}) Check(MakeAttend(dim, 4, 600, dense));
  }
}

TEST_P(BackendAttend, AHeadThatAttendsNothing) {
  AttendCase c = MakeAttend(64, 3, 300, false);
  for (auto& m : c.mask) m = static_cast<std::uint16_t>(m & 5);
  const AttendState actual = RunAttend(backend(), c);
  ExpectSame(actual, RunAttend(ref(), c), "head 1 masked");
  EXPECT_EQ(actual.lse[1], -std::numeric_limits<float>::infinity());
  for (std::size_t d = 64; d < 128; ++d) EXPECT_EQ(actual.out[d], 0.0f);
}

TEST_P(BackendAttend, HotAndColdScores) {
  for (const bool dense : {false, true}) {
    AttendCase c = MakeAttend(64, 4, 900, dense);
    for (auto& rows : c.rows) {  // one key far ahead of the others, whose weights vanish
      for (std::size_t d = 0; d < 64; ++d) {
        const std::size_t token = dense ? 700 : static_cast<std::size_t>(c.tokens[700]);
        rows[token * 128 + d] = FloatToHalf(30.0f * static_cast<float>(d % 2 == 0 ? 1 : -1));
      }
    }
    Check(c);
  }
}

TEST_P(BackendAttend, MaskedRowsMayHoldAnything) {
  AttendCase c = MakeAttend(64, 3, 300, false);
  for (auto& m : c.mask) m = 7;
  const AttendState clean = RunAttend(backend(), c);
  AttendCase dirty = c;
  const std::size_t row = static_cast<std::size_t>(c.tokens[150]) * 128;
  for (auto& rows : dirty.rows) {
    rows[row + 3] = kHalfNaN;
    rows[row + 64 + 5] = kHalfInf;
  }
  dirty.mask[150] = 2;  // only head 1 attends the row
  c.mask[150] = 2;
  const AttendState reference = RunAttend(backend(), c);
  const AttendState actual = RunAttend(backend(), dirty);
  ExpectSame(actual, RunAttend(ref(), dirty), "dirty row");
  const auto heads = [](const AttendState& s, std::size_t h) {
    return Bits(std::span(s.out).subspan(h * 64, 64));
  };
  EXPECT_EQ(heads(actual, 0), heads(reference, 0));
  EXPECT_EQ(heads(actual, 2), heads(reference, 2));
  EXPECT_TRUE(std::isnan(actual.out[64]));
  EXPECT_NE(heads(clean, 0), heads(reference, 0));
}

TEST_P(BackendAttend, NotANumberByPlace) {
  for (const bool dense : {false, true}) {
    AttendCase c = MakeAttend(64, 4, 600, dense);
    const std::size_t row = (dense ? 599 : static_cast<std::size_t>(c.tokens[599])) * 128;
    c.rows[0][row + 64 + 7] = kHalfNaN;  // channel 7 of the output of head 0
    c.rows[1][row + 1] = kHalfNaN;       // the score: all channels
    Check(c);
  }
}

TEST_P(BackendAttend, ThreadsDoNotChangeResults) {
  for (const bool dense : {false, true}) {
    const AttendCase c = MakeAttend(64, 4, 3000, dense);
    const AttendState one = RunAttend(*WithThreads(1), c);
    for (const int threads : {2, 3}) {
      const AttendState more = RunAttend(*WithThreads(threads), c);
      EXPECT_EQ(Bits(more.out), Bits(one.out));
      EXPECT_EQ(Bits(more.lse), Bits(one.lse));
    }
  }
}

FATHOM_TEST_ALL_BACKENDS(BackendAttend);

// --- prefill ------------------------------------------------------------------------------------

struct PrefillCase {
  HeadGeometry geometry;
  std::int64_t first = 0, n_queries = 0;
};

class BackendPrefill : public BackendTest {
 protected:
  static std::vector<OffsetBuffer<Half>> Rows(const PrefillCase& c) {
    std::vector<OffsetBuffer<Half>> rows;
    rows.reserve(static_cast<std::size_t>(c.geometry.n_kv_heads));
    for (std::int32_t h = 0; h < c.geometry.n_kv_heads; ++h) {
      rows.emplace_back(RandomRows(DataKind::kNormal, c.first + c.n_queries, c.geometry.head_dim,
                                   static_cast<std::uint64_t>(h) + 1));
    }
    return rows;
  }

  static std::vector<float> Run(const Backend& backend, const PrefillCase& c,
                                const std::vector<OffsetBuffer<Half>>& rows) {
    const std::int64_t size = c.n_queries * c.geometry.n_heads * c.geometry.head_dim;
    const OffsetBuffer<float> q(RandomNormal(size, 12));
    OffsetBuffer<float> out(static_cast<std::size_t>(size), 5.0f);
    std::vector<const Half*> pointers;
    pointers.reserve(rows.size());
    for (const auto& r : rows) pointers.push_back(r.data());
    backend.Prefill({c.geometry, 1 / std::sqrt(static_cast<float>(c.geometry.head_dim)), c.first,
                     c.n_queries, q.data(), out.data(), pointers});
    return {out.span().begin(), out.span().end()};
  }

  void Check(const PrefillCase& c) {
    const auto rows = Rows(c);
    EXPECT_TRUE(Near(Run(backend(), c, rows), Run(ref(), c, rows), kBound))
        << "heads " << c.geometry.n_heads << '/' << c.geometry.n_kv_heads << " dim "
        << c.geometry.head_dim << " first " << c.first << " n " << c.n_queries;
  }
};

TEST_P(BackendPrefill, IsCloseToRef) {
  for (const std::int64_t n : {0, 1, 5, 63, 64, 65, 200}) Check({{4, 2, 64}, 0, n});
  for (const std::int64_t first : {1, 63, 64, 65, 300}) {
    Check({{4, 2, 64}, first, 1});
    Check({{4, 2, 64}, first, 70});
  }
  for (const std::int32_t group : {1, 2, 3, 5, 6, 7, 8, 16}) Check({{group, 1, 48}, 30, 77});
  for (const std::int32_t dim : {16, 80, 128, 256}) Check({{4, 1, dim}, 10, 150});
}

TEST_P(BackendPrefill, SeveralTilesPerHead) { Check({{4, 2, 16}, 100, 900}); }

TEST_P(BackendPrefill, LaterRowsMayHoldAnything) {
  const PrefillCase c{{4, 2, 64}, 5, 150};
  auto rows = Rows(c);
  rows[0][(5 + 70) * 128 + 64 + 9] = kHalfInf;  // value of position 70 of the chunk
  rows[1][(5 + 90) * 128 + 3] = kHalfNaN;       // key of position 90
  const auto clean = Run(backend(), c, Rows(c));
  const auto dirty = Run(backend(), c, rows);
  EXPECT_TRUE(Near(dirty, Run(ref(), c, rows), kBound));
  const std::size_t row = 4 * 64;
  const std::size_t before = 70 * row;
  EXPECT_TRUE(Near(std::span(dirty).first(before), std::span(clean).first(before), 1e-6));
  EXPECT_TRUE(std::isinf(dirty[70 * row + 9]));
  EXPECT_TRUE(std::isnan(dirty[90 * row + 2 * 64]));
  EXPECT_FALSE(std::isnan(dirty[89 * row + 2 * 64]));
}

TEST_P(BackendPrefill, ThreadsDoNotChangeResults) {
  const PrefillCase c{{4, 2, 32}, 10, 300};
  const auto rows = Rows(c);
  const auto one = Bits(Run(*WithThreads(1), c, rows));
  EXPECT_EQ(Bits(Run(*WithThreads(2), c, rows)), one);
  EXPECT_EQ(Bits(Run(*WithThreads(3), c, rows)), one);
}

// A chunk at a time or all at once: the same attention.
TEST_P(BackendPrefill, ChunksJoin) {
  const PrefillCase whole{{2, 1, 32}, 0, 200};
  const auto rows = Rows(whole);
  const auto expected = Run(backend(), whole, rows);
  const OffsetBuffer<float> q(RandomNormal(200 * 64, 12));
  std::vector<float> out(200 * 64);
  for (std::int64_t first = 0; first < 200; first += 37) {
    const std::int64_t n = std::min<std::int64_t>(37, 200 - first);
    const std::vector<const Half*> pointers = {rows[0].data()};
    backend().Prefill({whole.geometry, 1 / std::sqrt(32.0f), first, n, q.data() + first * 64,
                       out.data() + first * 64, pointers});
  }
  EXPECT_TRUE(Near(out, expected, kBound));
}

FATHOM_TEST_ALL_BACKENDS(BackendPrefill);

}  // namespace
}  // namespace fathom::test
