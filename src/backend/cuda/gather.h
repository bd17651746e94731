// SPDX-License-Identifier: MIT
// Planned runs of an index in host memory, copied to the device by its own threads (zero copy).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

constexpr std::int32_t kMostHeads = 1024;  // of GatherRuns

// Rows of a table that is cut into segments: row r of segment s of a head begins at
// segments[head * max_segments + s] + r * segment_blocks * block_bytes. The i-th listed row of a
// head becomes one run at out + head * head_stride + i * row_stride, its segments one behind the
// other, as long as the sequence's blocks.
struct GatherRuns {
  std::int32_t n_heads, n_kv_heads;
  const std::byte* const* segments;  // [n_heads][max_segments], memory mapped for the device
  std::int32_t max_segments;
  std::int32_t segment_blocks;  // a multiple of 16
  std::int32_t block_bytes;     // of a row, per block; 0 means half a byte
  // Listed rows: the i-th of a head at rows[head * rows_stride + i], n_rows[head * n_rows_stride]
  // of them; null rows: 0, 1, ...
  const std::int16_t* rows;
  std::int64_t rows_stride;
  const std::int32_t* n_rows;
  std::int64_t n_rows_stride;  // in elements of n_rows
  const Lengths* lengths;      // [n_sequences]
  std::byte* out;
  std::int64_t head_stride, row_stride;  // bytes, multiples of 16
};
void Gather(const GatherRuns& gather, cudaStream_t stream);

}  // namespace fathom::cuda
