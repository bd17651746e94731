// SPDX-License-Identifier: MIT
#include "method/table_method.h"

#include <algorithm>
#include <utility>

#include "base/parallel.h"
#include "method/head_stats.h"

namespace fathom {

TableMethod::TableMethod(const MethodContext& context, SparseConfig config, std::string spec)
    : SparseMethod(context, config, std::move(spec)),
      built_tokens_(static_cast<std::size_t>(n_layers())),
      n_blocks_(built_tokens_.size()) {}

void TableMethod::BuildAll(std::int64_t n_tokens) {
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  for (std::size_t layer = 0; layer < n_blocks_.size(); ++layer) {
    if (!Outgrown(built_tokens_[layer], n_tokens)) continue;
    built_tokens_[layer] = 0;
    n_blocks_[layer] = 0;
  }
  ParallelFor(static_cast<std::int64_t>(n_slots()), context_.backend->n_threads(),
              [&](std::int64_t slot) {
                const auto layer = static_cast<std::int32_t>(slot / geometry().n_kv_heads);
                const auto kv_head = static_cast<std::int32_t>(slot % geometry().n_kv_heads);
                if (built_tokens_[static_cast<std::size_t>(layer)] > 0) return;
                StartHead(layer, kv_head, n_tokens);
                ExtendHead(layer, kv_head, 0, n_blocks);
              });
  for (std::size_t layer = 0; layer < n_blocks_.size(); ++layer) {
    if (built_tokens_[layer] > 0) continue;
    built_tokens_[layer] = n_tokens;
    n_blocks_[layer] = n_blocks;
  }
}

void TableMethod::ExtendIndex(std::int32_t layer, std::int64_t n_tokens) {
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  std::int64_t& built = built_tokens_[static_cast<std::size_t>(layer)];
  std::int64_t& have = n_blocks_[static_cast<std::size_t>(layer)];
  const bool start = built == 0;
  if (!start && have >= n_blocks) return;
  ParallelFor(geometry().n_kv_heads, context_.backend->n_threads(), [&](std::int64_t h) {
    const auto kv_head = static_cast<std::int32_t>(h);
    if (start) StartHead(layer, kv_head, n_tokens);
    ExtendHead(layer, kv_head, have, n_blocks);
  });
  have = n_blocks;
  if (start) built = n_tokens;
}

void TableMethod::TruncateIndex(std::int64_t n_tokens) {
  for (std::int32_t layer = 0; layer < n_layers(); ++layer) {
    auto& built = built_tokens_[static_cast<std::size_t>(layer)];
    auto& have = n_blocks_[static_cast<std::size_t>(layer)];
    const bool drop = n_tokens < built;  // the statistics saw what is gone
    const std::int64_t keep = drop ? 0 : n_tokens / kBlockTokens;
    if (drop) built = 0;
    if (keep >= have) continue;
    have = keep;
    for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) CutHead(layer, h, keep);
  }
}

std::int64_t TableMethod::IndexMemory() const {
  std::int64_t bytes = 0;
  for (const std::int64_t n : n_blocks_) bytes += n > 0 ? StoredBytes(n) : 0;
  return bytes * geometry().n_kv_heads;
}

}  // namespace fathom
