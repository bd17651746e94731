// SPDX-License-Identifier: MIT
#include <cuda_fp16.h>

#include "backend/cuda/check.h"
#include "backend/cuda/follow.cuh"
#include "device/captured.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;

template <typename Word>
__global__ void __launch_bounds__(kThreads) RepeatKernel(RepeatItems a) {
  const int head = static_cast<int>(blockIdx.y);
  const auto words = a.item_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t shift = head / a.n_kv_heads * a.shift;
  const auto* from = reinterpret_cast<const Word*>(a.from) +
                     std::int64_t{head % a.n_kv_heads % a.n_tables} * a.n_rows * a.period * words;
  auto* to = reinterpret_cast<Word*>(a.to[head]);
  const std::int64_t row_words = a.n * words;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < a.n_rows * row_words;
       i += gridDim.x * std::int64_t{kThreads}) {
    const std::int64_t row = i / row_words, item = i % row_words / words, word = i % words;
    const std::int64_t source = (a.first + item + shift) % a.period;
    to[(row * a.to_stride + item) * words + word] = from[(row * a.period + source) * words + word];
  }
}

__global__ void __launch_bounds__(kThreads) MeanKeysKernel(MeanKeys a) {
  const int head = static_cast<int>(blockIdx.y);
  auto* to = reinterpret_cast<Half*>(a.to[head]) + a.first * a.head_dim;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < a.n * a.head_dim;
       i += gridDim.x * std::int64_t{kThreads}) {
    const std::int64_t chunk = i / a.head_dim, j = i % a.head_dim;
    const Half* key = a.rows[head] + chunk * a.chunk * 2 * a.head_dim + j;
    float sum = 0;
    for (int t = 0; t < a.chunk; ++t, key += 2 * a.head_dim) {
      sum += __half2float(__ushort_as_half(*key));
    }
    to[i] = __half_as_ushort(__float2half_rn(sum / static_cast<float>(a.chunk)));
  }
}

__global__ void TakeCapturedKernel(CapturedStep a) {
  Follow();
  const int head = static_cast<int>(blockIdx.x), dim = a.head_dim;
  const int sequence = head / a.n_kv_heads, n_sequences = a.n_heads / a.n_kv_heads;
  const std::int64_t at = (std::int64_t{*a.step} * n_sequences + sequence) % a.n_positions;
  const float* queries =
      a.queries + (at * a.table_heads + head % a.n_kv_heads % a.table_heads) * a.table_group * dim;
  float* q = a.q + std::int64_t{head} * a.group * dim;
  for (int i = static_cast<int>(threadIdx.x); i < a.group * dim;
       i += static_cast<int>(blockDim.x)) {
    q[i] = queries[i / dim % a.table_group * dim + i % dim];
  }
  const Half* row =
      a.recent + (std::int64_t{head} * a.ring + a.positions[sequence] % a.ring) * 2 * dim;
  for (int j = static_cast<int>(threadIdx.x); j < 2 * dim; j += static_cast<int>(blockDim.x)) {
    float* to = j < dim ? a.k + head * dim + j : a.v + head * dim + j - dim;
    *to = __half2float(__ushort_as_half(row[j]));
  }
}

__global__ void CountStepKernel(std::int32_t* step) {
  Follow();
  if (threadIdx.x == 0) ++*step;
}

dim3 GridFor(std::int64_t items, std::int32_t n_heads) {
  const std::int64_t blocks = (items + kThreads - 1) / kThreads;
  return {static_cast<unsigned>(blocks < 2048 ? blocks : 2048), static_cast<unsigned>(n_heads)};
}

}  // namespace

void Repeat(const RepeatItems& args, cudaStream_t stream) {
  if (args.n <= 0 || args.n_heads == 0 || args.n_rows == 0) return;
  const std::int64_t bytes = args.n * args.n_rows * args.item_bytes;
  if (args.item_bytes % 16 == 0) {
    RepeatKernel<uint4><<<GridFor(bytes / 16, args.n_heads), kThreads, 0, stream>>>(args);
  } else {
    RepeatKernel<std::uint16_t><<<GridFor(bytes / 2, args.n_heads), kThreads, 0, stream>>>(args);
  }
  CheckLaunch("Repeat");
}

void FillMeanKeys(const MeanKeys& args, cudaStream_t stream) {
  if (args.n <= 0 || args.n_heads == 0) return;
  MeanKeysKernel<<<GridFor(args.n * args.head_dim, args.n_heads), kThreads, 0, stream>>>(args);
  CheckLaunch("FillMeanKeys");
}

void TakeCaptured(const CapturedStep& args, cudaStream_t stream) {
  if (args.n_heads == 0) return;
  LaunchFollower("TakeCaptured", TakeCapturedKernel, static_cast<unsigned>(args.n_heads), kThreads,
                 0, stream, args);
}

void CountStep(std::int32_t* step, cudaStream_t stream) {
  LaunchFollower("CountStep", CountStepKernel, 1, 32, 0, stream, step);
}

}  // namespace fathom::cuda
