// SPDX-License-Identifier: MIT
// Bit-plane indexes of one layer and what a query reads of them, for `fathom bench scan`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bench_machine.h"
#include "fathom/backend.h"
#include "fathom/scan_table.h"
#include "fathom/store.h"

namespace fathom::cli {

// The index of the KV heads of a layer, built once, and physical copies of it: layers that hold the
// same bits. The copy of a head lies in one piece of huge pages, as an index that was built does.
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
  std::vector<SegmentView> Copy(std::span<const SegmentView> segments);

  std::vector<HeadIndex> heads_;                              // [n_kv_heads]
  std::vector<std::vector<std::vector<SegmentView>>> views_;  // [n_layers][n_kv_heads]
  std::vector<PageBuffer> memory_;
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

// What a scan writes: scores, or, where that is null, the integers that they are made of, or, where
// these are null too, nothing.
struct ScanOutput {
  float* scores = nullptr;       // [n_heads][n_tokens]
  std::uint8_t* sums = nullptr;  // [n_heads][n_tokens]
  std::int32_t* base = nullptr;  // [n_heads][n_tokens / 64]
};

void ScanLayer(const Backend& backend, const IndexCopies& index, std::int64_t layer,
               std::int32_t group, const LayerRead& read, const ScanOutput& out);

// Room for what is selected of a layer.
struct Selected {
  std::vector<std::int32_t> tokens;  // [n_kv_heads][capacity()]
  std::vector<std::uint16_t> mask;   // the same
  std::vector<std::int64_t> n_attended;

  void Resize(const HeadGeometry& heads, std::int64_t n_tokens, std::int64_t keep);
  std::size_t capacity() const { return tokens.size() / n_attended.size(); }
};

// Scan and selection in one: `keep` winners of every query head. Requires the mean codec.
void RankLayer(const Backend& backend, const IndexCopies& index, std::int64_t layer,
               std::int32_t group, std::int64_t keep, const LayerRead& read, Selected* out);

}  // namespace fathom::cli
