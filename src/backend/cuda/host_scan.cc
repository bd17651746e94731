// SPDX-License-Identifier: MIT
#include "backend/cuda/host_scan.h"

#include <algorithm>
#include <array>
#include <cassert>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/scan_paper.h"
#include "store/layout.h"

namespace fathom::cuda {
namespace {

std::int32_t CountTables(std::span<const HeadIndexView> heads) {
  std::size_t n = 0;
  for (const HeadIndexView& head : heads) n += head.tables.size();
  return static_cast<std::int32_t>(std::max<std::size_t>(n, 1));
}

}  // namespace

// Rows of `width` bytes from a host table with rows of `from_pitch` to one of `to_pitch`.
static void CopyRows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                     std::size_t width, std::size_t n_rows, cudaStream_t stream) {
  Check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, n_rows, cudaMemcpyHostToDevice,
                          stream),
        "cudaMemcpy2DAsync to the device");
}

UploadedIndex::UploadedIndex(std::span<const HeadIndexView> heads, std::int32_t head_dim,
                             std::int32_t group, std::int32_t segment_blocks,
                             std::int32_t mean_bits, cudaStream_t stream)
    : head_dim_(head_dim),
      mean_bits_(mean_bits),
      n_heads_(static_cast<std::int32_t>(heads.size())),
      tables_(CountTables(heads), head_dim, group) {
  std::vector<const ScanTable*> tables;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    std::int32_t first_block = 0;
    for (const SegmentView& segment : heads[h].segments) {
      AddSegment(segment, static_cast<std::int32_t>(h), first_block,
                 static_cast<std::int32_t>(tables.size()) + segment.table, segment_blocks, stream);
      first_block += segment.n_blocks;
    }
    n_blocks_ = std::max<std::int64_t>(n_blocks_, first_block);
    for (const ScanTable& table : heads[h].tables) tables.push_back(&table);
  }
  tables_.Upload(tables, stream);
  pieces_ = DeviceBuffer<ScanPiece>(std::span<const ScanPiece>(host_pieces_));
  const Lengths all{0, static_cast<std::int32_t>(n_blocks_), 0,
                    static_cast<std::int32_t>(n_tokens()), 1};
  lengths_ = DeviceBuffer<Lengths>(std::span<const Lengths>(&all, 1));
}

void UploadedIndex::AddSegment(const SegmentView& segment, std::int32_t head,
                               std::int32_t first_block, std::int32_t table,
                               std::int32_t segment_blocks, cudaStream_t stream) {
  if (segment.n_blocks == 0) return;
  const std::int32_t stride = TilesOf(segment.n_blocks) * kTileBlocks;
  const auto rows = static_cast<std::size_t>(head_dim_) * kPlanes;
  const std::size_t mean_row = layout::SideRowBytes(Codec::kMean, mean_bits_, stride);
  planes_.emplace_back(rows * static_cast<std::size_t>(stride));
  means_.emplace_back(static_cast<std::size_t>(head_dim_) * mean_row);
  CopyRows(planes_.back().data(), static_cast<std::size_t>(stride) * 8, segment.planes,
           static_cast<std::size_t>(RowBlocks(segment, segment_blocks)) * 8,
           static_cast<std::size_t>(segment.n_blocks) * 8, rows, stream);
  const std::size_t used = mean_bits_ == 8 ? static_cast<std::size_t>(segment.n_blocks)
                                           : static_cast<std::size_t>(segment.n_blocks + 1) / 2;
  CopyRows(means_.back().data(), mean_row, segment.side,
           layout::SideRowBytes(Codec::kMean, mean_bits_, segment_blocks), used,
           static_cast<std::size_t>(head_dim_), stream);
  host_pieces_.push_back({planes_.back().data(), stride, means_.back().data(),
                          static_cast<std::int64_t>(mean_row), segment.n_blocks, first_block, head,
                          table, false, false});
  max_tiles_ = std::max(max_tiles_, stride / kTileBlocks);
}

MeanScan UploadedIndex::scan() const {
  MeanScan scan{};
  scan.tables = tables_.view();
  scan.mean_bits = mean_bits_;
  scan.n_kv_heads = std::max(n_heads_, 1);
  scan.pieces = pieces_.data();
  scan.n_pieces = static_cast<std::int32_t>(host_pieces_.size());
  scan.max_tiles = max_tiles_;
  scan.lengths = lengths_.data();
  scan.sink.tile_step = 1;
  return scan;
}

void UploadedIndex::Scores(float* scores, std::int64_t stride, cudaStream_t stream) const {
  MeanScan all = scan();
  all.sink.scores = scores;
  all.sink.stride = stride;
  ScanMean(all, stream);
}

}  // namespace fathom::cuda

namespace fathom {
namespace {

template <typename T>
void CopyOut(T* to, const T* from, std::int64_t n) {
  cuda::Check(cudaMemcpy(to, from, static_cast<std::size_t>(n) * sizeof(T), cudaMemcpyDeviceToHost),
              "cudaMemcpy to the host");
}

std::int64_t BlocksOf(const ScanHead& head) {
  std::int64_t n = 0;
  for (const SegmentView& segment : head.segments) n += segment.n_blocks;
  return n;
}

// Scores, or sums and bases, of one head.
void ScanHeadMean(const ScanArgs& a, const ScanHead& head, cudaStream_t stream) {
  const std::int64_t n_blocks = BlocksOf(head);
  if (n_blocks == 0) return;
  const std::int64_t n = n_blocks * kBlockTokens;
  const cuda::HeadIndexView view{head.segments, head.tables};
  const cuda::UploadedIndex index({&view, 1}, a.head_dim, a.group, a.segment_blocks, a.mean_bits,
                                  stream);
  const auto lists = static_cast<std::size_t>(a.group);
  if (head.scores != nullptr) {
    const cuda::DeviceBuffer<float> scores(lists * static_cast<std::size_t>(n));
    index.Scores(scores.data(), n, stream);
    cuda::Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    for (std::int32_t h = 0; h < a.group; ++h) {
      CopyOut(head.scores + h * head.stride, scores.data() + h * n, n);
    }
    return;
  }
  const cuda::DeviceBuffer<std::uint8_t> sums(lists * static_cast<std::size_t>(n));
  const cuda::DeviceBuffer<std::int32_t> base(lists * static_cast<std::size_t>(n_blocks));
  cuda::MeanScan scan = index.scan();
  scan.sums = sums.data();
  scan.base = base.data();
  scan.base_stride = n_blocks;
  scan.sink.stride = n;
  cuda::ScanMean(scan, stream);
  cuda::Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  for (std::int32_t h = 0; head.sums != nullptr && h < a.group; ++h) {
    CopyOut(head.sums + h * head.stride, sums.data() + h * n, n);
    CopyOut(head.base + h * head.base_stride, base.data() + h * n_blocks, n_blocks);
  }
}

// What a head reads of the paper codec, on the device.
struct PaperReads {
  PaperReads(const ScanHead& head, std::size_t dim);
  cuda::DeviceBuffer<std::int16_t> planes, channels;
  cuda::DeviceBuffer<std::int32_t> counts;  // of both
};

PaperReads::PaperReads(const ScanHead& head, std::size_t dim) {
  std::vector<std::int16_t> plane, channel;
  for (std::size_t j = 0; j < dim; ++j) {
    if (head.depth[j] > 0) channel.push_back(static_cast<std::int16_t>(j));
    for (std::size_t p = 0; p < head.depth[j]; ++p) {
      plane.push_back(static_cast<std::int16_t>(j * kPlanes + p));
    }
  }
  const std::array count{static_cast<std::int32_t>(plane.size()),
                         static_cast<std::int32_t>(channel.size())};
  plane.resize(dim * kPlanes);
  channel.resize(dim);
  planes = cuda::DeviceBuffer<std::int16_t>{std::span<const std::int16_t>(plane)};
  channels = cuda::DeviceBuffer<std::int16_t>{std::span<const std::int16_t>(channel)};
  counts = cuda::DeviceBuffer<std::int32_t>{std::span<const std::int32_t>(count)};
}

// Scores of one segment into out + h * stride.
void ScanPaperSegment(const ScanArgs& a, const SegmentView& segment, const PaperReads& reads,
                      const float* q, float* out, std::int64_t out_stride, cudaStream_t stream) {
  const auto dim = static_cast<std::size_t>(a.head_dim);
  const std::int64_t n = std::int64_t{segment.n_blocks} * kBlockTokens;
  const std::int32_t stride = cuda::TilesOf(segment.n_blocks) * cuda::kTileBlocks;
  const auto width = static_cast<std::size_t>(stride);
  const auto blocks = static_cast<std::size_t>(segment.n_blocks);
  const auto capacity = static_cast<std::size_t>(a.segment_blocks);
  const cuda::DeviceBuffer<std::uint64_t> planes(dim * kPlanes * width);
  const cuda::DeviceBuffer<Half> scales(dim * width);
  const auto row = static_cast<std::size_t>(RowBlocks(segment, a.segment_blocks));
  cuda::CopyRows(planes.data(), width * 8, segment.planes, row * 8, blocks * 8, dim * kPlanes,
                 stream);
  cuda::CopyRows(scales.data(), width * 2, segment.side, capacity * 2, blocks * 2, dim, stream);
  const cuda::DeviceBuffer<float> scores(static_cast<std::size_t>(a.group * n));
  const cuda::PaperPiece piece{planes.data(), stride, scales.data(), stride, segment.n_blocks, 0, 0,
                               false};
  const cuda::DeviceBuffer<cuda::PaperPiece> pieces{std::span<const cuda::PaperPiece>(&piece, 1)};
  const cuda::Lengths all{0, segment.n_blocks, 0, static_cast<std::int32_t>(n), 1};
  const cuda::DeviceBuffer<cuda::Lengths> lengths{std::span<const cuda::Lengths>(&all, 1)};
  cuda::ScanPaper({.head_dim = a.head_dim,
                   .group = a.group,
                   .n_kv_heads = 1,
                   .pieces = pieces.data(),
                   .n_pieces = 1,
                   .max_tiles = stride / cuda::kTileBlocks,
                   .planes = reads.planes.data(),
                   .n_planes = reads.counts.data(),
                   .channels = reads.channels.data(),
                   .n_channels = reads.counts.data() + 1,
                   .q = q,
                   .lengths = lengths.data(),
                   .sink = {scores.data(), n, 1, nullptr, {}}},
                  stream);
  cuda::Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  for (std::int32_t h = 0; h < a.group; ++h) {
    CopyOut(out + h * out_stride, scores.data() + h * n, n);
  }
}

// The same of the paper codec; segments are scanned one after another.
void ScanHeadPaper(const ScanArgs& a, const ScanHead& head, cudaStream_t stream) {
  const auto dim = static_cast<std::size_t>(a.head_dim);
  const cuda::DeviceBuffer<float> q{
      std::span<const float>(head.q, static_cast<std::size_t>(a.group) * dim)};
  const PaperReads reads(head, dim);
  float* out = head.scores;
  for (const SegmentView& segment : head.segments) {
    if (segment.n_blocks == 0) continue;
    ScanPaperSegment(a, segment, reads, q.data(), out, head.stride, stream);
    out += std::int64_t{segment.n_blocks} * kBlockTokens;
  }
}

}  // namespace

void CudaBackend::Scan(const ScanArgs& a) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const ScanHead& head : a.heads) {
    a.codec == Codec::kMean ? ScanHeadMean(a, head, stream_.get())
                            : ScanHeadPaper(a, head, stream_.get());
  }
}

}  // namespace fathom
