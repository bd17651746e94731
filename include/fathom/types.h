// SPDX-License-Identifier: MIT
// Shapes and constants that every other header uses, in the words of docs/design.md section 2.
#pragma once

#include <cstdint>

namespace fathom {

inline constexpr int kBlockTokens =
    64;  // tokens per block, the quantization unit: one 64-bit word per plane
inline constexpr int kPlanes = 4;   // bit planes per channel; plane 0 is the most significant
inline constexpr int kSinks = 4;    // first tokens of a sequence, always attended
inline constexpr int kWindow = 32;  // last tokens of a sequence, always attended
inline constexpr int kAlwaysKept = kSinks + kWindow;  // both are counted in k
inline constexpr int kStatsSkip =
    16;  // first tokens left out of key statistics: attention sinks are outliers
inline constexpr int kMaxGroup = 16;  // query heads per KV head that the kernels accept
inline constexpr int kMaxHeadDim =
    256;  // channels per head that the kernels accept; a multiple of 16
inline constexpr int kLevels =
    kPlanes + 2;  // levels of a channel: not read, mean only, mean and 1..4 planes

// IEEE binary16, as raw bits. Rows and block scales are stored in it.
using Half = std::uint16_t;

// n_tokens rounded up to whole blocks.
constexpr std::int64_t WholeBlocks(std::int64_t n_tokens) {
  return (n_tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

// Attention heads of one layer. Valid when n_heads is a multiple of n_kv_heads.
struct HeadGeometry {
  std::int32_t n_heads = 0;
  std::int32_t n_kv_heads = 0;
  std::int32_t head_dim = 0;

  std::int32_t group() const { return n_kv_heads > 0 ? n_heads / n_kv_heads : 0; }
  bool operator==(const HeadGeometry&) const = default;
};

// How the planes of a segment are scaled (docs/format.md).
enum class Codec : std::uint8_t {
  kPaper = 0,  // fp16 maximum per block and channel; planes hold the key itself
  kMean = 1,   // quantized mean per block and channel; planes hold the residual with a frozen step
               // per channel
};

// Where the codes of a label table lie (docs/format.md).
enum class LabelLayout : std::uint8_t {
  kTokens = 0,    // a token's codes together: every query reads all channels
  kChannels = 1,  // a channel's codes together: every query names the channels it reads
};

// The coordinates an index is kept in.
enum class BasisRule : std::uint8_t {
  kRaw = 0,       // keys as they are
  kCentred = 1,   // keys minus their mean
  kKlt = 2,       // centred, in the eigenvectors of the key covariance
  kBalanced = 3,  // centred, keys and queries balanced against each other (design 3.1 point 4)
};
inline constexpr int kBasisRules = 4;

}  // namespace fathom
