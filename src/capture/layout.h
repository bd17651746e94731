// SPDX-License-Identifier: MIT
// What reader and writer of captures share: names of tensors and rules of the layout
// (docs/format.md).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "fathom/capture.h"

namespace fathom {

// Keys of the file's metadata.
inline constexpr const char* kCaptureVersionKey = "fathom_capture";
inline constexpr const char* kCaptureVersion = "1";
inline constexpr const char* kModelKey = "model";
inline constexpr const char* kArchitectureKey = "architecture";
inline constexpr const char* kRopeKey = "rope";
inline constexpr const char* kTextKey = "text";
inline constexpr const char* kQkNormKey = "has_qk_norm";
inline constexpr const char* kQkvBiasKey = "has_qkv_bias";

// Largest magnitude of fp16, in which rows are kept.
inline constexpr float kMaxRowValue = 65504.0F;

// "layers.3.k".
std::string CaptureTensorName(std::int32_t layer, const char* part);

// What is wrong, as one line, or empty.
std::string HeadsFault(const HeadGeometry& heads);
// Positions must ascend from 0 and stay below the end; `end_text` says what ends them.
std::string PositionsFault(const char* part, std::span<const std::int64_t> positions,
                           std::int64_t end, const std::string& end_text);
// Both kinds of positions of a geometry.
std::string AllPositionsFault(const CaptureGeometry& geometry);

// Values [n][n_heads][head_dim] of one tensor of one layer.
struct CaptureValues {
  std::int32_t layer = 0;
  const char* part = "";  // "k"
  std::int32_t n_heads = 0;
  std::int32_t head_dim = 0;
  std::span<const float> values;
  // Positions of the n entries: these, or first, first + 1, ... where there are none.
  std::span<const std::int64_t> positions;
  std::int64_t first = 0;
};
// Throws Error(kCorrupt) that names layer, tensor, head and position of the first value that is NaN
// or whose magnitude exceeds the limit.
void CheckCaptureValues(const std::string& path, const CaptureValues& values, float limit);

}  // namespace fathom
