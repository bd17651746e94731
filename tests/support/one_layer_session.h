// SPDX-License-Identifier: MIT
// A session of one layer without a model, for tests of single methods: keys and queries are set by
// hand, and a step returns what a query head chose.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/half.h"
#include "fathom/fathom.h"
#include "support/random_data.h"

namespace fathom::test {

using Tokens = std::vector<std::int32_t>;

inline std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

inline std::int64_t IndexEnd(std::int64_t n) { return n / kBlockTokens * kBlockTokens; }
inline std::int64_t LastCandidate(std::int64_t n) { return std::min(IndexEnd(n), n - kWindow); }

// first .. end - 1.
inline Tokens Range(std::int64_t first, std::int64_t end) {
  Tokens tokens(Size(end - first));
  std::iota(tokens.begin(), tokens.end(), static_cast<std::int32_t>(first));
  return tokens;
}
inline Tokens Join(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// One layer. Keys are written whole, with random values.
struct Session {
  Session(std::int32_t group, std::int32_t n_kv, std::int32_t dim, std::int64_t n)
      : heads{group * n_kv, n_kv, dim},
        rows(1, heads, n),
        n_tokens(n),
        keys(Size(n * n_kv * dim)),
        queries{{QuerySamples(heads.n_heads, dim), QuerySamples(heads.n_heads, dim)}} {}

  float& Key(std::int64_t token, std::int32_t channel, std::int32_t kv = 0) {
    return keys[Size((token * heads.n_kv_heads + kv) * heads.head_dim + channel)];
  }
  void Write() {
    const auto values = RandomNormal(static_cast<std::int64_t>(keys.size()), 11);
    rows.Write(0, 0, n_tokens, keys.data(), values.data());
    rows.Commit(n_tokens);
  }
  double RowKey(std::int64_t token, std::int32_t channel, std::int32_t kv) const {
    return HalfToFloat(rows.rows(0, kv)[token * 2 * heads.head_dim + channel]);
  }
  MethodContext Context() const { return {&rows, backend.get(), &queries, false}; }
  std::unique_ptr<Method> Make(const std::string& spec) const {
    return MakeMethod(MethodSpec::Parse(spec), Context());
  }
  // A query of one head that has these first channels, the other heads zero.
  std::vector<float> Query(std::initializer_list<float> channels) const {
    std::vector<float> q(Size(heads.n_heads * heads.head_dim));
    std::copy(channels.begin(), channels.end(), q.begin());
    return q;
  }

  HeadGeometry heads;
  RowStore rows;
  std::int64_t n_tokens;
  std::vector<float> keys;  // [n][n_kv_heads][D]
  std::vector<LayerQueries> queries;
  std::unique_ptr<Backend> backend = MakeBackend("cpu", 2);
};

// The winners of one query head after a step at n tokens; checks the rest against the protocol.
inline Tokens Attend(Method& method, const Session& session, std::int64_t n,
                     const std::vector<float>& q, std::int32_t head = 0) {
  std::vector<float> out(q.size(), NAN);
  method.Attend(0, n, q.data(), out.data());
  for (const float x : out) EXPECT_TRUE(std::isfinite(x));
  const std::int32_t group = std::max(session.heads.group(), 1);
  const AttendedTokens step = method.attended(head / group);
  Tokens always, winners;
  for (std::size_t i = 0; i < step.tokens.size(); ++i) {
    const std::int32_t token = step.tokens[i];
    if ((step.mask[i] >> (head % group) & 1) == 0) continue;
    (token < kSinks || token >= LastCandidate(n) ? always : winners).push_back(token);
  }
  EXPECT_EQ(always, Join({Range(0, kSinks), Range(LastCandidate(n), n)}));
  return winners;
}

}  // namespace fathom::test
