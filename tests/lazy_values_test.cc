// SPDX-License-Identifier: MIT
// values=lazy: values of winners are read only where they matter.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/half.h"
#include "fathom/fathom.h"
#include "support/compare.h"
#include "support/layered_session.h"

namespace fathom {
namespace {

using test::LayeredSession;
using test::Near;
using test::Size;

constexpr std::int64_t kN = 1500;
const std::vector<std::string> kSpecs = {
    "exact:k=300,min=0,residual=off", "exact:k=300,min=0,residual=mean",
    "fathom:k=300,min=0,plan=measured", "landmark:k=300,min=0", "full4:k=300,min=0"};

// Keys that make the weights of some tokens far larger than those of most.
struct UnevenSession : LayeredSession {
  explicit UnevenSession(std::uint64_t seed, int n_threads = 1)
      : LayeredSession(2, {8, 2, 64}, kN, seed, n_threads) {
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      for (std::int64_t t = 0; t < kN; ++t) {
        for (std::int32_t kv = 0; kv < 2; ++kv) {
          for (std::int32_t d = 0; d < 64; ++d) {
            Key(layer, t, kv, d) *= 1 + static_cast<float>(t % 5);
          }
        }
      }
    }
    AddRecent({1200, 1300, 1400}, seed + 1);
    Write();
  }
};

TEST(LazyValues, ReadLessAndLoseLittle) {
  const UnevenSession session(1);
  for (const std::string& spec : kSpecs) {
    const auto all = session.Make(spec + ",values=all");
    const auto lazy = session.Make(spec + ",values=lazy");
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      const auto q = session.Query(3, 2);
      EXPECT_TRUE(Near(session.Attend(*lazy, q, layer), session.Attend(*all, q, layer), 0.03))
          << spec;
    }
    const MethodCounters& a = all->counters();
    const MethodCounters& l = lazy->counters();
    EXPECT_EQ(a.rows, l.rows) << spec;
    EXPECT_EQ(a.value_rows, a.rows) << spec;
    EXPECT_LT(l.value_rows, 0.8 * static_cast<double>(l.rows)) << spec;
    EXPECT_GT(l.value_rows, 0.1 * static_cast<double>(l.rows)) << spec;
    EXPECT_EQ(l.row_bytes, (l.rows + l.value_rows) * 2 * 64) << spec;
    EXPECT_EQ(all->MemoryBytes(), lazy->MemoryBytes()) << spec;
  }
}

// Light rows have the mean value: where all values but those of the heaviest rows are that, nothing
// is lost.
TEST(LazyValues, LightRowsHaveTheMeanValue) {
  UnevenSession session(4);
  for (std::int64_t t = 0; t < kN; ++t) {
    for (std::int32_t kv = 0; kv < 2; ++kv) {
      for (std::int32_t d = 0; d < 64; ++d) {
        session.Value(0, t, kv, d) = static_cast<float>(d % 7);
      }
    }
  }
  session.Write();
  const auto q = session.Query(5);
  const auto lazy = session.Make("exact:k=300,min=0,values=lazy");
  const auto all = session.Make("exact:k=300,min=0");
  EXPECT_TRUE(Near(session.Attend(*lazy, q), session.Attend(*all, q), 1e-5));
  EXPECT_LT(lazy->counters().value_rows, lazy->counters().rows);
}

TEST(LazyValues, OfEvenAttentionAreAll) {
  LayeredSession session(1, {4, 2, 64}, kN, 6);
  session.Write();
  const auto q = session.Query(7, 0.01);  // all weights nearly alike
  const auto lazy = session.Make("exact:k=300,min=0,values=lazy");
  const auto all = session.Make("exact:k=300,min=0,values=all");
  EXPECT_TRUE(Near(session.Attend(*lazy, q), session.Attend(*all, q), 1e-6));
  EXPECT_EQ(lazy->counters().value_rows, lazy->counters().rows);
}

TEST(LazyValues, DenseStepsReadAll) {
  const UnevenSession session(8);
  const auto lazy = session.Make("exact:k=300,values=lazy,min=4000");
  const auto dense = session.Make("dense");
  const auto q = session.Query(9);
  EXPECT_EQ(session.Attend(*lazy, q), session.Attend(*dense, q));
  EXPECT_EQ(lazy->counters().value_rows, 2 * kN);
  EXPECT_EQ(lazy->counters().row_bytes, dense->counters().row_bytes);
}

TEST(LazyValues, DoNotDependOnTheNumberOfThreads) {
  const UnevenSession one(10, 1);
  const UnevenSession two(10, 2);
  for (const std::string& spec : kSpecs) {
    const auto first = one.Make(spec + ",values=lazy");
    const auto second = two.Make(spec + ",values=lazy");
    const auto q = one.Query(11);
    EXPECT_EQ(one.Attend(*first, q), two.Attend(*second, q)) << spec;
    EXPECT_EQ(first->counters().value_rows, second->counters().value_rows) << spec;
  }
}

// A damaged value that is not attended makes the mean value unusable: light rows then add their
// weight alone.
TEST(LazyValues, MeanThatIsNoNumberIsLeftOut) {
  UnevenSession session(12);
  const auto q = session.Query(13);
  const auto probe = session.Make("exact:k=300,min=0");
  session.Attend(*probe, q);
  const auto attended = probe->attended(0).tokens;
  std::int64_t spared = 500;
  while (std::ranges::find(attended, spared) != attended.end()) ++spared;
  session.Value(0, spared, 0, 3) = std::numeric_limits<float>::infinity();
  session.Write();
  const auto lazy = session.Make("exact:k=300,min=0,values=lazy");
  for (const float x : session.Attend(*lazy, q)) ASSERT_TRUE(std::isfinite(x));
}

TEST(LazyValues, AreAnOptionOfMethodsWithAResidual) {
  EXPECT_NO_THROW(ValidateMethodSpec(MethodSpec::Parse("sparq:values=lazy")));
  for (const char* spec : {"quest:values=lazy", "dense:values=lazy", "random:values=all",
                           "fathom:values=some", "streaming:values=all"}) {
    EXPECT_THROW(ValidateMethodSpec(MethodSpec::Parse(spec)), Error) << spec;
  }
}

}  // namespace
}  // namespace fathom
