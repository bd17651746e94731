// SPDX-License-Identifier: MIT
// A session of several layers and KV heads without a model: a test writes keys, values and queries,
// and sees through the spy what a method did.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fathom/calibration.h"
#include "fathom/fathom.h"
#include "support/random_data.h"
#include "support/spy_backend.h"

namespace fathom::test {

inline std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct LayeredSession {
  // Keys, values and queries are standard normal until a test changes them.
  LayeredSession(std::int32_t n_layers, HeadGeometry geometry, std::int64_t n, std::uint64_t seed,
                 int n_threads = 1)
      : heads(geometry),
        n_tokens(n),
        rows(n_layers, geometry, n),
        spy(MakeBackend("cpu", n_threads)) {
    const std::int64_t width = std::int64_t{geometry.n_kv_heads} * geometry.head_dim;
    for (std::int32_t layer = 0; layer < n_layers; ++layer) {
      const std::uint64_t first = seed + 10 * static_cast<std::uint64_t>(layer);
      keys.push_back(RandomNormal(n * width, first));
      values.push_back(RandomNormal(n * width, first + 1));
      queries.push_back({QuerySamples(heads.n_heads, heads.head_dim),
                         QuerySamples(heads.n_heads, heads.head_dim)});
    }
  }

  float& Key(std::int32_t layer, std::int64_t token, std::int32_t kv, std::int32_t channel) {
    return keys[Size(layer)][Place(token, kv, channel)];
  }
  float& Value(std::int32_t layer, std::int64_t token, std::int32_t kv, std::int32_t channel) {
    return values[Size(layer)][Place(token, kv, channel)];
  }
  // A query of all heads.
  std::vector<float> Query(std::uint64_t seed, double scale = 1) const {
    return RandomNormal(std::int64_t{heads.n_heads} * heads.head_dim, seed, scale);
  }
  void AddRecent(const std::vector<std::int64_t>& positions, std::uint64_t seed) {
    for (LayerQueries& layer : queries) {
      for (const std::int64_t p : positions) layer.recent.Add(p, Query(seed++).data());
    }
  }
  void Write() {
    for (std::int32_t layer = 0; layer < rows.n_layers(); ++layer) {
      rows.Write(layer, 0, n_tokens, keys[Size(layer)].data(), values[Size(layer)].data());
    }
    rows.Commit(n_tokens);
  }

  MethodContext Context(const Calibration* calibration = nullptr) const {
    return {&rows, &spy, &queries, true, calibration};
  }
  std::unique_ptr<Method> Make(const std::string& spec,
                               const Calibration* calibration = nullptr) const {
    return MakeMethod(MethodSpec::Parse(spec), Context(calibration));
  }
  std::vector<float> Attend(Method& method, const std::vector<float>& q, std::int32_t layer = 0,
                            std::int64_t n = -1) const {
    std::vector<float> out(q.size(), NAN);
    method.Attend(layer, n < 0 ? n_tokens : n, q.data(), out.data());
    return out;
  }
  // A calibration that knows nothing but the residual's factor, the same for all heads, of `spec`.
  Calibration WithFactor(const std::string& spec, float factor) const {
    Calibration calibration;
    calibration.n_layers = rows.n_layers();
    calibration.heads = heads;
    calibration.residual[Make(spec)->spec()] =
        std::vector<float>(Size(rows.n_layers()) * Size(heads.n_heads), factor);
    return calibration;
  }

  HeadGeometry heads;
  std::int64_t n_tokens;
  RowStore rows;
  SpyBackend spy;
  std::vector<std::vector<float>> keys, values;  // [n_layers][n][n_kv_heads][D]
  std::vector<LayerQueries> queries;

 private:
  std::size_t Place(std::int64_t token, std::int32_t kv, std::int32_t channel) const {
    return Size((token * heads.n_kv_heads + kv) * heads.head_dim + channel);
  }
};

}  // namespace fathom::test
