// SPDX-License-Identifier: MIT
// Attention of one query position over chosen rows: gather, partial attention of splits, merge.
// Launch functions record kernels on a stream: no allocation, no host synchronization, no launch
// for empty work. Errors of the launch are thrown (check.h). Every pointer is device memory, or
// host memory mapped for the device where it holds rows, aligned to 16 bytes, and borrowed until
// the kernels have run. head_dim is a multiple of 16 up to kMaxHeadDim, group at most kMaxGroup.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

// Rows that stay in device memory: the sinks, and a ring of the last tokens.
struct Resident {
  const Half* sinks;                 // [n_heads][kSinks][2][D]; null: nothing is resident
  const Half* recent;                // [n_heads][ring][2][D], token i at slot i % ring
  std::int32_t ring;                 // > 0 where sinks is not null
  const std::int32_t* recent_first;  // [n_sequences] tokens >= this are in the ring
};

// Where the row of a token, key then value, lies.
struct RowSource {
  const Half* const* rows;          // [n_heads] token i at rows[head] + i * 2 * D
  const std::int32_t* row_modulus;  // null, or [1]: token i's row is i % modulus (folded rows)
  Resident resident;                // goes first
};

// Copies the rows of attended tokens to out, in the order of the list. Heads with count < 0 attend
// all tokens and are not copied; of a list longer than its capacity, what fits.
struct GatherRows {
  std::int32_t head_dim;
  std::int32_t n_heads;
  std::int32_t n_kv_heads;
  RowSource source;
  Attended attended;
  Half* out;  // [n_heads][capacity][2][D]
};
void Gather(const GatherRows& args, cudaStream_t stream);

// Attention of a list over a part of its rows: sums of exp relative to exp(top).
struct alignas(16) PartState {
  float top;    // largest scaled score; -inf where there is none
  float sum;    // of exp; 0: the part is empty and its `out` is not written
  float light;  // of exp of rows whose value was not read
  float unused;
};

constexpr std::int32_t kMaxSplits = 256;

// Splits that keep a device of 132 multiprocessors busy with up to n_rows rows a head.
inline std::int32_t AttendSplits(std::int32_t n_heads, std::int64_t n_rows) {
  const std::int64_t useful = (n_rows + 63) / 64;
  const std::int64_t wanted = n_heads > 0 ? (264 + n_heads - 1) / n_heads : 1;
  const std::int64_t n = useful < wanted ? useful : wanted;
  return static_cast<std::int32_t>(n < 1 ? 1 : n < kMaxSplits ? n : kMaxSplits);
}

// Softmax attention of every list over its rows, left in parts for Merge. Each row is read once for
// all heads of the group; one that no head of its mask attends does not matter, whatever it holds.
// Results depend on n_splits in their rounding, on nothing else.
struct AttendRows {
  std::int32_t head_dim;
  std::int32_t group;
  std::int32_t n_heads;
  std::int32_t n_kv_heads;
  float scale;             // > 0
  const Half* staged;      // [n_heads][capacity][2][D] of Gather; null: rows are read in place
  RowSource source;        // rows in place, also those of heads that attend all tokens
  Attended attended;       // count null, or count[head] < 0: all query heads attend all tokens.
                           // tokens may be null where staged is not and no head attends all
  const Lengths* lengths;  // [n_sequences] n_tokens of heads that attend all; else may be null
  const float* q;          // [n_lists][D]
  const float* limit;      // [n_lists] rows with a scaled score below are light: their values are
                           // not used. null: no row is light
  std::int32_t* n_values;  // [n_heads] rows that are not light for all are added; null: not wanted
  std::int32_t n_splits;   // 1 .. kMaxSplits
  float* part_out;         // [n_heads][n_splits][group][D] out
  PartState* part;         // [n_heads][n_splits][group] out
};
void Attend(const AttendRows& args, cudaStream_t stream);

// limit[list] = log(least_weight * sum of exp over the rows it attends among the first kSinks and
// the last kWindow listed ones), as in AttendArgs; -inf without any. Lists must be staged.
struct LazyLimits {
  std::int32_t head_dim;
  std::int32_t group;
  std::int32_t n_heads;
  float scale;
  float least_weight;  // > 0
  const Half* staged;  // [n_heads][capacity][2][D]
  Attended attended;   // counts >= 0; tokens may be null
  const float* q;      // [n_lists][D]
  float* limit;        // [n_lists] out
};
void FindLazyLimits(const LazyLimits& args, cudaStream_t stream);

// What the tokens that a list did not attend weigh, measured by its own sum of exp
// (RestScale in backend/rest.h). A rest of 1 is a token with score cut; its true score
// is cut + offset with an error of variance noise.
struct RestMass {
  const float* rest;    // [n_lists][stride] mass of each block, in units of exp(cut), aligned to 16
                        // bytes; null: no rest. Beyond n_blocks it may hold anything
  std::int64_t stride;  // a multiple of 4
  const Lengths* lengths;  // [n_sequences] n_blocks
  const std::int32_t*
      count;            // [n_heads] of Attended: heads with count < 0 have no rest; may be null
  const float* cut;     // [n_lists]
  const float* offset;  // [n_lists]; null: zeros
  const float* noise;   // [n_lists]; null: zeros
  float scale;          // of scores, 1/sqrt(D)
  float least_share;    // of all mass: a block that has more is read by its own mean
  float* unit;          // [n_lists] out: a rest of 1 in units of the list's own sum of exp
  float* mass;          // [n_lists] out: all of the rest in these units
  float* least;         // [n_lists] out: blocks with a larger rest are read, in units of rest
};

// Joins the parts of every list, and measures its rest.
struct MergeParts {
  std::int32_t head_dim;
  std::int32_t group;
  std::int32_t n_heads;
  std::int32_t n_kv_heads;
  std::int32_t n_splits;
  const float* part_out;    // as of AttendRows
  const PartState* part;    // as of AttendRows
  const float* mean_value;  // [n_heads][D] for light rows; null: zeros
  float* out;               // [n_lists][D] out; zeros where nothing is attended
  float* lse;               // [n_lists] out; -inf where nothing is attended
  RestMass rest;
};
void Merge(const MergeParts& args, cudaStream_t stream);

}  // namespace fathom::cuda
