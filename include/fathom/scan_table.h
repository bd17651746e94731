// SPDX-License-Identifier: MIT
// Turns a query and a plan into the integers that a scan of the mean codec reads.
//
// Thread-safe for different tables. Arguments are the library's own, so violations are assertions;
// nothing is thrown but std::bad_alloc.
#pragma once

#include <cstdint>

#include "fathom/backend.h"

namespace fathom {

struct ScanTableInput {
  std::int32_t head_dim = 0;  // D
  std::int32_t group = 0;
  std::int32_t mean_bits = 4;
  const float* q = nullptr;             // [group][D] queries in the index's basis
  const std::uint8_t* level = nullptr;  // [D] 0: not read, 1: mean only, 1 + t: mean and t planes
  const float* mean_step = nullptr;     // [D] frozen step of the block means
  const float* weight = nullptr;        // [D][4][4] decoder: weight[t-1][p] of bipolar bit p
};

// Fills *table, reusing its capacity. Per head, in double precision:
//   A = sum over read planes |q w|, M = lim * sum over active channels |q mean_step|,
//   S = min(32000 / A, 2^23 / (16 M)), a zero term left out, S = 1 when both are zero;
//   weight = lround(q w S), mean_weight = lround(16 S q mean_step), scale = 1 / (16 S).
// So partial sums of weights fit int16, and T of ScanTable is below 2^24 in magnitude.
// A head whose q, A or M is not finite gets zero weights and a NaN scale: all its scores are NaN.
void BuildScanTable(const ScanTableInput& input, ScanTable* table);

}  // namespace fathom
