// SPDX-License-Identifier: MIT
// Tables of labels of one layer, as rival methods keep them, for `fathom bench scan`.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fathom/label_table.h"
#include "fathom/store.h"

namespace fathom::cli {

// A scan of labels that some method makes.
struct LabelScan {
  std::string name;
  LabelShape shape;
  std::int32_t read_channels = 0;  // of shape.n_channels; all of them but for kChannels

  double ReadBits() const { return read_channels * BitsPerChannel(); }
  double HeldBits() const { return shape.n_channels * BitsPerChannel(); }

 private:
  // Codes, and a fp16 scale for 64 of them.
  double BitsPerChannel() const { return shape.planes + 16.0 / kBlockTokens; }
};

// Those of Double Sparsity and Loki at 32 and 16 channels, of SparQ, and of a two-plane thumbnail.
std::vector<LabelScan> LabelScans(std::int32_t head_dim);

// The tables of the KV heads of n_layers layers with the same tokens. Channels are those of the
// largest variance.
class LabelCopies {
 public:
  // variance: [n_kv_heads][D] of the keys. n_tokens: whole blocks of layer 0 of rows.
  LabelCopies(const LabelScan& scan, const RowStore& rows, std::int64_t n_tokens,
              std::span<const double> variance, std::int64_t n_layers, const Backend& backend);

  std::int64_t n_layers() const { return static_cast<std::int64_t>(tables_.size()); }
  // q: [n_heads][D]. scores: [n_heads][n_tokens]. Throws std::bad_alloc.
  void Scan(const Backend& backend, std::int64_t layer, std::int32_t group, const float* q,
            float* scores) const;

 private:
  LabelScan scan_;
  std::int32_t head_dim_;
  std::vector<std::vector<std::int32_t>> channels_;  // [n_kv_heads][n_channels] ascending
  std::vector<std::int32_t> read_;                   // of the table, kChannels
  std::vector<std::vector<LabelTable>> tables_;      // [n_layers][n_kv_heads]
};

}  // namespace fathom::cli
