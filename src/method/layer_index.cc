// SPDX-License-Identifier: MIT
#include "method/layer_index.h"

#include <atomic>
#include <utility>

#include "base/parallel.h"
#include "memory/state_stream.h"

namespace fathom {
namespace {

std::uint64_t NextVersion() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

LayerIndex::LayerIndex(const MethodContext& context, LayerIndexOptions options)
    : context_(context),
      options_(options),
      heads_(static_cast<std::size_t>(context.rows->n_layers()) *
             static_cast<std::size_t>(context.rows->geometry().n_kv_heads)),
      built_tokens_(static_cast<std::size_t>(context.rows->n_layers()), 0),
      version_(NextVersion()) {}

std::size_t LayerIndex::Slot(std::int32_t layer, std::int32_t kv_head) const {
  return static_cast<std::size_t>(layer) *
             static_cast<std::size_t>(context_.rows->geometry().n_kv_heads) +
         static_cast<std::size_t>(kv_head);
}

void LayerIndex::BuildHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) {
  const Half* rows = context_.rows->rows(layer, kv_head);
  HeadStats stats = MeasureHead(context_, layer, kv_head, n_tokens, options_.basis, /*abs=*/false);
  HeadIndex index(options_.shape, stats.basis, options_.rules);
  index.Build(rows, n_tokens / kBlockTokens, *context_.backend,
              CalibratedCodec(context_, layer, kv_head, options_.basis, options_.shape));
  heads_[Slot(layer, kv_head)] =
      std::make_unique<IndexedHead>(IndexedHead{std::move(index), std::move(stats)});
  Changed(layer, kv_head);
}

void LayerIndex::BuildAll(std::int64_t n_tokens) {
  for (auto& tokens : built_tokens_) {
    if (Outgrown(tokens, n_tokens)) tokens = 0;
    if (tokens == 0) version_ = NextVersion();
  }
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  ParallelFor(static_cast<std::int64_t>(heads_.size()), context_.backend->n_threads(),
              [&](std::int64_t slot) {
                const auto layer = static_cast<std::int32_t>(slot / n_kv);
                if (!built(layer))
                  BuildHead(layer, static_cast<std::int32_t>(slot % n_kv), n_tokens);
              });
  for (auto& tokens : built_tokens_) tokens = tokens > 0 ? tokens : n_tokens;
}

void LayerIndex::Extend(std::int32_t layer, std::int64_t n_tokens) {
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  const int n_threads = context_.backend->n_threads();
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  if (!built(layer)) {
    version_ = NextVersion();
    ParallelFor(n_kv, n_threads,
                [&](std::int64_t h) { BuildHead(layer, static_cast<std::int32_t>(h), n_tokens); });
    built_tokens_[static_cast<std::size_t>(layer)] = n_tokens;
    return;
  }
  if (head(layer, 0).index.n_blocks() >= n_blocks) return;
  ParallelFor(n_kv, n_threads, [&](std::int64_t h) {
    const auto kv_head = static_cast<std::int32_t>(h);
    head(layer, kv_head)
        .index.Append(context_.rows->rows(layer, kv_head), n_blocks, *context_.backend);
    Changed(layer, kv_head);
  });
}

void LayerIndex::Truncate(std::int64_t n_tokens) {
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  const std::int64_t n_blocks = n_tokens / kBlockTokens;
  for (std::int32_t layer = 0; layer < context_.rows->n_layers(); ++layer) {
    auto& built_tokens = built_tokens_[static_cast<std::size_t>(layer)];
    if (built_tokens == 0) continue;
    const bool drop = n_tokens < built_tokens;
    if (drop || head(layer, 0).index.n_blocks() > n_blocks) version_ = NextVersion();
    for (std::int32_t h = 0; h < n_kv; ++h) {
      auto& slot = heads_[Slot(layer, h)];
      if (drop) {
        slot.reset();
      } else if (slot->index.n_blocks() > n_blocks) {
        slot->index.Truncate(context_.rows->rows(layer, h), n_blocks);
        Changed(layer, h);
      }
    }
    if (drop) built_tokens = 0;
  }
}

void LayerIndex::Save(StateWriter* out) {
  const IndexShape& shape = options_.shape;
  out->Put(shape.codec);
  out->Put(shape.head_dim);
  out->Put(shape.mean_bits);
  out->Put(shape.segment_blocks);
  out->PutAll(built_tokens_);
  for (const auto& head : heads_) {
    out->Put<std::uint8_t>(head ? 1 : 0);
    if (!head) continue;
    head->stats.basis.Save(out);
    out->PutAll(head->stats.variance);
    out->PutAll(head->stats.abs_key);
    out->PutAll(head->stats.abs_query);
    head->index.Save(out);
  }
}

void LayerIndex::Load(StateReader* in) {
  const IndexShape& shape = options_.shape;
  if (in->Get<Codec>() != shape.codec || in->Get<std::int32_t>() != shape.head_dim ||
      in->Get<std::int32_t>() != shape.mean_bits ||
      in->Get<std::int32_t>() != shape.segment_blocks) {
    in->Fail("its index is of another codec or shape than its method has");
  }
  version_ = NextVersion();
  built_tokens_ = in->GetAll<std::int64_t>(built_tokens_.size());
  const std::int32_t n_kv = context_.rows->geometry().n_kv_heads;
  for (std::size_t slot = 0; slot < heads_.size(); ++slot) {
    if (in->GetIn<std::uint8_t>(0, 1) == 0) continue;
    HeadStats stats;
    stats.basis.Load(in, shape.head_dim);
    stats.variance = in->GetAll<double>();
    stats.abs_key = in->GetAll<double>();
    stats.abs_query = in->GetAll<double>();
    HeadIndex index(shape, stats.basis, options_.rules);
    index.Load(in);
    heads_[slot] = std::make_unique<IndexedHead>(IndexedHead{std::move(index), std::move(stats)});
    const auto at = static_cast<std::int32_t>(slot);
    Changed(at / n_kv, at % n_kv);
  }
  for (std::size_t slot = 0; slot < heads_.size(); ++slot) {
    const bool wanted = built_tokens_[slot / static_cast<std::size_t>(n_kv)] > 0;
    if (wanted != (heads_[slot] != nullptr)) in->Fail("heads of its index are missing");
  }
}

std::int64_t LayerIndex::MemoryBytes() const {
  std::int64_t bytes = 0;
  for (const auto& head : heads_) bytes += head ? head->index.MemoryBytes() : 0;
  return bytes;
}

}  // namespace fathom
