// SPDX-License-Identifier: MIT
#include "fathom/label_table.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

#include "memory/aligned_buffer.h"
#include "store/codec_fit.h"
#include "store/layout.h"

namespace fathom {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

constexpr int kPackVector = 16;  // Backend::Pack takes multiples of it

// Places of the tokens of one channel and block, relative to that of token 0.
using TokenPlaces = std::array<layout::LabelPlace, kBlockTokens>;

TokenPlaces Places(const LabelShape& shape) {
  TokenPlaces places;
  const int width = layout::LabelWidth(shape.layout, shape.planes, 1);
  for (int i = 0; i < kBlockTokens; ++i) {
    places[Size(i)] = shape.layout == LabelLayout::kTokens
                          ? layout::TokenLabel(shape.planes, width, 0, 0, i)
                          : layout::ChannelLabel(LabelTable::kSegmentBlocks, 0, 0, i);
  }
  return places;
}

}  // namespace

struct LabelTable::Segment {
  AlignedBuffer bytes;  // scales, then codes
};

LabelTable::LabelTable(LabelShape shape) : shape_(shape) {}
LabelTable::~LabelTable() = default;
LabelTable::LabelTable(LabelTable&&) noexcept = default;
LabelTable& LabelTable::operator=(LabelTable&&) noexcept = default;

std::size_t LabelTable::ScaleBytes() const {
  return Size(shape_.n_channels) * kSegmentBlocks * sizeof(Half);
}

void LabelTable::AddSegment() {
  const auto width = Size(layout::LabelWidth(shape_.layout, shape_.planes, shape_.n_channels));
  AlignedBuffer bytes(ScaleBytes() +
                      width * layout::LabelBlockBytes(shape_.planes) * kSegmentBlocks);
  views_.reserve(views_.size() + 1);  // the two lists cannot come apart when memory runs out
  const LabelView view = {bytes.as<std::uint8_t>(ScaleBytes()), bytes.as<Half>(), 0};
  segments_.push_back({std::move(bytes)});
  views_.push_back(view);
}

void LabelTable::Append(const std::uint8_t* codes, const Half* scales) {
  if (n_blocks_ % kSegmentBlocks == 0) AddSegment();
  auto* segment = segments_.back().bytes.as<std::uint8_t>(ScaleBytes());
  auto* segment_scales = segments_.back().bytes.as<Half>();
  const int block = views_.back().n_blocks;
  const int width = layout::LabelWidth(shape_.layout, shape_.planes, shape_.n_channels);
  const int mask = (1 << layout::LabelBits(shape_.planes)) - 1;
  const TokenPlaces places = Places(shape_);
  for (int c = 0; c < shape_.n_channels; ++c, codes += kBlockTokens) {
    const layout::LabelPlace first = shape_.layout == LabelLayout::kTokens
                                         ? layout::TokenLabel(shape_.planes, width, c, block, 0)
                                         : layout::ChannelLabel(kSegmentBlocks, c, block, 0);
    for (std::size_t i = 0; i < kBlockTokens; ++i) {
      std::uint8_t& byte = segment[first.byte + places[i].byte];
      const int shift = first.shift + places[i].shift;
      byte = static_cast<std::uint8_t>((byte & ~(mask << shift)) | codes[i] << shift);
    }
    segment_scales[c * kSegmentBlocks + block] = scales[c];
  }
  ++views_.back().n_blocks;
  ++n_blocks_;
}

void LabelTable::AppendRows(const Half* rows, const Basis& basis,
                            std::span<const std::int32_t> channels, std::int64_t n_blocks,
                            const Backend& backend) {
  assert(channels.size() == Size(shape_.n_channels));
  BlockReader reader(rows, basis);
  constexpr int kPackBlocks = 2;  // segments of Pack are even
  const std::int32_t width = (shape_.n_channels + kPackVector - 1) / kPackVector * kPackVector;
  std::vector<float> x(Size(kBlockTokens) * Size(width));
  std::vector<std::uint64_t> planes(layout::PlaneBytes(width, kPackBlocks) / 8);
  std::vector<Half> side(Size(width) * kPackBlocks), scales(channels.size());
  std::vector<std::uint8_t> codes(channels.size() * kBlockTokens);
  while (n_blocks_ < n_blocks) {
    const float* keys = reader.Load(n_blocks_);
    for (std::int64_t i = 0; i < kBlockTokens; ++i) {
      for (std::size_t c = 0; c < channels.size(); ++c) {
        x[Size(i * width) + c] = keys[i * basis.dim + channels[c]];
      }
    }
    backend.Pack({.codec = Codec::kPaper,
                  .head_dim = width,
                  .segment_blocks = kPackBlocks,
                  .x = x.data(),
                  .planes = planes.data(),
                  .side = reinterpret_cast<std::uint8_t*>(side.data())});
    for (std::size_t c = 0; c < channels.size(); ++c) {
      scales[c] = side[c * kPackBlocks];
      for (int i = 0; i < kBlockTokens; ++i) {
        int code = 0;
        for (int p = 0; p < shape_.planes; ++p) {
          const auto word = planes[layout::PlaneWord(static_cast<int>(c), p, 0, kPackBlocks)];
          code = code << 1 | static_cast<int>(word >> i & 1);
        }
        codes[c * kBlockTokens + Size(i)] = static_cast<std::uint8_t>(code);
      }
    }
    Append(codes.data(), scales.data());
  }
}

void LabelTable::Truncate(std::int64_t n_blocks) {
  assert(n_blocks >= 0 && n_blocks <= n_blocks_);
  const std::int64_t n_segments = (n_blocks + kSegmentBlocks - 1) / kSegmentBlocks;
  segments_.erase(segments_.begin() + n_segments, segments_.end());
  views_.erase(views_.begin() + n_segments, views_.end());
  if (!views_.empty()) {
    views_.back().n_blocks =
        static_cast<std::int32_t>(n_blocks - (n_segments - 1) * kSegmentBlocks);
  }
  n_blocks_ = n_blocks;
}

}  // namespace fathom
