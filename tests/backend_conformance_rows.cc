// SPDX-License-Identifier: MIT
// Every backend against `ref`: what reads the fp16 rows, exact scores and attention.
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

}  // namespace
}  // namespace fathom::test
