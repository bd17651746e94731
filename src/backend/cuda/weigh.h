// SPDX-License-Identifier: MIT
// Values by mass, block by block: Backend::Weigh on the device, and the residual it is made for.
// Launches as in attend.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

// Splits that keep a device of 132 multiprocessors busy with up to n_blocks blocks a head.
inline std::int32_t WeighSplits(std::int32_t n_heads, std::int64_t n_blocks) {
  const std::int64_t useful = (n_blocks + 255) / 256;
  const std::int64_t wanted = n_heads > 0 ? (528 + n_heads - 1) / n_heads : 1;
  const std::int64_t n = useful < wanted ? useful : wanted;
  return static_cast<std::int32_t>(n < 1 ? 1 : n);
}

// How the result joins what was attended (AddRest in backend/rest.h):
//   out = (out + factor * unit * weighed) / (1 + factor * mass),
// left alone where factor is 0 or an estimate is not finite. unit null: out is the result itself.
struct AddRest {
  const float* unit;    // [n_lists] of RestMass
  const float* mass;    // [n_lists] of RestMass
  const float* factor;  // [n_lists]
};

// weighed_h = sum over read blocks b of mass_h(b) means(b) + (sum over the other blocks of
// mass_h(b)) * mean. A block is read, for all heads of the group alike, when mass_h(b) > least_h
// for at least one of them; means of other blocks are not touched. Results depend on n_splits in
// their rounding, on nothing else.
struct WeighBlocks {
  std::int32_t head_dim;
  std::int32_t group;
  std::int32_t n_heads;
  std::int32_t n_kv_heads;
  const Half* const* means;  // [n_heads], each [n_blocks][D], aligned to 16 bytes; an entry may be
                             // null: no block of that head is read
  const float* mean;         // [n_heads][D]
  const float* mass;         // [n_lists][stride]
  std::int64_t stride;       // >= n_blocks
  const float* least;        // [n_lists]
  const Lengths* lengths;    // [n_sequences] n_blocks
  std::int32_t n_splits;     // >= 1
  float* part_out;           // [n_heads][n_splits][group][D] scratch
  float* part_other;         // [n_heads][n_splits][group] scratch
  std::int32_t* n_read;      // [n_heads] blocks that were read are added; null: not wanted
  AddRest add;
  float* out;  // [n_lists][D] out
};
void Weigh(const WeighBlocks& args, cudaStream_t stream);

}  // namespace fathom::cuda
