// SPDX-License-Identifier: MIT
// The methods of the device, one class each. All pointers are borrowed; what a layer needs was put
// into device memory by whoever made the index.
#pragma once

#include <memory>
#include <vector>

#include "backend/cuda/gather.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/scan_labels.h"
#include "backend/cuda/scan_mean.h"
#include "backend/cuda/scan_paper.h"
#include "backend/cuda/score_rows.h"
#include "device/index_scan.h"
#include "fathom/types.h"

namespace fathom::cuda {

// What all indexes of bit planes and labels share.
struct IndexSizes {
  HeadGeometry heads;
  std::int32_t batch = 1;
  std::int64_t max_blocks = 0;       // of a sequence, a multiple of 16
  const Lengths* lengths = nullptr;  // in units of the index

  std::int32_t n_heads() const { return batch * heads.n_kv_heads; }
  std::int32_t n_lists() const { return batch * heads.n_heads; }
  std::int32_t max_tiles() const { return static_cast<std::int32_t>(max_blocks / kTileBlocks); }
};

// A table in host memory: where its segments begin, [n_heads][max_segments], as GatherRuns takes
// it. Null segments: the index is in HBM and nothing is fetched.
struct HostSegments {
  const std::byte* const* segments = nullptr;
  std::int32_t max_segments = 1;
  std::int32_t segment_blocks = 0;
};

// Rows of a table on the host, as one run behind the other at `out`: `rows` of them per head at
// most. Which rows, and how many, is still to be said.
GatherRuns RunsOf(const IndexSizes& sizes, const HostSegments& table, std::int32_t block_bytes,
                  void* out, std::int64_t rows);

// Finished blocks of all sequences and KV heads. Waits for the stream.
double CountBlocks(const IndexSizes& sizes, cudaStream_t stream);

// fathom: planes with frozen steps and block means; one multiplier for all heads. A head may have
// several codecs, each with its blocks in a piece of its own; all heads have as many.
class MeanIndex final : public IndexScan {
 public:
  struct Layer {
    // Arrays of MeanPlan, per head.
    const double* variance;
    const double* slope;
    const std::uint8_t* level;
    const double* distortion;
    const float* center;
    const float* mean_step;
    const float* weight;
    // [n_heads][n_codecs] planes and means in HBM, or planes in the staging area; table: head *
    // n_codecs + codec
    const ScanPiece* pieces;
    HostSegments planes;
  };
  // multiplier: [1] on the device. n_layers: whose read planes are to be known together, see heads.
  MeanIndex(const IndexSizes& sizes, std::int32_t mean_bits, const double* multiplier, bool on_host,
            std::int32_t n_layers = 1);
  // Of every head, 1 until it is called; layers are to be set anew. Not while the device works.
  void SetCodecs(std::int32_t n_codecs);
  // Pieces of planes in host memory read from here: [n_heads][4D][max_blocks], gathered.
  std::uint64_t* staged_planes() const { return staged_planes_.data(); }
  void SetLayers(std::vector<Layer> layers) { layers_ = std::move(layers); }

  void Plan(std::int32_t layer, const float* q, cudaStream_t stream) override;
  void Fetch(std::int32_t layer, cudaStream_t stream) override;
  void Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& rest,
            cudaStream_t stream) override;
  bool has_rest() const override { return true; }
  std::int32_t sample_step(std::int32_t n_tiles) const override;
  const float* offset() const override { return offset_.data(); }
  const float* noise() const override { return noise_.data(); }
  ScanCost Cost(cudaStream_t stream) const override;
  // What the last step read, [n_layers][n_heads][n_codecs] on the device; the first codec of a head
  // tells it for all.
  const MeanTableHead* heads() const { return heads_.data(); }

 private:
  MeanTables TablesOf(std::int32_t layer) const;
  MeanScan ScanOf(std::int32_t layer) const;

  const IndexSizes sizes_;
  const std::int32_t mean_bits_;
  const double* const multiplier_;
  const bool on_host_;
  const std::int32_t n_layers_;
  std::int32_t n_codecs_ = 1;
  std::int32_t planned_ = 0;  // the layer whose plan was made last
  std::vector<Layer> layers_;
  MeanTableSet tables_;
  DeviceBuffer<MeanTableHead> heads_;
  DeviceBuffer<float> offset_, noise_;
  DeviceBuffer<std::int32_t> bases_;  // [n_lists][max_blocks]
  DeviceBuffer<std::int32_t> next_tile_;
  DeviceBuffer<std::uint64_t> staged_planes_;
};

// fathom:preset=paper: planes with block scales, the published plan.
class PaperIndex final : public IndexScan {
 public:
  struct Layer {
    const double* variance;    // [n_heads][D]
    const PaperPiece* pieces;  // [n_heads] in HBM, or reading the staging area of planes and scales
    HostSegments planes, scales;
  };
  PaperIndex(const IndexSizes& sizes, double budget, bool on_host);
  // Pieces of an index in host memory read from here: [n_heads][4D][max_blocks] words and
  // [n_heads][D][max_blocks] scales.
  std::uint64_t* staged_planes() const { return staged_planes_.data(); }
  Half* staged_scales() const { return staged_scales_.data(); }
  void SetLayers(std::vector<Layer> layers) { layers_ = std::move(layers); }

  void Plan(std::int32_t layer, const float* q, cudaStream_t stream) override;
  void Fetch(std::int32_t layer, cudaStream_t stream) override;
  void Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& rest,
            cudaStream_t stream) override;
  ScanCost Cost(cudaStream_t stream) const override;

 private:
  const IndexSizes sizes_;
  const double budget_;
  const bool on_host_;
  std::vector<Layer> layers_;
  const float* q_ = nullptr;
  DeviceBuffer<std::uint8_t> depth_;
  DeviceBuffer<std::int16_t> planes_, channels_;
  DeviceBuffer<std::int32_t> n_planes_, n_channels_;
  DeviceBuffer<std::uint64_t> staged_planes_;
  DeviceBuffer<Half> staged_scales_;
};

// Labels of t bits: channels fixed when the table was made (Double Sparsity, Loki, thumbnails, all
// 4-bit codes), or chosen by every query (SparQ).
class LabelIndex final : public IndexScan {
 public:
  struct Layer {
    const LabelPiece* pieces;  // [n_heads]
    HostSegments codes, scales;
    // Of tables by token, one at most: the queries' channels that the table's are,
    // [n_heads][n_channels], or the map of queries to its basis, [n_heads][D][n_channels]; null:
    // the first channels.
    const std::int32_t* channels = nullptr;
    const float* map = nullptr;
  };
  struct Shape {
    LabelLayout layout = LabelLayout::kTokens;
    std::int32_t planes = 4;
    std::int32_t n_channels = 32;   // read
    std::int32_t table_width = 32;  // channels of the table, filled up to whole units
  };
  LabelIndex(const IndexSizes& sizes, const Shape& shape, bool on_host);
  std::uint8_t* staged_codes() const { return staged_codes_.data(); }
  Half* staged_scales() const { return staged_scales_.data(); }
  std::int64_t code_bytes() const;  // of a head's staged codes
  void SetLayers(std::vector<Layer> layers) { layers_ = std::move(layers); }

  void Plan(std::int32_t layer, const float* q, cudaStream_t stream) override;
  void Fetch(std::int32_t layer, cudaStream_t stream) override;
  void Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& rest,
            cudaStream_t stream) override;
  ScanCost Cost(cudaStream_t stream) const override;

 private:
  const IndexSizes sizes_;
  const Shape shape_;
  const bool on_host_;
  std::vector<Layer> layers_;
  DeviceBuffer<std::int16_t> chosen_;
  DeviceBuffer<std::int32_t> channels_;  // the same for the scan of a table in HBM
  DeviceBuffer<std::int32_t> n_rows_, one_row_;
  DeviceBuffer<float> q_;
  DeviceBuffer<std::uint8_t> staged_codes_;
  DeviceBuffer<Half> staged_scales_;
};

// Exact scores of fp16 vectors: the keys of all rows, or the mean key of every chunk (landmarks).
class KeyIndex final : public IndexScan {
 public:
  struct Layer {
    const Half* const* keys;  // [n_heads] in HBM, or mapped host memory, read in place
    HostSegments table;       // fetched first, where given: whole, [n_heads][keys][D]
  };
  KeyIndex(const IndexSizes& sizes, std::int32_t unit_tokens, std::int64_t key_stride,
           const std::int32_t* n_keys, std::int32_t max_keys, bool fetch);
  Half* staged() const { return staged_.data(); }
  void SetLayers(std::vector<Layer> layers, double link_bytes) {
    layers_ = std::move(layers);
    link_bytes_ = link_bytes;
  }

  void Plan(std::int32_t layer, const float* q, cudaStream_t stream) override;
  void Fetch(std::int32_t layer, cudaStream_t stream) override;
  void Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& rest,
            cudaStream_t stream) override;
  std::int32_t unit_tokens() const override { return unit_; }
  ScanCost Cost(cudaStream_t stream) const override;

 private:
  const IndexSizes sizes_;
  const std::int32_t unit_;
  const std::int64_t key_stride_;
  const std::int32_t* const n_keys_;
  const std::int32_t max_keys_;
  double link_bytes_ = 0;  // of a layer
  std::vector<Layer> layers_;
  const float* q_ = nullptr;
  DeviceBuffer<std::int32_t> one_row_;
  DeviceBuffer<Half> staged_;
};

}  // namespace fathom::cuda
