// SPDX-License-Identifier: MIT
// Which queries of a prefill a session keeps for statistics, and the memory they take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fathom/types.h"

namespace fathom {

// For statistics: evenly spread positions, 256 to 512 of them once the prefill is long enough.
inline constexpr std::int64_t kFirstStride = 4;
inline constexpr std::int64_t kMaxSamples = 512;
// For fitting residual and multiplier: 16 to 32 of them, 8 positions apart, at the end.
inline constexpr std::int64_t kRecentStride = 8;
inline constexpr std::int64_t kRecentSamples = 16;

// Most bytes of all layers, in fp32.
inline std::int64_t QuerySampleBytes(std::int32_t n_layers, const HeadGeometry& heads,
                                     std::int64_t n_tokens) {
  const std::int64_t samples = std::min(kMaxSamples, n_tokens / kFirstStride + 1) +
                               std::min(2 * kRecentSamples, n_tokens / kRecentStride + 1);
  return n_layers * samples * heads.n_heads * heads.head_dim * std::int64_t{sizeof(float)};
}

}  // namespace fathom
