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

// Fills *table, reusing its capacity. Up to 12 planes make one part, up to 48 two, up to 128 four,
// more eight: the more planes share a byte, the coarser each weight is rounded. Plane p of the c-th
// channel that is read goes to part (c + p) mod n_parts. Per head, in double precision:
//   S: the largest found, from 255 / max_r sum over part r of |q w| down, for which the rounded
//      magnitudes of every part sum to 255 or less; weight = round(q w S), here and below half away
//      from zero;
//   u = 2 n_parts / S, what one step of U is worth; M = lim * sum over channels of |q mean_step|;
//   shift: the largest of 15 .. 0 with 2^shift (129 + M / u) <= 2^24 - 2^15; where even 0 is too
//      much, u is raised to M / (2^24 - 2^16) first, and with it the weights are made smaller;
//   scale = u / 2^shift, mean_weight = round(q mean_step / scale),
//   constant = -round(2^shift (W / (2 n_parts) + log2(n_parts) / 4)), W the sum of all |weight|;
//      the last term is what rounding up adds to the averages in the mean.
// Without planes u is M / 128, and 1 where M is 0 too.
// A head whose q, weights or M are not finite gets zeros and a NaN scale: all its scores are NaN.
void BuildScanTable(const ScanTableInput& input, ScanTable* table);

}  // namespace fathom
