// SPDX-License-Identifier: MIT
// What an index holds, read bit by bit through layout.h: slow, and independent of every kernel.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "fathom/store.h"
#include "store/layout.h"

namespace fathom::test {

class IndexProbe {
 public:
  explicit IndexProbe(const HeadIndex& index) : index_(index) {}

  // 4-bit code of a token's channel.
  int Code(std::int64_t token, int channel) const {
    const std::int64_t block = token / kBlockTokens;
    return layout::Code(Word(channel, 0, block), Word(channel, 1, block), Word(channel, 2, block),
                        Word(channel, 3, block), static_cast<int>(token % kBlockTokens));
  }

  std::uint64_t Word(int channel, int plane, std::int64_t block) const {
    const SegmentView& view = View(block);
    return view
        .planes[layout::PlaneWord(channel, plane, Local(block), RowBlocks(view, SegmentBlocks()))];
  }

  // Mean code of a block (mean codec).
  int Mean(std::int64_t block, int channel) const {
    const std::uint8_t* side = Side(block, channel);
    const int b = Local(block);
    if (index_.shape().mean_bits == 8) return static_cast<std::int8_t>(side[b]);
    return layout::UnpackNibble(side[b / 2], b);
  }

  // Block maximum, as stored (paper codec).
  float Scale(std::int64_t block, int channel) const {
    Half h = 0;
    std::memcpy(&h, Side(block, channel) + Local(block) * 2, sizeof h);
    return HalfToFloat(h);
  }

  const MeanCodec& CodecOf(std::int64_t block) const {
    return index_.codecs()[static_cast<std::size_t>(View(block).table)];
  }

  // Decoded key at a level 0..5 (mean codec), in double.
  double Decode(std::int64_t token, int channel, int level) const {
    const std::int64_t block = token / kBlockTokens;
    const auto j = static_cast<std::size_t>(channel);
    const MeanCodec& codec = CodecOf(block);
    if (level == 0) return 0;
    double x = static_cast<double>(Mean(block, channel)) * codec.mean_step[j];
    for (int p = 0; p < level - 1; ++p) {
      const int bit = (Code(token, channel) >> (kPlanes - 1 - p)) & 1;
      const float w = codec.weight[(j * kPlanes + static_cast<std::size_t>(level) - 2) * kPlanes +
                                   static_cast<std::size_t>(p)];
      x += (2 * bit - 1) * static_cast<double>(w);
    }
    return x;
  }

  // Planes and side data of the blocks in use, in a fixed order: equal for equal indexes whatever
  // lies beyond.
  std::vector<std::uint64_t> Content() const {
    std::vector<std::uint64_t> content;
    for (std::int64_t b = 0; b < index_.n_blocks(); ++b) {
      for (int j = 0; j < index_.shape().head_dim; ++j) {
        for (int p = 0; p < kPlanes; ++p) content.push_back(Word(j, p, b));
        content.push_back(index_.shape().codec == Codec::kPaper
                              ? FloatToHalf(Scale(b, j))
                              : static_cast<std::uint64_t>(Mean(b, j) + 128));
      }
    }
    return content;
  }

 private:
  std::int32_t SegmentBlocks() const { return index_.shape().segment_blocks; }
  int Local(std::int64_t block) const { return static_cast<int>(block % SegmentBlocks()); }
  const SegmentView& View(std::int64_t block) const {
    return index_.segments()[static_cast<std::size_t>(block / SegmentBlocks())];
  }
  const std::uint8_t* Side(std::int64_t block, int channel) const {
    const IndexShape& s = index_.shape();
    return View(block).side + static_cast<std::size_t>(channel) *
                                  layout::SideRowBytes(s.codec, s.mean_bits, s.segment_blocks);
  }

  const HeadIndex& index_;
};

// Mapped keys [n_blocks * 64][D] as the index sees them.
inline std::vector<float> MappedKeys(const std::vector<Half>& rows, std::int64_t n_tokens,
                                     const Basis& basis) {
  const auto dim = static_cast<std::size_t>(basis.dim);
  std::vector<float> keys(static_cast<std::size_t>(n_tokens) * dim), x(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = HalfToFloat(rows[i / dim * 2 * dim + i % dim]);
  }
  basis.MapKeys(keys.data(), n_tokens, x.data());
  return x;
}

}  // namespace fathom::test
