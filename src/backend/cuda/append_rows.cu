// SPDX-License-Identifier: MIT
#include <cuda_fp16.h>

#include "backend/cuda/append_rows.h"
#include "backend/cuda/follow.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) AppendKernel(AppendRow a) {
  Follow();
  const int head = static_cast<int>(blockIdx.x);
  const int position = a.positions[head / a.n_kv_heads];
  const int place = a.modulus > 0 ? position % a.modulus : position;
  Half* recent = a.recent + (std::int64_t{head} * a.ring + position % a.ring) * 2 * a.head_dim;
  Half* row = a.rows[head] + std::int64_t{place} * 2 * a.head_dim;
  Half* sink = a.sinks != nullptr && position < kSinks
                   ? a.sinks + (std::int64_t{head} * kSinks + position) * 2 * a.head_dim
                   : nullptr;
  for (int j = static_cast<int>(threadIdx.x); j < 2 * a.head_dim; j += kThreads) {
    const float x = j < a.head_dim ? a.k[head * a.head_dim + j] : a.v[(head - 1) * a.head_dim + j];
    const Half half = __half_as_ushort(__float2half_rn(x));
    recent[j] = half;
    row[j] = half;
    if (sink != nullptr) sink[j] = half;
  }
}

}  // namespace

void Append(const AppendRow& args, cudaStream_t stream) {
  if (args.n_heads == 0) return;
  LaunchFollower("Append", AppendKernel, static_cast<unsigned>(args.n_heads), kThreads, 0, stream,
                 args);
}

}  // namespace fathom::cuda
