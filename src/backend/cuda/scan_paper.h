// SPDX-License-Identifier: MIT
// Scans of the paper codec on the device: scores in single precision, channels in ascending order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/lists.h"

namespace fathom::cuda {

// As ScanPiece of the mean codec, with fp16 scales instead of means.
struct PaperPiece {
  const std::uint64_t* planes;  // 16-byte aligned; row r, block b at planes[r * plane_stride + b]
  std::int64_t plane_stride;    // words, a multiple of 16
  const Half* scales;           // row c at scales + c * scale_stride
  std::int64_t scale_stride;    // halfs
  std::int32_t n_blocks;
  std::int32_t first_block;
  std::int32_t head;
  // Rows are those of the store (channel * 4 + p; channel), or only what the plan reads, in
  // ascending order.
  bool gathered;
};

struct PaperScan {
  std::int32_t head_dim, group, n_kv_heads;
  const PaperPiece* pieces;
  std::int32_t n_pieces;
  std::int32_t max_tiles;
  // What each head reads, ascending: planes (channel * 4 + p; a prefix of every channel's) and
  // channels.
  const std::int16_t* planes;      // [n_heads][4D]
  const std::int32_t* n_planes;    // [n_heads]
  const std::int16_t* channels;    // [n_heads][D]
  const std::int32_t* n_channels;  // [n_heads]
  const float* q;                  // [n_heads][group][D] in the index's basis
  const Lengths* lengths;
  ScoreSink sink;
};
void ScanPaper(const PaperScan& scan, cudaStream_t stream);

}  // namespace fathom::cuda
