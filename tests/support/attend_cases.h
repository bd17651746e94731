// SPDX-License-Identifier: MIT
// Calls of Backend::Attend for the backend tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {

struct AttendState {
  std::vector<float> out, lse;
  std::vector<std::int64_t> n_values;  // per KV head
};

inline void ExpectSame(const AttendState& actual, const AttendState& expected,
                       const std::string& what) {
  constexpr double kBound = 2e-5;  // relative L2
  constexpr float kLseBound = 1e-4f;
  EXPECT_TRUE(Near(actual.out, expected.out, kBound)) << what;
  EXPECT_EQ(actual.n_values, expected.n_values) << what;
  ASSERT_EQ(actual.lse.size(), expected.lse.size());
  for (std::size_t i = 0; i < actual.lse.size(); ++i) {
    const float a = actual.lse[i];
    const float e = expected.lse[i];
    if (std::isnan(e) || std::isinf(e)) {
      EXPECT_TRUE(a == e || (std::isnan(a) && std::isnan(e))) << what << " lse " << a << ' ' << e;
    } else {
      EXPECT_NEAR(a, e, kLseBound) << what;
    }
  }
}

struct AttendCase {
  std::int32_t dim = 64;
  std::int32_t group = 4;
  std::vector<OffsetBuffer<Half>> rows;  // per KV head
  std::vector<std::int32_t> tokens;
  std::vector<std::uint16_t> mask;
  std::int64_t n_attended = 0;
  bool dense = false;
  float least_weight = 0;
  std::vector<float> mean_value;  // [D] of all KV heads; empty for none
};

inline AttendCase MakeAttend(std::int32_t dim, std::int32_t group, std::int64_t n, bool dense) {
  AttendCase c{.dim = dim, .group = group, .rows = {}, .tokens = {}, .mask = {}, .mean_value = {}};
  c.dense = dense;
  c.n_attended = n;
  Random random(8);
  for (std::int64_t i = 0; !dense && i < n; ++i) {
    c.tokens.push_back(static_cast<std::int32_t>(3 * i + random.Integer(0, 2)));
    c.mask.push_back(static_cast<std::uint16_t>(random.Integer(1, (1 << group) - 1)));
  }
  for (std::uint64_t h = 0; h < 2; ++h) {
    c.rows.emplace_back(RandomRows(DataKind::kNormal, dense ? n : 3 * n, dim, 9 + h));
  }
  return c;
}

// Queries of a case: [n_kv_heads][group][dim].
inline OffsetBuffer<float> AttendQueries(const AttendCase& c) {
  return OffsetBuffer<float>(
      RandomNormal(static_cast<std::int64_t>(c.rows.size()) * c.group * c.dim, 11));
}

inline AttendState RunAttend(const Backend& backend, const AttendCase& c) {
  const std::size_t n_heads = c.rows.size();
  const auto out_size = static_cast<std::size_t>(c.group * c.dim);
  const OffsetBuffer<float> q = AttendQueries(c);
  OffsetBuffer<float> out(n_heads * out_size, 5.0f);
  OffsetBuffer<float> lse(n_heads * static_cast<std::size_t>(c.group), 5.0f);
  const OffsetBuffer<float> mean(c.mean_value);
  std::vector<std::int64_t> n_values(n_heads, -1);
  std::vector<AttendHead> heads;
  for (std::size_t h = 0; h < n_heads; ++h) {
    heads.push_back({c.rows[h].data(), q.data() + h * out_size, c.dense ? nullptr : c.tokens.data(),
                     c.dense ? nullptr : c.mask.data(), c.n_attended, out.data() + h * out_size,
                     lse.data() + h * static_cast<std::size_t>(c.group),
                     c.mean_value.empty() ? nullptr : mean.data(), &n_values[h]});
  }
  backend.Attend({c.dim, c.group, 1 / std::sqrt(static_cast<float>(c.dim)), heads, c.least_weight});
  return {{out.span().begin(), out.span().end()}, {lse.span().begin(), lse.span().end()}, n_values};
}

}  // namespace fathom::test
