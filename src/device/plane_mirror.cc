// SPDX-License-Identifier: MIT
#include "device/plane_mirror.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "backend/cuda/host_arena.h"
#include "base/parallel.h"
#include "fathom/error.h"
#include "store/layout.h"
#include "store/plane_rows.h"

namespace fathom::cuda {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t RoundUp(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

template <typename T>
void Upload(const T* from, std::int64_t n, T* to) {
  Check(cudaMemcpy(to, from, Size(n) * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  // A small copy may still be on its way, and streams of ours do not wait for the default one.
  Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

}  // namespace

PlaneMirror::PlaneMirror(const StepSizes& sizes, std::int32_t dense_layers, const IndexShape& shape,
                         const Lengths* lengths)
    : heads_(sizes.heads),
      dense_layers_(dense_layers),
      n_layers_(sizes.n_layers),
      shape_(shape),
      n_slots_(std::int64_t{sizes.n_layers - dense_layers} * sizes.heads.n_kv_heads),
      capacity_(RoundUp(sizes.max_tokens / kBlockTokens + 1, shape.segment_blocks)),
      plane_bytes_(
          static_cast<std::int64_t>(layout::PlaneBytes(shape.head_dim, shape.segment_blocks))),
      side_row_bytes_(static_cast<std::int64_t>(
          layout::SideRowBytes(Codec::kMean, shape.mean_bits, static_cast<int>(capacity_)))),
      segments_(Size(n_slots_ * segments_per_head())),
      sides_(Size(n_slots_ * shape.head_dim * side_row_bytes_)),
      packed_sides_(Size(n_slots_ * shape.head_dim) *
                    layout::SideRowBytes(Codec::kMean, shape.mean_bits, shape.segment_blocks)),
      multiplier_(1),
      index_({sizes.heads, 1, capacity_, lengths}, shape.mean_bits, multiplier_.data(),
             /*on_host=*/true, sizes.n_layers) {
  if (shape.segment_blocks % kTileBlocks != 0) {
    throw Error(ErrorCode::kUnsupported, "segments of " + std::to_string(shape.segment_blocks) +
                                             " blocks; the device takes multiples of " +
                                             std::to_string(kTileBlocks));
  }
}

// All heads must have as many codecs, each of the same blocks: a plan makes the tables of all.
void PlaneMirror::CheckCodecs(const StepSource& source) const {
  const auto first = source.plane_head(dense_layers_, 0).index->segments();
  for (std::int32_t layer = dense_layers_; layer < n_layers_; ++layer) {
    for (std::int32_t h = 0; h < heads_.n_kv_heads; ++h) {
      const auto segments = source.plane_head(layer, h).index->segments();
      if (std::ranges::equal(segments, first, {}, &SegmentView::table, &SegmentView::table)) {
        continue;
      }
      throw Error(ErrorCode::kUnsupported,
                  "KV head " + std::to_string(h) + " of layer " + std::to_string(layer) +
                      " has other codecs than the first; the device takes the same for all");
    }
  }
}

bool PlaneMirror::Sync(const StepSource& source, std::int64_t n_blocks, int n_threads,
                       cudaStream_t stream) {
  CheckCodecs(source);
  if (source.version() != version_) n_blocks_ = 0;
  version_ = 0;  // should something fail
  AddSlabs((n_blocks + shape_.segment_blocks - 1) / shape_.segment_blocks);
  for (std::int64_t at = n_blocks_; at < n_blocks;) {
    const std::int64_t segment = at / shape_.segment_blocks;
    const std::int64_t end = std::min(n_blocks, (segment + 1) * shape_.segment_blocks);
    CopySegment(source, segment, at, end, n_threads, stream);
    at = end;
  }
  n_blocks_ = n_blocks;
  const auto n_codecs =
      static_cast<std::int32_t>(source.plane_head(dense_layers_, 0).index->codecs().size());
  const bool changed = n_codecs != n_codecs_;
  if (changed) {
    index_.SetCodecs(n_codecs);
    n_codecs_ = n_codecs;
  }
  SetPieces(source);
  SetStats(source);
  version_ = source.version();
  return changed;
}

// Page-locked memory for the planes of n_segments segments of all heads.
void PlaneMirror::AddSlabs(std::int64_t n_segments) {
  const auto n = static_cast<std::int64_t>(slabs_.size());
  if (n >= n_segments) return;
  CheckHostMemory((n_segments - n) * n_slots_ * plane_bytes_, "copies of the index's planes",
                  "choose a shorter context, or let decode attend on the CPU");
  while (slabs_.size() < Size(n_segments)) slabs_.emplace_back(Size(n_slots_ * plane_bytes_));
  std::vector<const std::byte*> all;
  for (std::int64_t slot = 0; slot < n_slots_; ++slot) {
    for (std::int64_t s = 0; s < segments_per_head(); ++s) {
      all.push_back(s < n_segments ? slabs_[Size(s)].data() + slot * plane_bytes_ : nullptr);
    }
  }
  Upload(all.data(), static_cast<std::int64_t>(all.size()), segments_.data());
}

// Blocks [first, end) of the sequence, all of one segment.
void PlaneMirror::CopySegment(const StepSource& source, std::int64_t segment, std::int64_t first,
                              std::int64_t end, int n_threads, cudaStream_t stream) {
  const std::int64_t before = segment * shape_.segment_blocks;
  // Rows of means from the first byte that changes, in whole words, to the end of the segment.
  const auto row = static_cast<std::int64_t>(
      layout::SideRowBytes(Codec::kMean, shape_.mean_bits, shape_.segment_blocks));
  const std::int64_t skip = (first - before) * shape_.mean_bits / 8 / 8 * 8, width = row - skip;
  ParallelFor(n_slots_, n_threads, [&](std::int64_t slot) {
    const auto layer = dense_layers_ + static_cast<std::int32_t>(slot / heads_.n_kv_heads);
    const auto kv_head = static_cast<std::int32_t>(slot % heads_.n_kv_heads);
    const SegmentView& view = source.plane_head(layer, kv_head).index->segments()[Size(segment)];
    CopyPlanes(
        view, shape_, first - before, end - before,
        reinterpret_cast<std::uint64_t*>(slabs_[Size(segment)].data() + slot * plane_bytes_));
    for (std::int64_t c = 0; c < shape_.head_dim; ++c) {
      std::memcpy(packed_sides_.data() + (slot * shape_.head_dim + c) * width,
                  view.side + c * row + skip, Size(width));
    }
  });
  Check(cudaMemcpy2DAsync(sides_.data() + before * shape_.mean_bits / 8 + skip,
                          Size(side_row_bytes_), packed_sides_.data(), Size(width), Size(width),
                          Size(n_slots_ * shape_.head_dim), cudaMemcpyHostToDevice, stream),
        "cudaMemcpy2DAsync");
  Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// One piece per head and codec: what it has quantized lies together.
void PlaneMirror::SetPieces(const StepSource& source) {
  const auto segments = source.plane_head(dense_layers_, 0).index->segments();
  std::vector<std::int64_t> end(Size(n_codecs_), 0);  // blocks up to those of each codec
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto before = static_cast<std::int64_t>(s) * shape_.segment_blocks;
    end[Size(segments[s].table)] = std::min(before + segments[s].n_blocks, n_blocks_);
  }
  std::vector<ScanPiece> pieces;
  for (std::int64_t slot = 0; slot < n_slots_; ++slot) {
    const auto head = static_cast<std::int32_t>(slot % heads_.n_kv_heads);
    const std::uint64_t* planes =
        index_.staged_planes() + head * shape_.head_dim * kPlanes * capacity_;
    const std::uint8_t* means = sides_.data() + slot * shape_.head_dim * side_row_bytes_;
    std::int64_t first = 0;
    for (std::int32_t codec = 0; codec < n_codecs_; ++codec) {
      const std::int64_t last = std::max(end[Size(codec)], first);
      pieces.push_back({planes + first, capacity_, means + first * shape_.mean_bits / 8,
                        side_row_bytes_, static_cast<std::int32_t>(last - first),
                        static_cast<std::int32_t>(first), head, head * n_codecs_ + codec,
                        /*gathered_planes=*/true, /*gathered_means=*/false});
      first = last;
    }
  }
  pieces_.Reserve(pieces.size());
  Upload(pieces.data(), static_cast<std::int64_t>(pieces.size()), pieces_.data());
}

void PlaneMirror::SetStats(const StepSource& source) {
  MeanStats stats;
  for (std::int32_t layer = dense_layers_; layer < n_layers_; ++layer) {
    for (std::int32_t h = 0; h < heads_.n_kv_heads; ++h) {
      const StepSource::PlaneHead head = source.plane_head(layer, h);
      stats.Add(*head.index, head.distortion, *head.hull);
    }
  }
  stats_.Set(stats);
  const double multiplier = source.multiplier();
  Upload(&multiplier, 1, multiplier_.data());
  const std::int64_t per_head = segments_per_head();
  std::vector<MeanIndex::Layer> layers;
  for (std::int32_t layer = 0; layer < n_layers_; ++layer) {
    // Those before are never scanned.
    const std::int64_t slot = Slot(std::max(layer, dense_layers_), 0);
    layers.push_back(stats_.Layer(pieces_.data() + slot * n_codecs_,
                                  {segments_.data() + slot * per_head,
                                   static_cast<std::int32_t>(per_head), shape_.segment_blocks},
                                  slot));
  }
  index_.SetLayers(std::move(layers));
}

}  // namespace fathom::cuda
