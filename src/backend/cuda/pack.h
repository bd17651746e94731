// SPDX-License-Identifier: MIT
// Packing keys into planes and means or scales on the device, bit for bit as PackArgs defines it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fathom/types.h"

namespace fathom::cuda {

// Blocks first_block .. first_block + n_blocks - 1 of every head. What is written may be host
// memory mapped for the device: whole lines of 128 bytes leave where 16 blocks are packed together.
struct PackBlocks {
  Codec codec;
  std::int32_t head_dim, mean_bits;
  std::int32_t n_heads;
  std::int32_t first_block, n_blocks;  // in the destination's rows
  // Keys: either fp32, [n_heads][n_blocks * 64][D], already in the index's basis ..
  const float* x;
  // .. or rows of the row store: token i of the call at rows[head] + i * 2D, of which center
  // [n_heads][D] is subtracted (null: nothing).
  const Half* const* rows;
  const float* center;
  const float* mean_step;        // [n_heads][D] (mean codec)
  const float* range;            // [n_heads][D] (mean codec)
  std::uint64_t* const* planes;  // [n_heads] row r, block b at planes[head] + r * plane_stride + b
  std::int64_t plane_stride;     // words, even; rows are 16-byte aligned
  std::uint8_t* const* side;     // [n_heads] means or scales, row c at side[head] + c * side_stride
  std::int64_t side_stride;      // bytes
};
void Pack(const PackBlocks& pack, cudaStream_t stream);

}  // namespace fathom::cuda
