// SPDX-License-Identifier: MIT
// Label scan: scores of all tokens from packed codes of a few channels, as Backend::ScanLabels
// defines them and bit for bit, of all heads of a batch in one launch.
//
// With ScoreSink::scores the scores are written; without, the scan is a filter: only tokens in
// [first, last) with score >= least go to the candidates, and all others leave no trace. Both run
// the same kernel. `least` may be -inf; with +inf or NaN there are no candidates.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"
#include "fathom/types.h"

namespace fathom::cuda {

// Blocks of one head that lie together. Codes lie as layout::TokenLabel or ChannelLabel say, with
// segment_blocks = row_blocks. Of codes only blocks in use are read, of scales whole tiles of 16
// blocks, of which those beyond n_blocks may hold anything. Both pointers are aligned to 16 bytes.
struct LabelPiece {
  const std::uint8_t* codes;
  const Half* scales;       // [channel row][row_blocks]
  std::int32_t row_blocks;  // capacity in blocks of a channel's row, a multiple of 16
  std::int32_t n_blocks;    // in use; may be 0
  // Index in the sequence of the first block: its tokens are first_block * 64 ... A multiple of 16
  // where the sink takes a sample (tile_step > 1).
  std::int32_t first_block;
  std::int32_t head;  // sequence * n_kv_heads + kv_head
};

struct LabelScan {
  LabelLayout layout;
  std::int32_t planes;  // t, 1 .. 4; 3 or 4 for kChannels
  std::int32_t group;   // 1 .. kMaxGroup
  std::int32_t n_kv_heads;
  const LabelPiece* pieces;  // [n_pieces] in device memory
  std::int32_t n_pieces;
  std::int32_t max_tiles;        // most tiles (16 blocks) that a piece has or may grow to
  std::int32_t n_channels;       // C, 0 .. kMaxHeadDim
  const std::int32_t* channels;  // kChannels: [n_heads][C] rows in codes and scales of the channels
                                 // read; null: rows 0 .. C - 1
  const float* q;                // [n_heads][group][C]
  const Lengths* lengths;        // [n_sequences]; only first and last are read, and neither where
                                 // all scores are written: then it may be null
  ScoreSink sink;
};

// Launches the scan on the stream; no allocation, no wait. Nothing is launched without pieces.
// Throws Error when CUDA refuses.
void ScanLabels(const LabelScan& scan, cudaStream_t stream);

}  // namespace fathom::cuda
