// SPDX-License-Identifier: MIT
#include <algorithm>

#include "engine/query_sampling.h"
#include "fathom/session.h"
#include "memory/system_memory.h"

namespace fathom {

SessionMemory EstimateMemory(const ModelInfo& model, const MethodSpec& method,
                             std::int64_t n_tokens, std::int32_t chunk) {
  SessionMemory memory;
  memory.rows_bytes = RowStore::Bytes(model.n_layers, model.heads, n_tokens);
  memory.index_bytes = IndexBytes(method, model.n_layers, model.heads, n_tokens);
  // Widest activations of a chunk in fp32: two of the feed-forward width, and of the residual, q,
  // k, v and output; plus the logits, one layer's scores, and the queries kept for statistics.
  const std::int64_t heads_width =
      std::int64_t{model.heads.head_dim} * (2 * model.heads.n_heads + 2 * model.heads.n_kv_heads);
  const std::int64_t per_token =
      4 * (2 * std::int64_t{model.n_ff} + 4 * std::int64_t{model.n_embd} + heads_width);
  const std::int64_t in_chunk = std::min<std::int64_t>(chunk, n_tokens);
  memory.workspace_bytes = per_token * in_chunk +
                           4 * (model.n_vocab + n_tokens * model.heads.n_heads) +
                           QuerySampleBytes(model.n_layers, model.heads, n_tokens);
  memory.weights_bytes = model.file_bytes + model.repacked_bytes;
  memory.available_bytes = AvailableMemoryBytes();
  return memory;
}

}  // namespace fathom
