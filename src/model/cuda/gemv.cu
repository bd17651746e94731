// SPDX-License-Identifier: MIT
// Products of a matrix with very few rows: every weight is read once, and only how fast that goes
// matters.
#include "backend/cuda/follow.cuh"
#include "model/cuda/dense_kernels.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kOut = 4;    // rows of w of a block
constexpr int kAhead = 4;  // pieces of a thread that are on their way together

__device__ float Low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float High(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// sum[r][j] += the products of 8 weights of each of kOut rows with 8 numbers of each of kRows.
template <int kRows>
__device__ void MultiplyPiece(const uint4 (&w)[kOut], const uint4 (&x)[kRows],
                              float (&sum)[kOut][kRows]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const auto word = [e](const uint4& v) {
      return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
    };
    float low[kRows];
    float high[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      low[j] = Low(word(x[j]));
      high[j] = High(word(x[j]));
    }
#pragma unroll
    for (int r = 0; r < kOut; ++r) {
      const float w_low = Low(word(w[r]));
      const float w_high = High(word(w[r]));
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        sum[r][j] = __fmaf_rn(w_low, low[j], sum[r][j]);
        sum[r][j] = __fmaf_rn(w_high, high[j], sum[r][j]);
      }
    }
  }
}

// A block has kOut rows of w, of which thread t takes the pieces of 8 weights t, t + kThreads, ...;
// a row is read in runs of 2 KB. Weights are never written, so the first pieces are asked for while
// the kernel before still makes x. Sums are joined within warps, then over them, in a fixed order.
template <int kRows>
__global__ void __launch_bounds__(kThreads) Gemv(GemvArgs args) {
  LetNextBegin();
  const int n_pieces = args.in / 8;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kOut;
  const uint4* w[kOut];
#pragma unroll
  for (int r = 0; r < kOut; ++r) {  // beyond the last row: the last one again, and thrown away
    const std::int64_t row = first + r < args.out ? first + r : args.out - 1;
    w[r] = reinterpret_cast<const uint4*>(args.w) + row * n_pieces;
  }
  const uint4* x = reinterpret_cast<const uint4*>(args.x);
  const auto multiply = [&](const uint4(&w_piece)[kOut], int c, float(&sum)[kOut][kRows]) {
    uint4 x_piece[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) x_piece[j] = x[j * n_pieces + c];
    MultiplyPiece(w_piece, x_piece, sum);
  };
  float sum[kOut][kRows] = {};
  uint4 first_pieces[kAhead][kOut];
  const int tid = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int c = tid + a * kThreads;
#pragma unroll
    for (int r = 0; r < kOut; ++r) {
      first_pieces[a][r] = c < n_pieces ? __ldcs(w[r] + c) : uint4{0, 0, 0, 0};
    }
  }
  WaitForPrevious();
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (tid + a * kThreads < n_pieces) multiply(first_pieces[a], tid + a * kThreads, sum);
  }
#pragma unroll kAhead
  for (int c = tid + kAhead * kThreads; c < n_pieces; c += kThreads) {
    uint4 w_piece[kOut];
#pragma unroll
    for (int r = 0; r < kOut; ++r) w_piece[r] = __ldcs(w[r] + c);
    multiply(w_piece, c, sum);
  }
  __shared__ float partial[kWarps][kOut * kRows];
#pragma unroll
  for (int r = 0; r < kOut; ++r) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      float total = sum[r][j];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFFu, total, offset);
      }
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32][j * kOut + r] = total;
    }
  }
  __syncthreads();
  const int place = threadIdx.x;
  if (place >= kOut * kRows || first + place % kOut >= args.out) return;
  float total = partial[0][place];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += partial[i][place];
  const std::int64_t row = place / kOut;
  args.y[row * args.out + first + place % kOut] = total;
}

template <int kRows>
void GemvWith(const GemvArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((args.out + kOut - 1) / kOut);
  LaunchFollower("Gemv", Gemv<kRows>, blocks, kThreads, 0, stream, args);
}

}  // namespace

void LaunchGemv(const GemvArgs& args, cudaStream_t stream) {
  switch (args.n) {
    case 1:
      return GemvWith<1>(args, stream);
    case 2:
      return GemvWith<2>(args, stream);
    case 3:
      return GemvWith<3>(args, stream);
    case 4:
      return GemvWith<4>(args, stream);
    default:
      return;
  }
}

}  // namespace fathom::cuda
