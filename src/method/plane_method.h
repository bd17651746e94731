// SPDX-License-Identifier: MIT
// Methods that scan bit planes: they differ in how many planes of which channel a query reads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "method/layer_index.h"
#include "method/sparse_method.h"

namespace fathom {

// What one KV head reads in the current step; kept between steps for its memory.
struct HeadRead {
  std::vector<float> q;             // [group][D] in the index's basis; a plan may change them
  std::vector<std::uint8_t> depth;  // [D] planes read (paper codec)
  std::vector<ScanTable> tables;    // one per codec of the index (mean codec)
  std::vector<float> noise;         // [group] variance of the scores' error, zeros where unknown
  double read_bits = 0;
};

// `basis=` as all scanning methods take it. Without a map, keys are centred or not.
BasisRule ReadBasis(OptionReader& options, std::string_view fallback, bool centre_raw);

class PlaneMethod : public SparseMethod, private RankPlanner {
 public:
  PlaneMethod(const MethodContext& context, SparseConfig config, LayerIndexOptions index,
              std::string spec);

 protected:
  // Fills depth or tables, and read_bits, from read->q. Called for different KV heads from several
  // threads.
  virtual void PlanRead(std::int32_t layer, std::int32_t kv_head, HeadRead* read) = 0;

  double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index, const float* q,
                    const LayerScores& out) override;
  bool ranks() const override {
    return index_.shape().codec == Codec::kMean && group_rule() == GroupRule::kPerHead;
  }
  void PrepareRank(std::int32_t layer, const float* q, const LayerScores& out, RankArgs* args,
                   std::span<RankHead> heads) override;
  double ReadBits() const override;
  void BuildAll(std::int64_t n_tokens) override { index_.BuildAll(n_tokens); }
  void ExtendIndex(std::int32_t layer, std::int64_t n_tokens) override {
    index_.Extend(layer, n_tokens);
  }
  void TruncateIndex(std::int64_t n_tokens) override { index_.Truncate(n_tokens); }
  std::int64_t IndexMemory() const override { return index_.MemoryBytes(); }
  bool SaveIndex(StateWriter* out) override {
    index_.Save(out);
    return true;
  }
  void LoadIndex(StateReader* in) override { index_.Load(in); }

  LayerIndex& index() { return index_; }
  const LayerIndex& index() const { return index_; }

 private:
  // A query position of one layer, while its heads are planned.
  struct Query {
    std::int32_t layer;
    const float* q;
    LayerScores out;
  };

  // reads_, offset and noise of a KV head for query_.
  void PlanHead(std::int64_t kv_head) override;

  LayerIndex index_;
  Query query_{};
  std::vector<HeadRead> reads_;  // [n_kv_heads]
  std::vector<ScanHead> scan_;   // [n_kv_heads]
};

}  // namespace fathom
