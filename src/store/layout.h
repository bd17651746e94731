// SPDX-License-Identifier: MIT
// Where every bit of a segment lies. The only place that knows bit positions; docs/format.md is its
// prose.
//
// Planes: 64-bit words [channel][plane][block]. Bit i of a word belongs to token i of the block;
// plane p holds bit (3 - p) of the 4-bit code, so a prefix of planes of a channel is one contiguous
// run. Side data: fp16 scales [channel][block] (paper codec); int8 means [channel][block] or packed
// nibbles, two blocks a byte, the even block in the low half, code + 8 (mean codec).
#pragma once

#include <cstddef>
#include <cstdint>

#include "fathom/types.h"

namespace fathom::layout {

constexpr std::size_t PlaneWord(int channel, int plane, int block, int segment_blocks) {
  return (static_cast<std::size_t>(channel) * kPlanes + static_cast<std::size_t>(plane)) *
             static_cast<std::size_t>(segment_blocks) +
         static_cast<std::size_t>(block);
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

// 64 planes' bytes and 4 of scales, or 1 or 2 of means, per token at D = 128: the published and our
// stored sizes.
static_assert(PlaneBytes(128, 64) == 64 * 64 * 64);
static_assert(SideBytes(Codec::kPaper, 128, 0, 64) == 4 * 64 * 64);
static_assert(SideBytes(Codec::kMean, 128, 4, 64) == 1 * 64 * 64);
static_assert(SideBytes(Codec::kMean, 128, 8, 64) == 2 * 64 * 64);
// A prefix of planes is one run, and the next channel follows.
static_assert(PlaneWord(0, 1, 0, 64) == PlaneWord(0, 0, 63, 64) + 1);
static_assert(PlaneWord(1, 0, 0, 64) == PlaneWord(0, 3, 63, 64) + 1);
static_assert(UnpackNibble(PackNibble(0x5A, 1, -7), 1) == -7 &&
              UnpackNibble(PackNibble(0x5A, 1, -7), 0) == 2);

}  // namespace fathom::layout
