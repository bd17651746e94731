// SPDX-License-Identifier: MIT
// Exact scores: dot products of fp16 keys with the queries of their group, of all heads of a batch
// in one launch; each key is read once for the whole group.
//
// Queries are taken as sums of two fp16 numbers, 22 bits, after scaling each by a power of two, and
// products are summed in single precision by the tensor cores: the error is a few 1e-7 of the sum
// of the products' magnitudes. An infinite key gives an infinite score or, where the query is 0 or
// 2^-39 of its own largest element, NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"
#include "fathom/types.h"

namespace fathom::cuda {

struct RowScores {
  std::int32_t head_dim;  // D, a multiple of 16 up to kMaxHeadDim
  std::int32_t group;     // 1 .. kMaxGroup
  std::int32_t n_kv_heads;
  std::int32_t n_heads;  // of the batch
  // [n_heads] device array; each points to device memory, or to host memory mapped for the device,
  // and is aligned to 16 bytes. May be null where n_keys is 0.
  const Half* const* rows;
  std::int64_t key_stride;     // halfs from key to key, >= D, a multiple of 8
  const std::int32_t* n_keys;  // [n_heads] device; keys 0 .. n_keys - 1 are scored
  std::int32_t max_keys;       // most keys that a head has or may grow to
  const float* q;              // [n_heads][group][D]
  // [n_sequences], first and last in units of keys; nothing else is read. May be null where all
  // scores are written (sink.scores with tile_step 1).
  const Lengths* lengths;
  // Tiles of 1024 keys. A sample has whole tiles: -inf beyond n_keys; with tile_step 1 only the
  // scores of n_keys keys are written.
  ScoreSink sink;
};

// Launches on the stream; no allocation, no wait. Throws Error when CUDA refuses.
void ScoreRows(const RowScores& scores, cudaStream_t stream);

}  // namespace fathom::cuda
