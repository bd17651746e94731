// SPDX-License-Identifier: MIT
// The rest of Backend::Rank: what candidates that did not win weigh, block by block,
//   rest[list][b] = sum over tokens of block b that are in [first, last) and no winners of
//                   exp(exp_scale * (score - cut[list])).
// Conventions as in select.h. Lists of dense steps are left as they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

// Turns the sums of a filter scan into the rest. Before: rest[list][b] = sum over tokens of
// [first, last) of min(1, exp(exp_scale * (score - least))), n_blocks of each list; candidates are
// exactly those tokens with score >= least, so each of them was counted as 1. After: the rest, with
// cut = least.
//
// Where the least winner's score lies so far above `least` that exp would leave the range of a
// float (least may be -inf), cut is the least winner's score instead, and tokens that are no
// candidates count 0: they are below e^-40.
//
// Sums of blocks that hold candidates are rounded to multiples of 2^-12, which makes them (below
// 2^12) independent of the order of additions; none is negative.
struct RestOfCandidates {
  Candidates candidates;
  const std::uint64_t* kth_key;  // [n_lists] of Select
  float exp_scale;               // > 0
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;
  const std::int32_t* redo;  // [n_heads] heads with another value than 0 are left as they are;
                             // null: all are done
  float* rest;               // [n_lists][rest_stride] in and out
  std::int64_t rest_stride;
  float* cut;  // [n_lists] out; may be the array that Select wrote
  // It runs beside the gather that is launched before it, which touches none of this.
  bool beside_gather;
};
void CorrectRest(const RestOfCandidates& args, cudaStream_t stream);

// The same from all scores, for those heads that Select(SelectScores) made; cut becomes the least
// winner's score. A score that is not finite makes the rest of its block NaN (unless it is -inf
// below a finite cut); a cut that is not finite may make all of them NaN.
struct RestOfScores {
  const float* scores;           // [n_lists][stride], 16-byte aligned; n_blocks of each are read
  std::int64_t stride;           // a multiple of 4
  const std::uint64_t* kth_key;  // [n_lists] of Select
  float exp_scale;               // > 0
  std::int32_t group, n_kv_heads, n_lists;
  const Lengths* lengths;
  std::int32_t max_blocks;   // >= n_blocks of every sequence: the grid's size
  const std::int32_t* redo;  // [n_heads] heads with 0 are left as they are; null: all are done
  float* rest;               // [n_lists][rest_stride] out, n_blocks of each
  std::int64_t rest_stride;
  float* cut;          // [n_lists] out
  bool beside_gather;  // or beside what itself is beside one
};
void SumRest(const RestOfScores& args, cudaStream_t stream);

}  // namespace fathom::cuda
