// SPDX-License-Identifier: MIT
// Indexes of all layers and KV heads of a session: made once from the rows, extended as blocks
// finish, cut on truncation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fathom/method.h"
#include "fathom/store.h"
#include "method/head_stats.h"

namespace fathom {

// The index of one KV head with what its plans need.
struct IndexedHead {
  HeadIndex index;
  HeadStats stats;  // at build time
};

struct LayerIndexOptions {
  IndexShape shape;
  BasisRule basis = BasisRule::kRaw;
  IndexRules rules;
};

class LayerIndex {
 public:
  LayerIndex(const MethodContext& context, LayerIndexOptions options);

  // Called for every head whose index grew or was cut, from several threads for different heads.
  using ChangedFn = std::function<void(std::int32_t layer, std::int32_t kv_head)>;
  void set_on_changed(ChangedFn on_changed) { on_changed_ = std::move(on_changed); }

  const IndexShape& shape() const { return options_.shape; }
  bool built(std::int32_t layer) const {
    return built_tokens_[static_cast<std::size_t>(layer)] > 0;
  }
  // Makes the index of the finished blocks of n_tokens tokens, in all layers that have none.
  // Requires a finished block. An index made when the session was less than 4/5 as long is made
  // again: keys drift with their positions, and its steps, basis and statistics with them.
  void BuildAll(std::int64_t n_tokens);
  // Brings one layer up to the finished blocks of n_tokens tokens, building it first where there is
  // none.
  void Extend(std::int32_t layer, std::int64_t n_tokens);
  // Cuts to n_tokens. Where that is less than an index was built from, the index goes: its
  // statistics saw what is gone.
  void Truncate(std::int64_t n_tokens);

  IndexedHead& head(std::int32_t layer, std::int32_t kv_head) {
    return *heads_[Slot(layer, kv_head)];
  }
  const IndexedHead& head(std::int32_t layer, std::int32_t kv_head) const {
    return *heads_[Slot(layer, kv_head)];
  }
  // Changes whenever a block that was there is gone or another one, and differs between indexes:
  // who keeps a copy of the blocks need only add new ones while it stays.
  std::uint64_t version() const { return version_; }
  std::int64_t MemoryBytes() const;
  void Save(StateWriter* out);
  // Throws Error(kCorrupt) where it is not of the same shape.
  void Load(StateReader* in);

 private:
  std::size_t Slot(std::int32_t layer, std::int32_t kv_head) const;
  void BuildHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens);
  void Changed(std::int32_t layer, std::int32_t kv_head) const {
    if (on_changed_) on_changed_(layer, kv_head);
  }

  const MethodContext context_;
  const LayerIndexOptions options_;
  ChangedFn on_changed_;
  std::vector<std::unique_ptr<IndexedHead>>
      heads_;  // [n_layers][n_kv_heads], null before the build
  std::vector<std::int64_t>
      built_tokens_;  // [n_layers] tokens the statistics saw, 0 before the build
  std::uint64_t version_;
};

}  // namespace fathom
