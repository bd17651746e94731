// SPDX-License-Identifier: MIT
#include "capture/layout.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "fathom/error.h"

namespace fathom {
namespace {

std::string FloatText(float value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", static_cast<double>(value));
  return text.data();
}

}  // namespace

std::string CaptureTensorName(std::int32_t layer, const char* part) {
  return "layers." + std::to_string(layer) + "." + part;
}

std::string HeadsFault(const HeadGeometry& heads) {
  if (heads.n_kv_heads < 1 || heads.n_heads < 1 || heads.n_heads % heads.n_kv_heads != 0) {
    return std::to_string(heads.n_heads) + " query heads and " + std::to_string(heads.n_kv_heads) +
           " KV heads; the first must be a positive multiple of the second";
  }
  if (heads.group() > kMaxGroup) {
    return std::to_string(heads.group()) + " query heads per KV head; at most " +
           std::to_string(kMaxGroup) + " are supported";
  }
  if (heads.head_dim < 1 || heads.head_dim > kMaxHeadDim || heads.head_dim % 16 != 0) {
    return "head_dim is " + std::to_string(heads.head_dim) +
           "; it must be a multiple of 16 up to " + std::to_string(kMaxHeadDim);
  }
  return "";
}

std::string PositionsFault(const char* part, std::span<const std::int64_t> positions,
                           std::int64_t end, const std::string& end_text) {
  const auto at = [&](std::size_t i) {
    return std::string(part) + "[" + std::to_string(i) + "] is " + std::to_string(positions[i]);
  };
  if (positions.empty()) return std::string(part) + " is empty; at least one position is needed";
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0) return at(i) + "; it must be at least 0";
    if (i > 0 && positions[i] <= positions[i - 1]) {
      return at(i) + ", after " + std::to_string(positions[i - 1]) + "; positions must ascend";
    }
    if (positions[i] >= end) return at(i) + "; it must be below " + std::to_string(end) + end_text;
  }
  return "";
}

std::string AllPositionsFault(const CaptureGeometry& geometry) {
  std::string fault =
      PositionsFault("q_positions", geometry.q_positions, geometry.n_tokens, ", the tokens");
  if (!fault.empty()) return fault;
  return PositionsFault("q_stats_positions", geometry.stats_positions, geometry.q_positions.front(),
                        ", the first of q_positions");
}

void CheckCaptureValues(const std::string& path, const CaptureValues& v, float limit) {
  // A comparison with NaN is false.
  const auto unfit = std::find_if(v.values.begin(), v.values.end(),
                                  [limit](float x) { return !(std::fabs(x) <= limit); });
  if (unfit == v.values.end()) return;
  const std::int64_t index = unfit - v.values.begin();
  const std::int64_t entry = index / (std::int64_t{v.n_heads} * v.head_dim);
  const std::int64_t position =
      v.positions.empty() ? v.first + entry : v.positions[static_cast<std::size_t>(entry)];
  throw Error(
      ErrorCode::kCorrupt,
      path + ": layer " + std::to_string(v.layer) + ": " + CaptureTensorName(v.layer, v.part) +
          ", head " + std::to_string(index / v.head_dim % v.n_heads) + ", position " +
          std::to_string(position) + ", channel " + std::to_string(index % v.head_dim) + " is " +
          FloatText(*unfit) + "; values must be finite and at most " + FloatText(limit));
}

}  // namespace fathom
