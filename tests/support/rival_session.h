// SPDX-License-Identifier: MIT
// A session of one layer and one KV head for tests of single methods: keys, values and queries are
// written channel by channel, and what a decode step attended is read back.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/half.h"
#include "fathom/fathom.h"
#include "support/random_data.h"

namespace fathom::test {

inline std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

using Winners = std::set<std::int64_t>;

class RivalSession {
 public:
  RivalSession(std::int32_t group, std::int32_t dim, std::int64_t n)
      : heads{group, 1, dim},
        n_tokens(n),
        keys(Size(n * dim)),
        values(keys.size()),
        queries{{QuerySamples(group, dim), QuerySamples(group, dim)}},
        q(Size(group * dim)),
        rows_(std::make_unique<RowStore>(1, heads, n + 64)),
        backend_(MakeBackend("cpu", 1)) {}

  float& Key(std::int64_t token, std::int64_t channel) {
    return keys[Size(token * heads.head_dim + channel)];
  }
  float& Value(std::int64_t token, std::int64_t channel) {
    return values[Size(token * heads.head_dim + channel)];
  }
  float& Q(std::int64_t head, std::int64_t channel) {
    return q[Size(head * heads.head_dim + channel)];
  }
  void Sample(std::int64_t position, const std::vector<std::vector<float>>& of_heads) {
    std::vector<float> sample(q.size());
    for (std::size_t h = 0; h < of_heads.size(); ++h) {
      std::ranges::copy(of_heads[h],
                        sample.begin() + static_cast<std::ptrdiff_t>(h * Size(heads.head_dim)));
    }
    queries[0].samples.Add(position, sample.data());
  }
  void RandomSamples(std::uint64_t seed) {
    for (std::int64_t p = 20; p < 120; p += 7) {
      const auto sample =
          RandomNormal(static_cast<std::int64_t>(q.size()), seed + static_cast<std::uint64_t>(p));
      queries[0].samples.Add(p, sample.data());
    }
  }

  // One decode step. What was attended is read from `method` then.
  void Run(const std::string& spec) {
    rows_->Write(0, 0, n_tokens, keys.data(), values.data());
    rows_->Commit(n_tokens);
    method = MakeMethod(MethodSpec::Parse(spec + ",min=0"),
                        {rows_.get(), backend_.get(), &queries, false, nullptr});
    out.assign(q.size(), NAN);
    method->Attend(0, n_tokens, q.data(), out.data());
  }

  std::int64_t last() const { return std::min(n_tokens / 64 * 64, n_tokens - 32); }
  Winners Of(std::int32_t head) const {
    Winners winners;
    const AttendedTokens attended = method->attended(0);
    for (std::size_t i = 0; i < attended.tokens.size(); ++i) {
      const std::int64_t token = attended.tokens[i];
      if (token >= kSinks && token < last() && (attended.mask[i] >> head & 1) != 0) {
        winners.insert(token);
      }
    }
    return winners;
  }
  double bits() const { return method->counters().mean_read_bits(); }
  // As the row store keeps it.
  double K(std::int64_t token, std::int64_t channel) const {
    return HalfToFloat(FloatToHalf(keys[Size(token * heads.head_dim + channel)]));
  }

  HeadGeometry heads;
  std::int64_t n_tokens;
  std::vector<float> keys, values;
  std::vector<LayerQueries> queries;
  std::vector<float> q, out;
  std::unique_ptr<Method> method;

 private:
  std::unique_ptr<RowStore> rows_;
  std::unique_ptr<Backend> backend_;
};

}  // namespace fathom::test
