// SPDX-License-Identifier: MIT
// Where every bit of a segment lies. The only place that knows bit positions; docs/format.md is its
// prose.
//
// Planes: 64-bit words [channel][plane][block]. Bit i of a word belongs to token i of the block;
// plane p holds bit (3 - p) of the 4-bit code, so a prefix of planes of a channel is one contiguous
// run where the segment lies by itself. Segments made at once lie between each other's rows:
// [channel][plane][segment][block], see RowSegments. Side data: fp16 scales [channel][block] (paper
// codec); int8 means [channel][block] or packed nibbles, two blocks a byte, the even block in the
// low half, code + 8 (mean codec).
//
// Labels, for the dot products of bytes (Backend::ScanLabels): see LabelPlace; fp16 scales
// [channel][block] as in the paper codec.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fathom/types.h"

namespace fathom::layout {

// row_blocks: words from one row to the next, segment_blocks where the segment lies by itself.
constexpr std::size_t PlaneWord(int channel, int plane, int block, int row_blocks) {
  return (static_cast<std::size_t>(channel) * kPlanes + static_cast<std::size_t>(plane)) *
             static_cast<std::size_t>(row_blocks) +
         static_cast<std::size_t>(block);
}

// How many segments share rows where many are made at once: with sizes that divide 512 blocks, as
// 64 does, a row of them is one page of memory, because a scan reads few rows, and finding where a
// page lies takes as long as reading 512 bytes of it. Segments start at a cache line, so those
// whose size is no multiple of 8 do not share.
constexpr int RowSegments(int segment_blocks) {
  constexpr int kPageWords = 512, kLineWords = 8;
  return segment_blocks % kLineWords == 0 && segment_blocks < kPageWords
             ? kPageWords / segment_blocks
             : 1;
}

constexpr std::size_t PlaneBytes(int head_dim, int segment_blocks) {
  return static_cast<std::size_t>(head_dim) * kPlanes * static_cast<std::size_t>(segment_blocks) *
         sizeof(std::uint64_t);
}

// Bytes of means or scales of one channel of one segment. segment_blocks is even.
constexpr std::size_t SideRowBytes(Codec codec, int mean_bits, int segment_blocks) {
  const auto blocks = static_cast<std::size_t>(segment_blocks);
  if (codec == Codec::kPaper) return blocks * sizeof(Half);
  return mean_bits == 8 ? blocks : blocks / 2;
}

constexpr std::size_t SideBytes(Codec codec, int head_dim, int mean_bits, int segment_blocks) {
  return static_cast<std::size_t>(head_dim) * SideRowBytes(codec, mean_bits, segment_blocks);
}

constexpr int MeanLimit(int mean_bits) { return (1 << (mean_bits - 1)) - 1; }

// Packed 4-bit mean codes, -7..7 stored as 1..15.
constexpr int UnpackNibble(std::uint8_t byte, int block) {
  return ((byte >> ((block & 1) * 4)) & 15) - 8;
}
constexpr std::uint8_t PackNibble(std::uint8_t byte, int block, int code) {
  const int shift = (block & 1) * 4;
  return static_cast<std::uint8_t>((byte & ~(15 << shift)) | ((code + 8) << shift));
}

// Code of a token from its four plane words.
constexpr int Code(std::uint64_t w0, std::uint64_t w1, std::uint64_t w2, std::uint64_t w3,
                   int token) {
  return static_cast<int>(((w0 >> token) & 1) << 3 | ((w1 >> token) & 1) << 2 |
                          ((w2 >> token) & 1) << 1 | ((w3 >> token) & 1));
}

// Bits of a label's code.
constexpr int LabelBits(int planes) { return planes <= 2 ? 2 : 4; }
// Channels in the 4 bytes of a token, which are read together (LabelLayout::kTokens).
constexpr int LabelUnit(int planes) { return 32 / LabelBits(planes); }
// Channels of a table, filled up to whole units.
constexpr int LabelWidth(LabelLayout layout, int planes, int n_channels) {
  const int unit = layout == LabelLayout::kTokens ? LabelUnit(planes) : 1;
  return (n_channels + unit - 1) / unit * unit;
}
// Bytes of the codes of a block in one channel, filled up as above.
constexpr std::size_t LabelBlockBytes(int planes) {
  return static_cast<std::size_t>(kBlockTokens * LabelBits(planes) / 8);
}

// A code is bits shift, shift + 1, ... of a byte.
struct LabelPlace {
  std::size_t byte;
  int shift;
};
// kTokens: [block][unit][token][4 bytes]; the lowest bits of a token's bytes are those of the first
// four channels of the unit, the next bits those of the next four.
constexpr LabelPlace TokenLabel(int planes, int width, int channel, int block, int token) {
  const int unit = LabelUnit(planes);
  const auto row =
      static_cast<std::size_t>(block * (width / unit) + channel / unit) * kBlockTokens +
      static_cast<std::size_t>(token);
  return {row * 4 + static_cast<std::size_t>(channel % 4), channel % unit / 4 * LabelBits(planes)};
}
// kChannels: [channel][block][32 bytes]; tokens 0 .. 31 are in the low halves, 32 .. 63 in the high
// ones. Each 16 bytes hold every other four tokens: interleaving the bytes of four channels inside
// 16 bytes, as the instructions do, leaves the tokens in order.
constexpr LabelPlace ChannelLabel(int segment_blocks, int channel, int block, int token) {
  const auto row = static_cast<std::size_t>(channel) * static_cast<std::size_t>(segment_blocks) +
                   static_cast<std::size_t>(block);
  const int r = token % 32;
  return {row * 32 + static_cast<std::size_t>(r / 4 % 2 * 16 + r / 8 * 4 + r % 4), token / 32 * 4};
}

// 64 planes' bytes and 4 of scales, or 1 or 2 of means, per token at D = 128: the published and our
// stored sizes.
static_assert(PlaneBytes(128, 64) == 64 * 64 * 64);
static_assert(SideBytes(Codec::kPaper, 128, 0, 64) == 4 * 64 * 64);
static_assert(SideBytes(Codec::kMean, 128, 4, 64) == 1 * 64 * 64);
static_assert(SideBytes(Codec::kMean, 128, 8, 64) == 2 * 64 * 64);
static_assert(RowSegments(64) == 8 && RowSegments(4) == 1 && RowSegments(512) == 1);
// A prefix of planes of a segment by itself is one run, and the next channel follows.
static_assert(PlaneWord(0, 1, 0, 64) == PlaneWord(0, 0, 63, 64) + 1);
static_assert(PlaneWord(1, 0, 0, 64) == PlaneWord(0, 3, 63, 64) + 1);
// 16 bytes of codes per token for 32 channels of 4 bits, 32 for 128 of 2.
static_assert(LabelWidth(LabelLayout::kTokens, 4, 32) * LabelBlockBytes(4) == 16 * kBlockTokens);
static_assert(LabelWidth(LabelLayout::kTokens, 2, 128) * LabelBlockBytes(2) == 32 * kBlockTokens);
static_assert(TokenLabel(4, 16, 13, 1, 63).byte == (1 * 2 + 1) * 256 + 63 * 4 + 1);
static_assert(TokenLabel(4, 16, 13, 1, 63).shift == 4 && TokenLabel(2, 16, 13, 1, 63).shift == 6);
static_assert(ChannelLabel(64, 1, 2, 37).byte == (64 + 2) * 32 + 17);
static_assert(UnpackNibble(PackNibble(0x5A, 1, -7), 1) == -7 &&
              UnpackNibble(PackNibble(0x5A, 1, -7), 0) == 2);

}  // namespace fathom::layout
