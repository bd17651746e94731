// SPDX-License-Identifier: MIT
// Scans of bit planes: our own read and the published one.
#include <algorithm>
#include <utility>

#include "backend/cuda/host_copy.h"
#include "device/scans.h"

namespace fathom::cuda {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

GatherRuns RunsOf(const IndexSizes& sizes, const HostSegments& table, std::int32_t block_bytes,
                  void* out, std::int64_t rows) {
  const std::int64_t row = sizes.max_blocks * block_bytes;
  GatherRuns runs{};
  runs.n_heads = sizes.n_heads();
  runs.n_kv_heads = sizes.heads.n_kv_heads;
  runs.segments = table.segments;
  runs.max_segments = table.max_segments;
  runs.segment_blocks = table.segment_blocks;
  runs.block_bytes = block_bytes;
  runs.n_rows_stride = 1;
  runs.lengths = sizes.lengths;
  runs.out = static_cast<std::byte*>(out);
  runs.row_stride = row;
  runs.head_stride = rows * row;
  return runs;
}

// Some 65,536 tokens, of which 60 or so lie above the limit; of short sequences not more than a
// fifth, which would cost as much as the scan. Odd: text that repeats does so after a power of two
// where a capture is tiled, and an even step would see the same part of it again and again.
std::int32_t IndexScan::sample_step(std::int32_t n_tiles) const {
  constexpr std::int32_t kTiles = 64, kLeast = 5;
  return std::max(kLeast, n_tiles / kTiles | 1);
}

MeanIndex::MeanIndex(const IndexSizes& sizes, std::int32_t mean_bits, const double* multiplier,
                     bool on_host, std::int32_t n_layers)
    : sizes_(sizes),
      mean_bits_(mean_bits),
      multiplier_(multiplier),
      on_host_(on_host),
      n_layers_(n_layers),
      tables_(0, sizes.heads.head_dim, sizes.heads.group()),
      offset_(Size(sizes.n_lists())),
      noise_(Size(sizes.n_lists())),
      bases_(Size(sizes.n_lists() * sizes.max_blocks)) {
  SetCodecs(1);
  if (on_host) {
    staged_planes_.Reserve(
        Size(std::int64_t{sizes.n_heads()} * sizes.heads.head_dim * kPlanes * sizes.max_blocks));
  }
}

void MeanIndex::SetCodecs(std::int32_t n_codecs) {
  n_codecs_ = n_codecs;
  const std::int32_t n_tables = sizes_.n_heads() * n_codecs;
  tables_ = MeanTableSet(n_tables, sizes_.heads.head_dim, sizes_.heads.group());
  heads_ = DeviceBuffer<MeanTableHead>(Size(std::int64_t{n_layers_} * n_tables));
  next_tile_ = DeviceBuffer<std::int32_t>(Size(n_tables));
}

MeanTables MeanIndex::TablesOf(std::int32_t layer) const {
  MeanTables tables = tables_.view();
  const std::int32_t row = layer < n_layers_ ? layer : 0;
  tables.head = heads_.data() + std::int64_t{row} * tables.n_tables;
  return tables;
}

std::int32_t MeanIndex::sample_step(std::int32_t /*n_tiles*/) const { return kMeanSampleStep; }

void MeanIndex::Plan(std::int32_t layer, const float* q, cudaStream_t stream) {
  const Layer& l = layers_[Size(layer)];
  planned_ = layer;
  PlanMean({.n_heads = sizes_.n_heads(),
            .n_kv_heads = sizes_.heads.n_kv_heads,
            .n_codecs = n_codecs_,
            .mean_bits = mean_bits_,
            .q = q,
            .variance = l.variance,
            .slope = l.slope,
            .level = l.level,
            .distortion = l.distortion,
            .center = l.center,
            .mean_step = l.mean_step,
            .weight = l.weight,
            .multiplier = multiplier_,
            .lengths = sizes_.lengths,
            .tables = TablesOf(layer),
            .offset = offset_.data(),
            .noise = noise_.data()},
           stream);
}

MeanScan MeanIndex::ScanOf(std::int32_t layer) const {
  MeanScan scan{};
  scan.tables = TablesOf(layer);
  scan.mean_bits = mean_bits_;
  scan.n_kv_heads = sizes_.heads.n_kv_heads;
  scan.pieces = layers_[Size(layer)].pieces;
  scan.n_pieces = sizes_.n_heads() * n_codecs_;
  scan.max_tiles = sizes_.max_tiles();
  scan.lengths = sizes_.lengths;
  scan.bases = bases_.data();
  scan.bases_stride = sizes_.max_blocks;
  scan.next_tile = next_tile_.data();
  return scan;
}

void MeanIndex::Fetch(std::int32_t layer, cudaStream_t stream) {
  if (!on_host_) return;
  const MeanTables t = TablesOf(layer);
  const std::int64_t rows = std::int64_t{t.head_dim} * kPlanes;
  GatherRuns runs = RunsOf(sizes_, layers_[Size(layer)].planes, sizeof(std::uint64_t),
                           staged_planes_.data(), rows);
  // Tables of a head's codecs read the same planes in the same order.
  runs.rows = t.plane;
  runs.rows_stride = rows * n_codecs_;
  runs.n_rows = &t.head->n_planes;
  runs.n_rows_stride = n_codecs_ * std::int64_t{sizeof(MeanTableHead) / sizeof(std::int32_t)};
  Gather(runs, stream);
  FillBases(ScanOf(layer), stream, /*beside_gather=*/true);
}

void MeanIndex::Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& rest,
                     cudaStream_t stream) {
  MeanScan scan = ScanOf(layer);
  scan.sink = sink;
  scan.rest = rest.rest;
  scan.rest_stride = rest.stride;
  scan.exp_scale = rest.exp_scale;
  // The sample comes first.
  const bool is_sample = sink.scores != nullptr && sink.tile_step > 1;
  if (is_sample && !on_host_) FillBases(scan, stream);
  ScanMean(scan, stream);
}

ScanCost MeanIndex::Cost(cudaStream_t stream) const {
  const auto tables =
      ToHost(TablesOf(planned_).head, Size(std::int64_t{sizes_.n_heads()} * n_codecs_), stream);
  std::vector<MeanTableHead> heads;
  for (std::size_t i = 0; i < tables.size(); i += Size(n_codecs_)) heads.push_back(tables[i]);
  const auto lengths = ToHost(sizes_.lengths, Size(sizes_.batch), stream);
  ScanCost cost;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const double blocks = lengths[h / Size(sizes_.heads.n_kv_heads)].n_blocks;
    const double planes = blocks * heads[h].n_planes * sizeof(std::uint64_t);
    cost.read_bits +=
        heads[h].n_planes + heads[h].n_channels * static_cast<double>(mean_bits_) / kBlockTokens;
    cost.link_bytes += on_host_ ? planes : 0;
    cost.scan_bytes += planes + blocks * heads[h].n_channels * mean_bits_ / 8;
  }
  cost.read_bits /= static_cast<double>(heads.size());
  return cost;
}

PaperIndex::PaperIndex(const IndexSizes& sizes, double budget, bool on_host)
    : sizes_(sizes), budget_(budget), on_host_(on_host) {
  const std::int64_t heads = sizes.n_heads(), dim = sizes.heads.head_dim;
  depth_.Reserve(Size(heads * dim));
  planes_.Reserve(Size(heads * dim * kPlanes));
  channels_.Reserve(Size(heads * dim));
  n_planes_.Reserve(Size(heads));
  n_channels_.Reserve(Size(heads));
  if (on_host) {
    staged_planes_.Reserve(Size(heads * dim * kPlanes * sizes.max_blocks));
    staged_scales_.Reserve(Size(heads * dim * sizes.max_blocks));
  }
}

void PaperIndex::Plan(std::int32_t layer, const float* q, cudaStream_t stream) {
  q_ = q;
  PlanPaper({sizes_.n_heads(), sizes_.heads.n_kv_heads, sizes_.heads.group(), sizes_.heads.head_dim,
             q, layers_[Size(layer)].variance, budget_, sizes_.lengths, depth_.data(),
             planes_.data(), n_planes_.data(), channels_.data(), n_channels_.data()},
            stream);
}

void PaperIndex::Fetch(std::int32_t layer, cudaStream_t stream) {
  if (!on_host_) return;
  const Layer& l = layers_[Size(layer)];
  const std::int64_t dim = sizes_.heads.head_dim;
  GatherRuns planes =
      RunsOf(sizes_, l.planes, sizeof(std::uint64_t), staged_planes_.data(), dim * kPlanes);
  planes.rows = planes_.data();
  planes.rows_stride = dim * kPlanes;
  planes.n_rows = n_planes_.data();
  Gather(planes, stream);
  GatherRuns scales = RunsOf(sizes_, l.scales, sizeof(Half), staged_scales_.data(), dim);
  scales.rows = channels_.data();
  scales.rows_stride = dim;
  scales.n_rows = n_channels_.data();
  Gather(scales, stream);
}

void PaperIndex::Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& /*rest*/,
                      cudaStream_t stream) {
  PaperScan scan{};
  scan.head_dim = sizes_.heads.head_dim;
  scan.group = sizes_.heads.group();
  scan.n_kv_heads = sizes_.heads.n_kv_heads;
  scan.pieces = layers_[Size(layer)].pieces;
  scan.n_pieces = sizes_.n_heads();
  scan.max_tiles = sizes_.max_tiles();
  scan.planes = planes_.data();
  scan.n_planes = n_planes_.data();
  scan.channels = channels_.data();
  scan.n_channels = n_channels_.data();
  scan.q = q_;
  scan.lengths = sizes_.lengths;
  scan.sink = sink;
  ScanPaper(scan, stream);
}

ScanCost PaperIndex::Cost(cudaStream_t stream) const {
  const auto planes = ToHost(n_planes_.data(), Size(sizes_.n_heads()), stream);
  const auto channels = ToHost(n_channels_.data(), Size(sizes_.n_heads()), stream);
  const auto lengths = ToHost(sizes_.lengths, Size(sizes_.batch), stream);
  ScanCost cost;
  for (std::size_t h = 0; h < planes.size(); ++h) {
    const double blocks = lengths[h / Size(sizes_.heads.n_kv_heads)].n_blocks;
    const double bytes = blocks * (planes[h] * 8.0 + channels[h] * 2.0);
    cost.read_bits += planes[h] + channels[h] * 16.0 / kBlockTokens;
    cost.link_bytes += on_host_ ? bytes : 0;
    cost.scan_bytes += bytes;
  }
  cost.read_bits /= static_cast<double>(planes.size());
  return cost;
}

}  // namespace fathom::cuda
