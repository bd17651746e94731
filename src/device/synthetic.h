// SPDX-License-Identifier: MIT
// Data to time a step on: keys with channels of unequal strength that drift slowly along the
// tokens, as keys after RoPE do, values, and tables of random codes. Every number is a hash of its
// place and the seed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fathom/types.h"

namespace fathom::cuda {

// Rows first .. first + n - 1 of every head, key and value, at rows[head] + (i - first) * 2D; rows
// may be host memory mapped for the device. Channel j of a key has standard deviation
// sigma[(head % n_kv_heads) * D + j]; a part of it changes slowly, over some 256 tokens.
struct SyntheticRows {
  std::int32_t n_heads, n_kv_heads, head_dim;
  Half* const* rows;  // [n_heads], device array
  std::int64_t first, n;
  const float* sigma;  // [n_kv_heads][D]
  std::uint64_t seed;  // of the layer
};
void FillRows(const SyntheticRows& args, cudaStream_t stream);

// Random bytes; `bytes` a multiple of 16, memory of the device or mapped.
void FillCodes(void* out, std::int64_t bytes, std::uint64_t seed, cudaStream_t stream);
// n halfs: normal with the given deviation, or scales between .5 and 1.5.
void FillNormal(Half* out, std::int64_t n, float deviation, std::uint64_t seed,
                cudaStream_t stream);
void FillScales(Half* out, std::int64_t n, std::uint64_t seed, cudaStream_t stream);

}  // namespace fathom::cuda
