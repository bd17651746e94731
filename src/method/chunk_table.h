// SPDX-License-Identifier: MIT
// Tables with one entry per chunk of consecutive tokens: what methods keep that score chunks
// instead of tokens (landmark, quest). Entries are fp16 vectors of keys in the index's basis, made
// of finished blocks only, so an entry never changes once it is there.
//
// Not thread-safe; the work inside a call is spread over layers and KV heads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fathom/method.h"
#include "method/options.h"

namespace fathom {

struct ChunkShape {
  std::int32_t chunk = 8;     // tokens per entry, a divisor of 64
  std::int32_t vectors = 1;   // vectors of D numbers per entry
  std::int32_t head_dim = 0;  // D

  std::int32_t EntryHalfs() const { return vectors * head_dim; }
  // One KV head: whole blocks of n_tokens tokens.
  std::int64_t Bytes(std::int64_t n_tokens) const {
    return n_tokens / kBlockTokens * (kBlockTokens / chunk) * EntryHalfs() *
           std::int64_t{sizeof(Half)};
  }
  // Of a scan of all entries, per token.
  double ReadBits() const { return 16.0 * EntryHalfs() / chunk; }
};

// Reads the number of tokens per entry under the name `key`: a divisor of the block.
std::int32_t ReadChunk(OptionReader& options, const char* key, const char* fallback);

// Makes the entry of one chunk. x: [chunk][D] keys, centred and in the basis; entry: [vectors][D].
using SummarizeFn = void (*)(const float* x, const ChunkShape& shape, float* entry);

class ChunkTable {
 public:
  ChunkTable(const MethodContext& context, ChunkShape shape, BasisRule basis,
             SummarizeFn summarize);

  const ChunkShape& shape() const { return shape_; }
  // Tokens that a layer had when its table was made; 0 where there is none.
  std::int64_t built_tokens(std::int32_t layer) const {
    return built_tokens_[static_cast<std::size_t>(layer)];
  }

  // Makes the tables of the finished blocks of n_tokens tokens, in all layers that have none.
  void BuildAll(std::int64_t n_tokens);
  // Brings one layer up to the finished blocks of n_tokens tokens, building it where there is none.
  void Extend(std::int32_t layer, std::int64_t n_tokens);
  // Cuts to n_tokens. Where that is less than a table was built from, the table goes with its
  // basis, whose statistics saw what is gone.
  void Truncate(std::int64_t n_tokens);
  std::int64_t MemoryBytes() const;

  // Queries of one layer in the coordinates of its tables. q, out: [n_heads][D]; offset: [n_heads],
  // what every score lacks because keys are centred. Requires a table.
  void MapQueries(std::int32_t layer, const float* q, float* out, float* offset) const;
  // Products of q (in the basis) with vector `vector` of the entries of the first n_tokens tokens.
  // scores: [n_heads][n_tokens / chunk]. Requires a table that has them.
  void Score(std::int32_t layer, std::int32_t vector, std::int64_t n_tokens, const float* q,
             float* scores);
  // Tokens inherit the score of their entry. scores: [n_heads][n_tokens / chunk]; out:
  // [n_heads][stride].
  void Spread(const float* scores, std::int64_t n_tokens, float* out, std::int64_t stride) const;

 private:
  struct Head {
    Basis basis;
    std::vector<Half> entries;  // [entries][vectors][D]
  };

  std::size_t Slot(std::int32_t layer, std::int32_t kv_head) const;
  Head NewHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) const;
  void Append(std::int32_t layer, std::int32_t kv_head, std::int64_t n_blocks, Head* head) const;
  std::size_t BlockHalfs() const;

  const MethodContext context_;
  const ChunkShape shape_;
  const BasisRule rule_;
  const SummarizeFn summarize_;
  std::vector<Head> heads_;                 // [n_layers][n_kv_heads]
  std::vector<std::int64_t> built_tokens_;  // [n_layers]
  std::vector<ScoreHead> scan_;             // [n_kv_heads]
};

}  // namespace fathom
