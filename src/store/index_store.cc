// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cassert>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "fathom/store.h"
#include "memory/aligned_buffer.h"
#include "memory/state_stream.h"
#include "store/codec_fit.h"
#include "store/layout.h"
#include "store/plane_rows.h"

namespace fathom {
namespace {

void AddTo(std::vector<double>& total, const std::vector<double>& part) {
  for (std::size_t i = 0; i < total.size(); ++i) total[i] += part[i];
}

// Where a segment lies.
struct Place {
  std::uint64_t* planes = nullptr;
  std::uint8_t* side = nullptr;
  std::int32_t row_blocks = 0;
};

std::size_t PlaneBytes(const IndexShape& shape) {
  return layout::PlaneBytes(shape.head_dim, shape.segment_blocks);
}
std::size_t SideBytes(const IndexShape& shape) {
  return layout::SideBytes(shape.codec, shape.head_dim, shape.mean_bits, shape.segment_blocks);
}

// A segment by itself: planes, then means or scales.
Place Alone(const IndexShape& shape, std::byte* bytes) {
  return {reinterpret_cast<std::uint64_t*>(bytes),
          reinterpret_cast<std::uint8_t*>(bytes + PlaneBytes(shape)), shape.segment_blocks};
}

SegmentView View(const Place& place, std::int32_t n_blocks, std::int32_t table) {
  return {place.planes, place.side, n_blocks, table, place.row_blocks};
}

std::uint64_t* Row(const Place& place, std::int64_t row) {
  return place.planes + row * place.row_blocks;
}

void Zero(const IndexShape& shape, const Place& place) {
  for (std::int64_t r = 0; r < std::int64_t{shape.head_dim} * kPlanes; ++r) {
    std::fill_n(Row(place, r), shape.segment_blocks, std::uint64_t{0});
  }
  std::fill_n(place.side, SideBytes(shape), std::uint8_t{0});
}

// The bytes of a segment by itself, as it is stored: in `copy` where it lies between others.
std::span<const std::byte> StoredBytes(const IndexShape& shape, const Place& place,
                                       std::vector<std::byte>* copy) {
  const auto size = static_cast<std::size_t>(shape.SegmentBytes());
  auto* first = reinterpret_cast<std::byte*>(place.planes);
  const Place alone = Alone(shape, first);
  if (place.row_blocks == alone.row_blocks && place.side == alone.side) return {first, size};
  copy->resize(size);
  const Place to = Alone(shape, copy->data());
  CopyPlanes(View(place, 0, 0), shape, 0, shape.segment_blocks, to.planes);
  std::copy_n(place.side, SideBytes(shape), to.side);
  return *copy;
}

}  // namespace

std::int64_t IndexShape::SegmentBytes() const {
  return static_cast<std::int64_t>(PlaneBytes(*this) + SideBytes(*this));
}

std::int64_t IndexShape::IndexBytes(std::int64_t n_blocks) const {
  return (n_blocks + segment_blocks - 1) / segment_blocks * SegmentBytes();
}

// Segments made at once: one piece of memory, so that it can lie in huge pages, for a scan touches
// a few cache lines in very many places. Planes of layout::RowSegments at a time, the last ones
// perhaps fewer, that lie between each other's rows; then the sides of all.
struct HeadIndex::Built {
  Built(const IndexShape& index, std::size_t n)
      : shape(index), n_segments(n), bytes(n * static_cast<std::size_t>(index.SegmentBytes())) {}

  Place At(std::size_t s) {
    const auto together = static_cast<std::size_t>(layout::RowSegments(shape.segment_blocks));
    const std::size_t place = s % together, first = s - place;
    const std::size_t n = std::min(together, n_segments - first);
    const auto blocks = static_cast<std::size_t>(shape.segment_blocks);
    std::byte* planes = bytes.data() + first * PlaneBytes(shape);
    std::byte* sides = bytes.data() + n_segments * PlaneBytes(shape);
    return {reinterpret_cast<std::uint64_t*>(planes) + place * blocks,
            reinterpret_cast<std::uint8_t*>(sides) + s * SideBytes(shape),
            static_cast<std::int32_t>(n * blocks)};
  }

  const IndexShape shape;
  const std::size_t n_segments;
  AlignedBuffer bytes;
};

struct HeadIndex::Segment {
  Place place;                 // of `own`, of Built, or of what the index was loaded from
  AlignedBuffer own;           // planes, then means or scales
  std::uint64_t id = 0;        // of the piece that it was stored as; 0 while it may change
  CodecSums sums;              // of the last segment; released when the segment is closed
  std::vector<double> errors;  // [kLevels][D] summed squared errors; of closed segments only
};

HeadIndex::HeadIndex(IndexShape shape, Basis basis, IndexRules rules)
    : shape_(shape), basis_(std::move(basis)), rules_(rules) {
  assert(shape_.head_dim > 0 && shape_.head_dim <= kMaxHeadDim && shape_.head_dim % 16 == 0);
  assert(shape_.segment_blocks > 0 && shape_.segment_blocks % 2 == 0);
  assert(shape_.codec == Codec::kPaper || shape_.mean_bits == 4 || shape_.mean_bits == 8);
  assert(basis_.dim == shape_.head_dim);
  if (shape_.codec == Codec::kPaper && tracks()) {
    cell_weight_ =
        CentreWeights(std::vector<float>(static_cast<std::size_t>(shape_.head_dim), 1.0F));
  }
}

HeadIndex::~HeadIndex() = default;
HeadIndex::HeadIndex(HeadIndex&&) noexcept = default;
HeadIndex& HeadIndex::operator=(HeadIndex&&) noexcept = default;

void HeadIndex::Build(const Half* rows, std::int64_t n_blocks, const Backend& backend,
                      const MeanCodec* codec) {
  assert(n_blocks_ == 0 && n_blocks > 0);
  const bool fit = shape_.codec == Codec::kMean && codec == nullptr;
  try {
    built_ = std::make_unique<Built>(
        shape_,
        static_cast<std::size_t>((n_blocks + shape_.segment_blocks - 1) / shape_.segment_blocks));
    if (fit) {
      BlockReader reader(rows, basis_);
      codecs_.push_back(FitSteps(reader, 0, n_blocks, shape_, rules_.ranges, kMeanReach));
    } else if (shape_.codec == Codec::kMean) {
      codecs_.push_back(*codec);
      if (rules_.decoders == Decoders::kCentre) codecs_[0].weight = CentreWeights(codec->range);
    }
    PackBlocks(rows, n_blocks, backend, /*building=*/true);
    if (fit && rules_.decoders == Decoders::kCentre) {
      codecs_[0].weight = CentreWeights(codecs_[0].range);
    } else if (fit) {
      CodecSums all(shape_.head_dim);
      for (const Segment& segment : segments_) all.Merge(segment.sums);
      codecs_[0].weight = all.FitWeights();
    }
    if (tracks()) {
      closed_errors_.resize(static_cast<std::size_t>(kLevels) *
                            static_cast<std::size_t>(shape_.head_dim));
      for (std::size_t s = 0; s + 1 < segments_.size(); ++s) CloseSegment(s, SegmentErrors(s));
    }
  } catch (...) {  // out of memory: nothing half-made stays behind
    Clear();
    throw;
  }
}

void HeadIndex::Append(const Half* rows, std::int64_t n_blocks, const Backend& backend) {
  assert(n_blocks_ > 0 && n_blocks >= n_blocks_);
  PackBlocks(rows, n_blocks, backend, /*building=*/false);
}

void HeadIndex::PackBlocks(const Half* rows, std::int64_t n_blocks, const Backend& backend,
                           bool building) {
  BlockReader reader(rows, basis_);
  while (n_blocks_ < n_blocks) {
    if (n_blocks_ % shape_.segment_blocks == 0) {
      if (building || segments_.empty()) {
        AddSegment(0);
      } else {
        AddNextSegment(reader, backend);
      }
    }
    const PackArgs args = BlockArgs(views_.back().n_blocks, reader.Load(n_blocks_));
    backend.Pack(args);
    if (tracks()) segments_.back().sums.AddBlock(args);
    ++views_.back().n_blocks;
    ++n_blocks_;
  }
}

void HeadIndex::AddSegment(std::int32_t table) {
  Segment segment;
  if (built_ != nullptr && segments_.size() < built_->n_segments) {
    segment.place = built_->At(segments_.size());
    Zero(shape_, segment.place);  // it may have held a segment that was cut off
  } else {
    segment.own = AlignedBuffer(static_cast<std::size_t>(shape_.SegmentBytes()));
    segment.place = Alone(shape_, segment.own.data());
  }
  if (tracks()) segment.sums = CodecSums(shape_.head_dim);
  const SegmentView view = View(segment.place, 0, table);
  views_.reserve(views_.size() + 1);  // the two lists cannot come apart when memory runs out
  segments_.push_back(std::move(segment));
  views_.push_back(view);
}

// Closes the last segment, which is full, and adds one; with the mean codec, one with a codec
// fitted on the last. All that can fail comes first.
void HeadIndex::AddNextSegment(BlockReader& reader, const Backend& backend) {
  const std::size_t last = segments_.size() - 1;
  std::vector<double> errors;
  if (tracks()) {
    errors = SegmentErrors(last);
    closed_errors_.resize(errors.size());
  }
  if (shape_.codec == Codec::kMean) {
    MeanCodec codec = FitCodec(reader, n_blocks_ - shape_.segment_blocks, shape_.segment_blocks,
                               shape_, rules_, kMeanReachAhead, backend);
    codecs_.reserve(codecs_.size() + 1);
    AddSegment(static_cast<std::int32_t>(codecs_.size()));
    codecs_.push_back(std::move(codec));
  } else {
    AddSegment(0);
  }
  if (tracks()) CloseSegment(last, std::move(errors));
}

std::vector<double> HeadIndex::SegmentErrors(std::size_t s) const {
  const std::vector<float>& weight = shape_.codec == Codec::kMean
                                         ? codecs_[static_cast<std::size_t>(views_[s].table)].weight
                                         : cell_weight_;
  return segments_[s].sums.Errors(weight);
}

// Keeps the errors of a segment that will get no more blocks, and no longer its sums.
void HeadIndex::CloseSegment(std::size_t s, std::vector<double> errors) {
  AddTo(closed_errors_, errors);
  segments_[s].errors = std::move(errors);
  segments_[s].sums = CodecSums();
}

// Arguments that pack x, or that have packed it, as block `block` of the last segment.
PackArgs HeadIndex::BlockArgs(std::int32_t block, const float* x) {
  const Place& place = segments_.back().place;
  PackArgs args;
  args.codec = shape_.codec;
  args.head_dim = shape_.head_dim;
  args.segment_blocks = shape_.segment_blocks;
  args.mean_bits = shape_.mean_bits;
  args.block = block;
  args.x = x;
  if (shape_.codec == Codec::kMean) {
    const MeanCodec& codec = codecs_[static_cast<std::size_t>(views_.back().table)];
    args.mean_step = codec.mean_step.data();
    args.range = codec.range.data();
  }
  args.planes = place.planes;
  args.side = place.side;
  args.row_blocks = place.row_blocks;
  return args;
}

void HeadIndex::Truncate(const Half* rows, std::int64_t n_blocks) {
  assert(n_blocks >= 0 && n_blocks <= n_blocks_);
  if (n_blocks == n_blocks_) return;
  if (n_blocks == 0) return Clear();
  const std::int64_t last = (n_blocks - 1) / shape_.segment_blocks;
  segments_.erase(segments_.begin() + last + 1, segments_.end());
  views_.erase(views_.begin() + last + 1, views_.end());
  const auto kept = static_cast<std::int32_t>(n_blocks - last * shape_.segment_blocks);
  if (kept < views_.back().n_blocks) segments_.back().id = 0;
  views_.back().n_blocks = kept;
  n_blocks_ = n_blocks;
  if (!tracks()) return;
  if (shape_.codec == Codec::kMean)
    codecs_.erase(codecs_.begin() + views_.back().table + 1, codecs_.end());
  Segment& open = segments_.back();
  open.errors.clear();
  open.sums = CodecSums(shape_.head_dim);
  BlockReader reader(rows, basis_);
  for (std::int32_t b = 0; b < views_.back().n_blocks; ++b) {
    open.sums.AddBlock(BlockArgs(b, reader.Load(last * shape_.segment_blocks + b)));
  }
  std::ranges::fill(closed_errors_, 0.0);
  for (std::size_t s = 0; s + 1 < segments_.size(); ++s) AddTo(closed_errors_, segments_[s].errors);
}

void HeadIndex::Save(StateWriter* out) {
  out->Put<std::int64_t>(n_blocks_);
  out->Put<std::uint64_t>(codecs_.size());
  for (const MeanCodec& codec : codecs_) {
    out->PutAll(codec.mean_step);
    out->PutAll(codec.range);
    out->PutAll(codec.weight);
  }
  std::vector<std::byte> copy;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    out->Put<std::int32_t>(views_[s].table);
    const auto bytes = [&] { return StoredBytes(shape_, segments_[s].place, &copy); };
    views_[s].n_blocks == shape_.segment_blocks ? out->PutSealed(&segments_[s].id, bytes)
                                                : out->PutOpen(bytes());
    out->PutAll(segments_[s].errors);
  }
  out->PutAll(closed_errors_);
  if (tracks() && !segments_.empty()) segments_.back().sums.Save(out);
}

void HeadIndex::Load(StateReader* in) {
  assert(n_blocks_ == 0);
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 40;
  const auto dim = static_cast<std::size_t>(shape_.head_dim);
  const auto n_blocks = in->GetIn<std::int64_t>(0, kMostBlocks);
  const auto n_segments = (n_blocks + shape_.segment_blocks - 1) / shape_.segment_blocks;
  const auto n_codecs = in->GetIn<std::uint64_t>(
      0, static_cast<std::uint64_t>(std::max<std::int64_t>(n_segments, 1)));
  for (std::uint64_t c = 0; c < n_codecs; ++c) {
    codecs_.push_back({in->GetAll<float>(dim), in->GetAll<float>(dim),
                       in->GetAll<float>(dim * kPlanes * kPlanes)});
  }
  const std::size_t n_errors = static_cast<std::size_t>(kLevels) * dim;
  for (std::int64_t s = 0; s < n_segments; ++s) {
    const bool last = s + 1 == n_segments;
    const auto table =
        in->GetIn<std::int32_t>(0, n_codecs == 0 ? 0 : static_cast<int>(n_codecs) - 1);
    Segment segment;
    segment.place = Alone(
        shape_, in->GetPiece(static_cast<std::size_t>(shape_.SegmentBytes()), &segment.id).data());
    segment.errors = in->GetAll<double>(tracks() && !last ? n_errors : 0);
    views_.push_back(View(segment.place,
                          static_cast<std::int32_t>(last ? n_blocks - s * shape_.segment_blocks
                                                         : shape_.segment_blocks),
                          table));
    segments_.push_back(std::move(segment));
  }
  closed_errors_ = in->GetAll<double>();
  if (closed_errors_.size() != n_errors && !closed_errors_.empty()) in->Fail("sums of errors");
  if (tracks() && n_segments > 0) segments_.back().sums.Load(in, shape_.head_dim);
  n_blocks_ = n_blocks;
}

void HeadIndex::Clear() {
  segments_.clear();
  built_.reset();
  views_.clear();
  codecs_.clear();
  closed_errors_.clear();
  n_blocks_ = 0;
}

std::vector<double> HeadIndex::Distortions() const {
  assert(tracks() && n_blocks_ > 0);
  std::vector<double> total = SegmentErrors(segments_.size() - 1);
  if (!closed_errors_.empty()) AddTo(total, closed_errors_);
  for (double& x : total) x /= static_cast<double>(n_tokens());
  return total;
}

}  // namespace fathom
