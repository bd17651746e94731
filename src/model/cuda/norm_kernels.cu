// SPDX-License-Identifier: MIT
// The kernels that need a sum over a row or a head: RMS norms, and what becomes of the product with
// the fused query, key and value matrix.
#include <cuda_bf16.h>

#include "backend/cuda/follow.cuh"
#include "model/cuda/dense_kernels.h"

namespace fathom::cuda {
namespace {

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

// The sum over a warp, in every lane; the order of additions is fixed.
__device__ float WarpSum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kWholeWarp, x, offset);
  return x;
}

// The sum over a block, in every thread. Once per kernel: it leaves its scratch in use.
template <int kThreads>
__device__ float BlockSum(float x) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32);
  __shared__ float partial[kWarps];
  const int lane = threadIdx.x % 32;
  x = WarpSum(x);
  if (lane == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  return WarpSum(lane < kWarps ? partial[lane] : 0.0F);
}

__device__ float4 Add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// One block per row, which stays in registers: kHeld pieces of 4 channels per thread, enough of
// them for the width. Every thread writes only channels that it alone has read, so that sum may be
// x.
template <int kThreads, int kHeld>
__global__ void __launch_bounds__(kThreads) NormRows(NormArgs args) {
  Follow();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * args.width;
  const int n_pieces = args.width / 4;
  float4 held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = threadIdx.x + i * kThreads;
    held[i] = {0, 0, 0, 0};
    if (c >= n_pieces) continue;
    held[i] = reinterpret_cast<const float4*>(args.x + at)[c];
    if (args.delta == nullptr) continue;
    float4 delta = reinterpret_cast<const float4*>(args.delta + at)[c];
    if (args.delta_bias != nullptr) {
      delta = Add(delta, reinterpret_cast<const float4*>(args.delta_bias)[c]);
    }
    held[i] = Add(held[i], delta);
  }
  // Asked for before the sum over the row is waited for, where registers allow.
  constexpr bool kHoldsWeight = kHeld <= 4;
  float4 weight[kHoldsWeight ? kHeld : 1];
  if constexpr (kHoldsWeight) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = threadIdx.x + i * kThreads;
      weight[i] = {0, 0, 0, 0};
      if (c < n_pieces) weight[i] = reinterpret_cast<const float4*>(args.weight)[c];
    }
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const float4 s = held[i];
    squares += (s.x * s.x + s.y * s.y) + (s.z * s.z + s.w * s.w);
    const int c = threadIdx.x + i * kThreads;
    if (args.sum != nullptr && c < n_pieces) reinterpret_cast<float4*>(args.sum + at)[c] = s;
  }
  const float mean = BlockSum<kThreads>(squares) / static_cast<float>(args.width);
  const float scale = 1.0F / sqrtf(mean + args.eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c >= n_pieces) continue;
    const float4 s = held[i];
    const float4 w = kHoldsWeight ? weight[kHoldsWeight ? i : 0]
                                  : reinterpret_cast<const float4*>(args.weight)[c];
    const __nv_bfloat162 low = __floats2bfloat162_rn(s.x * scale * w.x, s.y * scale * w.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(s.z * scale * w.z, s.w * scale * w.w);
    uint2 packed;
    packed.x = *reinterpret_cast<const unsigned*>(&low);
    packed.y = *reinterpret_cast<const unsigned*>(&high);
    reinterpret_cast<uint2*>(args.out + at)[c] = packed;
  }
}

constexpr int kQkvWarps = 8;
constexpr int kLanePairs = 4;  // 256 channels / 2 / 32 lanes

// The two channels of pair i: those beyond the rotated ones are neighbours.
__device__ int2 PairChannels(const QkvArgs& args, int i) {
  if (args.neox && i < args.n_pairs) return {i, i + args.n_pairs};
  return {2 * i, 2 * i + 1};
}

// One warp per head and row; lane l has pairs l, l + 32, ...
__global__ void __launch_bounds__(kQkvWarps * 32) SplitQkv(QkvArgs args) {
  Follow();
  const int heads = args.n_heads + 2 * args.n_kv_heads;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kQkvWarps + threadIdx.x / 32;
  if (item >= static_cast<std::int64_t>(args.n) * heads) return;  // the whole warp
  const int lane = threadIdx.x % 32;
  const std::int64_t row = item / heads;
  const int head = static_cast<int>(item - row * heads);
  const int d = args.head_dim;
  const bool is_q = head < args.n_heads;
  const bool is_v = head >= args.n_heads + args.n_kv_heads;
  const float* in = args.qkv + item * d;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + head * d;
  const float* norm = is_v ? nullptr : is_q ? args.q_norm : args.k_norm;
  // All that is read is asked for before the sum over the head is waited for.
  float2 x[kLanePairs], weight[kLanePairs], angle[kLanePairs];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    const int i = lane + 32 * j;
    x[j] = weight[j] = angle[j] = {0, 0};
    if (i >= d / 2) continue;
    const int2 c = PairChannels(args, i);
    x[j] = {in[c.x], in[c.y]};
    if (norm != nullptr) weight[j] = {norm[c.x], norm[c.y]};
    if (!is_v && i < args.n_pairs) angle[j] = args.angles[row * args.n_pairs + i];
    if (bias != nullptr) x[j] = {x[j].x + bias[c.x], x[j].y + bias[c.y]};
    squares += x[j].x * x[j].x + x[j].y * x[j].y;
  }
  float scale = 1;
  if (norm != nullptr) {  // the same for the whole warp
    scale = 1.0F / sqrtf(WarpSum(squares) / static_cast<float>(d) + args.eps);
  }
  float* out = is_q   ? args.q + (row * args.n_heads + head) * d
               : is_v ? args.v + (row * args.n_kv_heads + head - args.n_heads - args.n_kv_heads) * d
                      : args.k + (row * args.n_kv_heads + head - args.n_heads) * d;
#pragma unroll
  for (int j = 0; j < kLanePairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= d / 2) continue;
    const int2 c = PairChannels(args, i);
    float2 y = x[j];
    if (norm != nullptr) y = {y.x * scale * weight[j].x, y.y * scale * weight[j].y};
    if (!is_v && i < args.n_pairs) {
      y = {y.x * angle[j].x - y.y * angle[j].y, y.x * angle[j].y + y.y * angle[j].x};
    }
    out[c.x] = y.x;
    out[c.y] = y.y;
  }
}

template <int kThreads, int kHeld>
void NormWith(const NormArgs& args, cudaStream_t stream) {
  LaunchFollower("NormRows", NormRows<kThreads, kHeld>, static_cast<unsigned>(args.n), kThreads, 0,
                 stream, args);
}

}  // namespace

void LaunchNorm(const NormArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  const int pieces = args.width / 4;
  if (pieces <= 128) return NormWith<128, 1>(args, stream);
  if (pieces <= 256) return NormWith<256, 1>(args, stream);
  if (pieces <= 512) return NormWith<256, 2>(args, stream);
  if (pieces <= 1024) return NormWith<512, 2>(args, stream);
  if (pieces <= 2048) return NormWith<512, 4>(args, stream);
  NormWith<1024, 8>(args, stream);
}

void LaunchQkv(const QkvArgs& args, cudaStream_t stream) {
  if (args.n == 0) return;
  const std::int64_t items =
      static_cast<std::int64_t>(args.n) * (args.n_heads + 2 * args.n_kv_heads);
  const auto blocks = static_cast<unsigned>((items + kQkvWarps - 1) / kQkvWarps);
  LaunchFollower("SplitQkv", SplitQkv, blocks, kQkvWarps * 32, 0, stream, args);
}

}  // namespace fathom::cuda
