// SPDX-License-Identifier: MIT
// A step's own key and value become rows, before anything attends to them. Launches as in attend.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fathom/types.h"

namespace fathom::cuda {

// Key and value of each sequence's last token, rounded to nearest even: into the rows themselves,
// and into the memory of the device that holds the recent ones and the sinks (Resident).
struct AppendRow {
  std::int32_t n_heads, n_kv_heads, head_dim;
  const float* k;  // [n_heads][D]
  const float* v;
  const std::int32_t* positions;  // [n_sequences]
  Half* sinks;                    // [n_heads][kSinks][2][D]; null: left alone
  Half* recent;                   // [n_heads][ring][2][D]
  std::int32_t ring;
  Half* const* rows;     // [n_heads], memory mapped for the device
  std::int32_t modulus;  // token i's row is i % modulus; 0: i
};
void Append(const AppendRow& args, cudaStream_t stream);

}  // namespace fathom::cuda
