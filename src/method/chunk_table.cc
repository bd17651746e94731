// SPDX-License-Identifier: MIT
#include "method/chunk_table.h"

#include <algorithm>
#include <string>

#include "base/half.h"
#include "base/parallel.h"
#include "method/head_stats.h"
#include "store/codec_fit.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

std::int32_t ReadChunk(OptionReader& options, const char* key, const char* fallback) {
  return std::stoi(options.Choice(key, fallback, {"2", "4", "8", "16", "32", "64"}));
}

ChunkTable::ChunkTable(const MethodContext& context, ChunkShape shape, BasisRule basis,
                       SummarizeFn summarize)
    : context_(context),
      shape_(shape),
      rule_(basis),
      summarize_(summarize),
      heads_(Size(context.rows->n_layers()) * Size(context.rows->geometry().n_kv_heads)),
      built_tokens_(Size(context.rows->n_layers()), 0),
      scan_(Size(context.rows->geometry().n_kv_heads)) {}

std::size_t ChunkTable::Slot(std::int32_t layer, std::int32_t kv_head) const {
  return Size(layer) * scan_.size() + Size(kv_head);
}

std::size_t ChunkTable::BlockHalfs() const {
  return Size(kBlockTokens / shape_.chunk) * Size(shape_.EntryHalfs());
}

ChunkTable::Head ChunkTable::NewHead(std::int32_t layer, std::int32_t kv_head,
                                     std::int64_t n_tokens) const {
  Head head;
  // Keys as they are need no statistics, and no pass over the rows to get them.
  head.basis = rule_ == BasisRule::kRaw
                   ? RawBasis(shape_.head_dim, {})
                   : MeasureHead(context_, layer, kv_head, n_tokens, rule_, /*abs=*/false).basis;
  Append(layer, kv_head, n_tokens / kBlockTokens, &head);
  return head;
}

void ChunkTable::Append(std::int32_t layer, std::int32_t kv_head, std::int64_t n_blocks,
                        Head* head) const {
  BlockReader reader(context_.rows->rows(layer, kv_head), head->basis);
  std::vector<float> entry(Size(shape_.EntryHalfs()));
  const auto first = static_cast<std::int64_t>(head->entries.size() / BlockHalfs());
  for (std::int64_t block = first; block < n_blocks; ++block) {
    const float* x = reader.Load(block);
    head->entries.resize(head->entries.size() + BlockHalfs());
    Half* out = head->entries.data() + head->entries.size() - BlockHalfs();
    for (std::int32_t i = 0; i < kBlockTokens; i += shape_.chunk) {
      summarize_(x + static_cast<std::ptrdiff_t>(i) * shape_.head_dim, shape_, entry.data());
      ConvertFloatToHalf(entry.data(), shape_.EntryHalfs(), out);
      out += shape_.EntryHalfs();
    }
  }
}

void ChunkTable::BuildAll(std::int64_t n_tokens) {
  const auto n_kv = static_cast<std::int64_t>(scan_.size());
  ParallelFor(static_cast<std::int64_t>(heads_.size()), context_.backend->n_threads(),
              [&](std::int64_t slot) {
                const auto layer = static_cast<std::int32_t>(slot / n_kv);
                if (built_tokens(layer) > 0) return;
                heads_[Size(slot)] =
                    NewHead(layer, static_cast<std::int32_t>(slot % n_kv), n_tokens);
              });
  for (auto& tokens : built_tokens_) tokens = tokens > 0 ? tokens : n_tokens;
}

void ChunkTable::Extend(std::int32_t layer, std::int64_t n_tokens) {
  const bool build = built_tokens(layer) == 0;
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  if (!build && heads_[Slot(layer, 0)].entries.size() >= Size(n_blocks) * BlockHalfs()) return;
  ParallelFor(static_cast<std::int64_t>(scan_.size()), context_.backend->n_threads(),
              [&](std::int64_t h) {
                const auto kv_head = static_cast<std::int32_t>(h);
                Head& head = heads_[Slot(layer, kv_head)];
                if (build) {
                  head = NewHead(layer, kv_head, n_tokens);
                } else {
                  Append(layer, kv_head, n_blocks, &head);
                }
              });
  if (build) built_tokens_[Size(layer)] = n_tokens;
}

void ChunkTable::Truncate(std::int64_t n_tokens) {
  for (std::int32_t layer = 0; layer < context_.rows->n_layers(); ++layer) {
    std::int64_t& built = built_tokens_[Size(layer)];
    const bool drop = n_tokens < built;
    const std::size_t halfs = Size(n_tokens / kBlockTokens) * BlockHalfs();
    for (std::size_t h = 0; h < scan_.size(); ++h) {
      Head& head = heads_[Slot(layer, static_cast<std::int32_t>(h))];
      if (drop) {
        head = Head();
      } else if (head.entries.size() > halfs) {
        head.entries.resize(halfs);
      }
    }
    if (drop) built = 0;
  }
}

std::int64_t ChunkTable::MemoryBytes() const {
  std::size_t halfs = 0;
  for (const Head& head : heads_) halfs += head.entries.size();
  return static_cast<std::int64_t>(halfs * sizeof(Half));
}

void ChunkTable::MapQueries(std::int32_t layer, const float* q, float* out, float* offset) const {
  const HeadGeometry& heads = context_.rows->geometry();
  const std::size_t dim = Size(shape_.head_dim);
  ParallelFor(heads.n_kv_heads, context_.backend->n_threads(), [&](std::int64_t kv) {
    const Basis& basis = heads_[Slot(layer, static_cast<std::int32_t>(kv))].basis;
    const std::size_t first = Size(kv) * Size(heads.group());
    basis.MapQueries(q + first * dim, heads.group(), out + first * dim);
    for (std::size_t h = first; h < first + Size(heads.group()); ++h) {
      double sum = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        sum += static_cast<double>(q[h * dim + d]) * basis.center[d];
      }
      offset[h] = static_cast<float>(sum);
    }
  });
}

void ChunkTable::Score(std::int32_t layer, std::int32_t vector, std::int64_t n_tokens,
                       const float* q, float* scores) {
  const std::int32_t group = context_.rows->geometry().group();
  const std::int64_t n_entries = n_tokens / shape_.chunk;
  for (std::size_t h = 0; h < scan_.size(); ++h) {
    const Head& head = heads_[Slot(layer, static_cast<std::int32_t>(h))];
    scan_[h] = {head.entries.data() + static_cast<std::ptrdiff_t>(vector) * shape_.head_dim,
                q + h * Size(group) * Size(shape_.head_dim),
                scores + h * Size(group) * Size(n_entries), n_entries};
  }
  context_.backend->Score({shape_.head_dim, group, n_entries, scan_, shape_.EntryHalfs()});
}

void ChunkTable::Spread(const float* scores, std::int64_t n_tokens, float* out,
                        std::int64_t stride) const {
  const std::int64_t n_entries = n_tokens / shape_.chunk;
  ParallelFor(context_.rows->geometry().n_heads, context_.backend->n_threads(),
              [&](std::int64_t h) {
                const float* score = scores + h * n_entries;
                float* token = out + h * stride;
                for (std::int64_t c = 0; c < n_entries; ++c, token += shape_.chunk) {
                  std::fill_n(token, shape_.chunk, score[c]);
                }
              });
}

}  // namespace fathom
