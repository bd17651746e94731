// SPDX-License-Identifier: MIT
// What prefill must do on any backend, as checks against `ref`: shared by the conformance test, for
// the backends of this machine, and by the tests of kernels that it may lack.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/half.h"
#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {

struct PrefillCase {
  HeadGeometry geometry;
  std::int64_t first = 0, n_queries = 0;
  DataKind kind = DataKind::kNormal;  // of keys
  double query_scale = 1;
  double bias = 0;  // of four channels, as biased projections make them
};

class PrefillChecks {
 public:
  using Rows = std::vector<OffsetBuffer<Half>>;  // per KV head
  using Maker = std::function<std::unique_ptr<Backend>(int threads)>;

  explicit PrefillChecks(Maker make)
      : make_(std::move(make)), backend_(make_(2)), ref_(MakeBackend("ref", 1)) {}

  // Relative L2 against `ref`; infinite where NaN or inf do not match.
  double Error(const PrefillCase& c) const {
    const Rows rows = MakeRows(c);
    const auto actual = Run(*backend_, c, rows);
    const auto expected = Run(*ref_, c, rows);
    const Difference d = Compare(std::span<const float>(actual), std::span<const float>(expected));
    return d.matched() ? d.relative_l2 : std::numeric_limits<double>::infinity();
  }

  void CloseToRef() const {
    for (const std::int64_t n : {0, 1, 5, 63, 64, 65, 127, 128, 129, 200})
      Check({{4, 2, 64}, 0, n});
    for (const std::int64_t first : {1, 63, 64, 65, 127, 128, 129, 300}) {
      Check({{4, 2, 64}, first, 1});
      Check({{4, 2, 64}, first, 70});
    }
    for (const std::int32_t group : {1, 2, 3, 5, 6, 7, 8, 16}) Check({{group, 1, 48}, 30, 77});
    for (const std::int32_t dim : {16, 32, 80, 96, 112, 128, 240, 256})
      Check({{4, 1, dim}, 10, 150});
  }

  void SeveralTilesPerHead() const { Check({{4, 2, 16}, 100, 900}); }

  void OtherData() const {
    Check({{4, 1, 64}, 100, 200, DataKind::kHeavyTailed, 0.5});
    Check({{4, 1, 64}, 100, 200, DataKind::kSmooth, 0.25});
    Check({{4, 1, 64}, 100, 200, DataKind::kConstant});
    Check({{4, 1, 64}, 100, 200, DataKind::kNormal, 0});
    Check({{4, 1, 64}, 100, 200, DataKind::kNormal, 8});  // nearly one winner per query
  }

  // A score is the small difference of products in the thousands, so that its 16 or 24 bits show in
  // the result; rounding such keys to fp16 has cost 20 times more.
  void BiasedKeys() const {
    EXPECT_LT(Error({{4, 1, 128}, 200, 60, DataKind::kNormal, 1, 500}), 2e-3);
  }

  // Subnormal halves count with their value.
  void SubnormalRows() const {
    PrefillCase c{{4, 1, 64}, 50, 100};
    c.query_scale = 0x1p17;
    Rows rows = MakeRows(c);
    for (auto& head : rows) {
      for (std::size_t i = 0; i < head.size(); ++i) {
        head[i] = FloatToHalf(std::ldexp(HalfToFloat(head[i]), -17));
      }
    }
    EXPECT_TRUE(Near(Run(*backend_, c, rows), Run(*ref_, c, rows), kBound));
  }

  // Rows up to the first that sees a number which is none are what they are without it, bit by bit.
  void LaterRowsMayHoldAnything() const {
    const PrefillCase c{{4, 2, 64}, 5, 150};
    Rows rows = MakeRows(c);
    rows[0][(5 + 70) * 128 + 64 + 9] = kHalfInf;  // value of position 70 of the chunk
    rows[1][(5 + 90) * 128 + 3] = kHalfNaN;       // key of position 90
    const auto clean = Run(*backend_, c, MakeRows(c));
    const auto dirty = Run(*backend_, c, rows);
    EXPECT_TRUE(Near(dirty, Run(*ref_, c, rows), kBound));
    const std::size_t row = 4 * 64;
    for (std::size_t t = 0; t < 90; ++t) {
      for (std::size_t kv_head = t < 70 ? 0 : 1; kv_head < 2; ++kv_head) {
        const auto heads = [&](const std::vector<float>& out) {
          return Bits(std::span(out).subspan(t * row + kv_head * row / 2, row / 2));
        };
        EXPECT_EQ(heads(dirty), heads(clean)) << "query " << t << " KV head " << kv_head;
      }
    }
    EXPECT_TRUE(std::isinf(dirty[70 * row + 9]));
    EXPECT_TRUE(std::isnan(dirty[90 * row + 2 * 64]));
    EXPECT_FALSE(std::isnan(dirty[89 * row + 2 * 64]));
  }

  // In rows all queries see: the inf of a key decides by the sign of the query's channel.
  void EarlyRowsWithoutANumber() const {
    const PrefillCase c{{4, 2, 32}, 140, 40};
    Rows rows = MakeRows(c);
    rows[0][3 * 64 + 7] = 0xFC00;  // key, -inf
    rows[1][130 * 64 + 32 + 4] = kHalfNaN;
    EXPECT_TRUE(Near(Run(*backend_, c, rows), Run(*ref_, c, rows), kBound));
  }

  void QueriesWithoutANumber() const {
    const PrefillCase c{{4, 2, 32}, 10, 40};
    const Rows rows = MakeRows(c);
    OffsetBuffer<float> q(RandomNormal(c.n_queries * 4 * 32, 12));
    q[3 * 128 + 5] = std::numeric_limits<float>::infinity();
    q[20 * 128 + 64] = std::numeric_limits<float>::quiet_NaN();
    q[21 * 128 + 64] = std::bit_cast<float>(0x7FFFFFFFu);  // the last of the NaNs
    EXPECT_TRUE(Near(Run(*backend_, c, rows, q), Run(*ref_, c, rows, q), kBound));
  }

  void ThreadsDoNotChangeResults() const {
    const PrefillCase c{{4, 2, 32}, 10, 300};
    const Rows rows = MakeRows(c);
    const auto one = Bits(Run(*make_(1), c, rows));
    EXPECT_EQ(Bits(Run(*make_(2), c, rows)), one);
    EXPECT_EQ(Bits(Run(*make_(3), c, rows)), one);
  }

  // A chunk at a time or all at once: the same attention.
  void ChunksJoin() const {
    const PrefillCase whole{{2, 1, 32}, 0, 200};
    const Rows rows = MakeRows(whole);
    const auto expected = Run(*backend_, whole, rows);
    const auto q = RandomNormal(200 * 64, 12);
    std::vector<float> out;
    for (std::int64_t first = 0; first < 200; first += 37) {
      const PrefillCase part{whole.geometry, first, std::min<std::int64_t>(37, 200 - first)};
      const std::vector<float> share(q.begin() + first * 64,
                                     q.begin() + (first + part.n_queries) * 64);
      const auto joined = Run(*backend_, part, rows, OffsetBuffer<float>(share));
      out.insert(out.end(), joined.begin(), joined.end());
    }
    EXPECT_TRUE(Near(out, expected, kBound));
  }

 private:
  static constexpr double kBound = 2e-5;  // relative L2
  static constexpr Half kHalfInf = 0x7C00;
  static constexpr Half kHalfNaN = 0x7E00;

  static Rows MakeRows(const PrefillCase& c) {
    Rows rows;
    rows.reserve(static_cast<std::size_t>(c.geometry.n_kv_heads));
    for (std::int32_t h = 0; h < c.geometry.n_kv_heads; ++h) {
      const auto seed = static_cast<std::uint64_t>(h) + 1;
      const std::int64_t n = c.first + c.n_queries;
      auto keys = RandomData(c.kind, n, c.geometry.head_dim, seed);
      for (std::size_t i = 0; c.bias != 0 && i < keys.size(); ++i) {
        const std::size_t d = i % static_cast<std::size_t>(c.geometry.head_dim);
        if (d % 32 == 5) keys[i] += static_cast<float>(d % 64 == 5 ? c.bias : -c.bias);
      }
      const auto values = RandomNormal(n * c.geometry.head_dim, seed + 1);
      rows.emplace_back(test::MakeRows(keys, values, c.geometry.head_dim));
    }
    return rows;
  }

  static std::vector<float> Run(const Backend& backend, const PrefillCase& c, const Rows& rows,
                                const OffsetBuffer<float>& q) {
    OffsetBuffer<float> out(q.size(), 5.0f);
    std::vector<const Half*> pointers;
    pointers.reserve(rows.size());
    for (const auto& r : rows) pointers.push_back(r.data());
    backend.Prefill({c.geometry, 1 / std::sqrt(static_cast<float>(c.geometry.head_dim)), c.first,
                     c.n_queries, q.data(), out.data(), pointers});
    return {out.span().begin(), out.span().end()};
  }

  static std::vector<float> Run(const Backend& backend, const PrefillCase& c, const Rows& rows) {
    const std::int64_t size = c.n_queries * c.geometry.n_heads * c.geometry.head_dim;
    return Run(backend, c, rows, OffsetBuffer<float>(RandomNormal(size, 12, c.query_scale)));
  }

  void Check(const PrefillCase& c) const {
    EXPECT_LE(Error(c), kBound) << "heads " << c.geometry.n_heads << '/' << c.geometry.n_kv_heads
                                << " dim " << c.geometry.head_dim << " first " << c.first << " n "
                                << c.n_queries << " kind " << static_cast<int>(c.kind)
                                << " queries * " << c.query_scale;
  }

  Maker make_;
  std::unique_ptr<Backend> backend_, ref_;
};

// Defines a test for each check; `test` is TEST_P or TEST_F, `checks` an expression of the fixture.
#define FATHOM_PREFILL_TESTS(test, fixture, checks)                                \
  test(fixture, IsCloseToRef) { checks.CloseToRef(); }                             \
  test(fixture, SeveralTilesPerHead) { checks.SeveralTilesPerHead(); }             \
  test(fixture, OtherData) { checks.OtherData(); }                                 \
  test(fixture, BiasedKeys) { checks.BiasedKeys(); }                               \
  test(fixture, SubnormalRows) { checks.SubnormalRows(); }                         \
  test(fixture, LaterRowsMayHoldAnything) { checks.LaterRowsMayHoldAnything(); }   \
  test(fixture, EarlyRowsWithoutANumber) { checks.EarlyRowsWithoutANumber(); }     \
  test(fixture, QueriesWithoutANumber) { checks.QueriesWithoutANumber(); }         \
  test(fixture, ThreadsDoNotChangeResults) { checks.ThreadsDoNotChangeResults(); } \
  test(fixture, ChunksJoin) { checks.ChunksJoin(); }                               \
  static_assert(true)

}  // namespace fathom::test
