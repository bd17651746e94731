// SPDX-License-Identifier: MIT
// Kernels that make a step's data of a capture: tables that repeat, means of keys, and queries.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "fathom/types.h"

namespace fathom::cuda {

// Items first .. first + n - 1 of every row of every head. Head h is of sequence s = h /
// n_kv_heads; its item i is item (i + s * shift) % period of table (h % n_kv_heads) % n_tables.
struct RepeatItems {
  std::int32_t n_heads, n_kv_heads;
  const std::byte* from;  // [n_tables][n_rows][period] items
  std::int32_t n_tables, n_rows;
  std::int64_t period, shift;
  std::int64_t item_bytes;  // even; addresses are aligned to it, up to 16 bytes
  std::byte* const* to;     // [n_heads] row r, item i at to[head] + (r * to_stride + i - first)
                            // items; of the device or mapped
  std::int64_t to_stride;   // items
  std::int64_t first, n;
};
void Repeat(const RepeatItems& args, cudaStream_t stream);

// Mean keys of `chunk` tokens each, added up in the order of the tokens.
struct MeanKeys {
  std::int32_t n_heads, head_dim, chunk;
  const Half* const* rows;  // [n_heads] the first token's
  std::byte* const* to;     // [n_heads] fp16, the mean of chunk c at to[head] + (first + c) * 2D
  std::int64_t first, n;    // chunks
};
void FillMeanKeys(const MeanKeys& args, cudaStream_t stream);

// Queries of a step from a list of captured positions, and the current tokens' keys and values from
// their rows. Sequence s of step t takes position (t * n_sequences + s) % n_positions; KV head h
// takes those of captured KV head h % table_heads, query head g of its group g % table_group.
struct CapturedStep {
  std::int32_t n_heads, n_kv_heads, group, head_dim;
  const float* queries;  // [n_positions][table_heads][table_group][D]
  std::int32_t n_positions, table_heads, table_group;
  const std::int32_t* step;  // [1] t
  const Half* recent;        // [n_heads][ring][2][D], token i at slot i % ring
  std::int32_t ring;
  const std::int32_t* positions;  // [n_sequences] of the current tokens
  float* q;                       // [n_heads][group][D] out
  float* k;                       // [n_heads][D] out
  float* v;                       // [n_heads][D] out
};
void TakeCaptured(const CapturedStep& args, cudaStream_t stream);
// Adds one to *step.
void CountStep(std::int32_t* step, cudaStream_t stream);

}  // namespace fathom::cuda
