// SPDX-License-Identifier: MIT
// Methods that score a few channels of every key by its labels: 4 bits or fewer per channel, a
// scale per block of 64 tokens and channel. Double Sparsity, Loki, SparQ, thumbnail and all planes
// differ in which channels, and in who chooses them: the session's statistics, or every query.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fathom/calibration.h"
#include "fathom/label_table.h"
#include "method/table_method.h"

namespace fathom {

// The n channels of largest weight, ascending by channel. Of equal weights the smaller channel
// wins; NaN counts less than every number. Takes all channels where there are no more than n.
void TopChannels(std::span<const double> weight, std::int32_t n,
                 std::vector<std::int32_t>* channels);
// The n channels of largest E|q_j| E|k_j|, ascending; without queries of largest E|k_j|. stats:
// with both means of absolute values.
std::vector<std::int32_t> LargestChannels(const HeadStats& stats, std::int32_t n);
// 0 .. n - 1.
std::vector<std::int32_t> AllChannels(std::int64_t n);

// What labels cost a method's own system: so many channels, so many planes (bits) of each.
struct StoredPart {
  std::int32_t channels = 0;
  std::int32_t planes = kPlanes;
};
// Bytes for one KV head, whole segments. (8 bytes per plane and 2 of scale) / 64 per token and
// channel: 17 bytes per token for 32 channels of 4 bits, 68 for all 128. The process holds up to 15
// channels more, which fill the kernel's units up, and 2 or 4 bits for codes of 1 or 3.
std::int64_t StoredPartBytes(StoredPart part, std::int64_t n_blocks);

// Closed form of one KV head, block means of the values included.
std::int64_t LabelIndexBytes(const SparseConfig& config, StoredPart part, HeadGeometry geometry,
                             std::int64_t n_tokens);

// Read bits per token of so many channels: t + 16/64 each, as in the published store.
double LabelReadBits(StoredPart part);

struct ChannelConfig {
  SparseConfig sparse;
  BasisRule basis = BasisRule::kRaw;
  bool abs_stats = false;  // statistics include abs_key and abs_query
  LabelLayout layout = LabelLayout::kTokens;
  StoredPart stored;
};

// What a query reads of one KV head; kept between steps for its memory.
struct ChannelRead {
  std::vector<std::int32_t> channels;  // ascending, of the table
  std::vector<float> mapped;           // [group][D] queries in the basis
  std::vector<float> q;                // [group][channels]
};

class ChannelMethod : public TableMethod {
 public:
  ChannelMethod(const MethodContext& context, const ChannelConfig& config, const std::string& spec);

 protected:
  struct Head {
    HeadStats stats;
    std::vector<std::int32_t> channels;  // of the basis, in the order of the table
    LabelTable table;
  };

  // Both are called from several threads for different KV heads.
  // Channels of the table, config.stored.channels of the basis, ascending.
  virtual std::vector<std::int32_t> TableChannels(const HeadStats& stats) const = 0;
  // Fills read->channels and noise [group], the variance of the scores' error. May change
  // read->mapped.
  virtual void PlanRead(std::int32_t kv_head, const Head& head, ChannelRead* read,
                        float* noise) = 0;

  // Of one query q [D]: the published assumption that t planes of a channel leave an error of
  // variance Var_j * 4^-t. channels: those that are read, of the basis.
  float Noise(const HeadStats& stats, const float* q, std::span<const std::int32_t> channels) const;

  void StartHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) override;
  void ExtendHead(std::int32_t layer, std::int32_t kv_head, std::int64_t first,
                  std::int64_t n_blocks) override;
  void CutHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_blocks) override;
  std::int64_t StoredBytes(std::int64_t n_blocks) const override;
  double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index, const float* q,
                    const LayerScores& out) override;

 private:
  const BasisRule basis_;
  const bool abs_stats_;
  const LabelLayout layout_;
  const StoredPart stored_;
  std::vector<Head> heads_;         // [n_layers][n_kv_heads]
  std::vector<ChannelRead> reads_;  // [n_kv_heads]
  std::vector<LabelScanHead> scan_;
};

// Channels of the basis that all queries read, ascending, from the statistics of one KV head.
using ChannelsFn = std::function<std::vector<std::int32_t>(const HeadStats& stats)>;

// A method that reads the same channels of a KV head for every query: config.stored.channels of
// them.
std::unique_ptr<Method> MakeFixedChannels(const MethodContext& context, const ChannelConfig& config,
                                          ChannelsFn channels, const std::string& spec);

}  // namespace fathom
