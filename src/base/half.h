// SPDX-License-Identifier: MIT
// IEEE binary16 <-> binary32, bit for bit what F16C computes: round to nearest even, subnormals
// kept, NaNs quieted with the upper bits of their payload. The scalar forms work on every machine
// and have no unpredictable branch.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "fathom/types.h"

namespace fathom {

inline float HalfToFloat(Half h) {
  const std::uint32_t sign = (static_cast<std::uint32_t>(h) & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(h) & 0x7FFFu;
  // Normal, inf and NaN: widen the exponent so that 31 becomes 255, then scale back; inf and NaN
  // survive the product.
  const float normal = std::bit_cast<float>((magnitude << 13) + (0xE0u << 23)) * 0x1p-112f;
  // Subnormal: the mantissa as the low bits of 0.5, minus 0.5.
  const float subnormal = std::bit_cast<float>(magnitude | (126u << 23)) - 0.5f;
  const float value = magnitude < 0x0400u ? subnormal : normal;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

inline Half FloatToHalf(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Overflow turns into inf in the first product. Adding a power of two whose last mantissa bit is
  // worth the last bit of the half makes the hardware round; below 2^-14 the last bit of a half is
  // 2^-24, whatever the exponent.
  const float scaled = (std::fabs(f) * 0x1p112f) * 0x1p-110f;
  std::uint32_t exponent = (magnitude << 1) & 0xFF000000u;
  exponent = exponent < 0x71000000u ? 0x71000000u : exponent;
  const float rounded = std::bit_cast<float>((exponent >> 1) + 0x07800000u) + scaled;
  const std::uint32_t r = std::bit_cast<std::uint32_t>(rounded);
  const std::uint32_t number = ((r >> 13) & 0x7C00u) + (r & 0x0FFFu);
  const std::uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x03FFu);
  return static_cast<Half>(sign | (magnitude > 0x7F800000u ? nan : number));
}

// Arrays, by F16C where the machine has it. in, out: [n], may not overlap.
void ConvertHalfToFloat(const Half* in, std::int64_t n, float* out);
void ConvertFloatToHalf(const float* in, std::int64_t n, Half* out);

}  // namespace fathom
