// SPDX-License-Identifier: MIT
// Bit-plane indexes of one layer and what a query reads of them, for `fathom bench scan`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "fathom/backend.h"
#include "fathom/scan_table.h"
#include "fathom/store.h"

namespace fathom::cli {

// The index of the KV heads of a layer, built once, and physical copies of it: layers that hold the
// same bits. Copies are allocated as indexes are, segment by segment, so that pages cost the same.
class IndexCopies {
 public:
  // bases: [n_kv_heads]. n_tokens: whole blocks of layer 0 of rows.
  IndexCopies(const IndexShape& shape, const RowStore& rows, std::int64_t n_tokens,
              std::span<const Basis> bases, std::int64_t n_layers, const Backend& backend);

  const IndexShape& shape() const { return heads_.front().shape(); }
  std::int64_t n_layers() const { return static_cast<std::int64_t>(views_.size()); }
  std::size_t n_kv_heads() const { return heads_.size(); }
  const HeadIndex& head(std::size_t kv_head) const { return heads_[kv_head]; }
  std::span<const SegmentView> segments(std::int64_t layer, std::size_t kv_head) const {
    return views_[static_cast<std::size_t>(layer)][kv_head];
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  SegmentView Copy(const SegmentView& segment);

  std::vector<HeadIndex> heads_;                              // [n_kv_heads]
  std::vector<std::vector<std::vector<SegmentView>>> views_;  // [n_layers][n_kv_heads]
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
};

// What one query position reads of all KV heads of a layer.
struct LayerRead {
  const float* q = nullptr;                      // [n_heads][D]
  std::vector<std::vector<ScanTable>> tables;    // [n_kv_heads][codecs], mean codec
  std::vector<std::vector<std::uint8_t>> depth;  // [n_kv_heads][D], paper codec
  double read_bits = 0;                          // per token, mean over the KV heads
  double planes = 0;                             // the same
};

// Our read: levels by measured distortion at `bits` read bits for each KV head. q: [n_heads][D],
// borrowed.
LayerRead PlanMeanRead(const IndexCopies& index, std::int32_t group, const float* q, double bits);

// The published read at `budget` code bits. variance: [n_kv_heads][D] of the keys.
LayerRead PlanPaperRead(const IndexCopies& index, std::int32_t group, const float* q,
                        std::span<const double> variance, double budget);

// scores: [n_heads][n_tokens].
void ScanLayer(const Backend& backend, const IndexCopies& index, std::int64_t layer,
               std::int32_t group, const LayerRead& read, float* scores);

}  // namespace fathom::cli
