// SPDX-License-Identifier: MIT
// Dense attention by ggml, called as libllama calls it: the rival of `fathom bench attend` and
// `fathom bench prefill`. Only the graph of the attention itself is timed; graphs are made once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench_machine.h"
#include "fathom/store.h"

namespace fathom::cli {

// Keys and values of the first n_layers layers of a row store as libllama keeps them: fp16, one row
// of all KV heads per token, and for attention by soft_max the values transposed.
class GgmlCache {
 public:
  // rows: outlives this.
  GgmlCache(const RowStore& rows, std::int64_t n_layers, std::int64_t n_tokens);

  // Bytes of a layer: keys and both kinds of values.
  static double LayerBytes(HeadGeometry heads, std::int64_t n_tokens);

  std::int64_t n_layers() const { return static_cast<std::int64_t>(layers_.size()); }
  std::int64_t n_tokens() const { return n_tokens_; }
  const HeadGeometry& heads() const { return rows_.geometry(); }
  const RowStore& rows() const { return rows_; }
  // [n_tokens][n_kv_heads][D], the same, and [n_kv_heads][D][n_tokens].
  Half* keys(std::int64_t layer) const { return At(layer, 0); }
  Half* values(std::int64_t layer) const { return At(layer, 1); }
  Half* transposed_values(std::int64_t layer) const { return At(layer, 2); }

 private:
  Half* At(std::int64_t layer, std::size_t part) const;

  const RowStore& rows_;
  std::int64_t n_tokens_;
  std::vector<PageBuffer> layers_;  // [3][n_tokens * n_kv_heads * D]
};

// One way to attend, for the last n_queries tokens of the cache, each of which sees the tokens up
// to itself.
class GgmlAttention {
 public:
  enum class Kind : std::uint8_t {
    kFlash,      // flash attention on libllama's layout
    kFlashRows,  // on the row store as it is, where the keys of a head lie closer together
    kSoftMax,    // products and soft_max on libllama's layout, as libllama without flash attention
  };
  static constexpr std::array kKinds = {Kind::kFlash, Kind::kFlashRows, Kind::kSoftMax};
  static const char* Name(Kind kind);

  // cache: outlives this.
  GgmlAttention(const GgmlCache& cache, Kind kind, std::int64_t n_queries, int n_threads);
  ~GgmlAttention();
  GgmlAttention(const GgmlAttention&) = delete;
  GgmlAttention& operator=(const GgmlAttention&) = delete;

  // q: [n_queries][n_heads][D]. Throws Error(kInternal) when ggml fails.
  void Run(std::int64_t layer, const float* q);
  // Of the last Run: [n_queries][n_heads][D].
  const float* out() const;

  // Memory that the graph takes beside the cache.
  std::int64_t work_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Relative L2 of a rival's output to ours. Throws Error(kInternal) where they are not the same
// attention: what it costs would mean nothing.
double CheckedDifference(const std::string& name, const float* theirs,
                         const std::vector<float>& ours);

}  // namespace fathom::cli
