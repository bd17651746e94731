// SPDX-License-Identifier: MIT
// What PrefillKernel does with a tile of tokens; see there. Threads are those of mma.m16n8k16: of
// the 16 rows of a warp, lane 4g + t holds rows g and g + 8, and of every eight columns 2t, 2t + 1.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <limits>

#include "backend/cuda/mma.cuh"
#include "backend/cuda/prefill.h"

namespace fathom::cuda::prefill {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16 * kWarps;
constexpr unsigned kAll = 0xFFFFFFFFU;  // lanes of a warp
constexpr float kLog2E = 1.44269504F;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
// Weights are at most 2^12, so that those down to 2^-26 of the largest are normal halves, and
// rounding of the largest score leaves them finite.
constexpr float kTopWeight = 12;

// kDim: channels, padded with zeros.
template <int kDim>
struct Tile {
  static constexpr int kTokens = kDim > 128 ? 32 : 64;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, in a row
  static constexpr int kHalves = kTokens * kDim;
  static constexpr int kBytes = (2 * kRows * kDim + 4 * kHalves) * 2;
  static constexpr int kLanes = kDim <= 64 ? 16 : 32;  // that copy a token
};

// Chunks of a row are permuted by its number, so that eight rows' chunks of the same number, which
// ldmatrix reads together, lie in different banks. Only row % 8 matters.
template <int kDim>
__device__ inline int Permutation(int row) {
  return Tile<kDim>::kChunks % 8 == 0 ? row & 7 : row >> 1 & 3;
}
// In halves.
template <int kDim>
__device__ inline int Place(int row, int chunk) {
  return (row * Tile<kDim>::kChunks + (chunk ^ Permutation<kDim>(row))) * 8;
}

__device__ inline void Mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                           std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void LoadMatrix(std::uint32_t (&r)[4], const Half* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
}
__device__ inline void LoadTransposed(std::uint32_t (&r)[4], const Half* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
}
// 16 bytes, or zeros.
__device__ inline void CopyAsync(Half* to, const Half* from, bool zeros) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(zeros ? 0 : 16)
               : "memory");
}
__device__ inline void WaitCopies() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

__device__ inline bool IsBad(Half h) { return (h & 0x7C00) == 0x7C00; }
__device__ inline float Single(Half h) { return __half2float(__ushort_as_half(h)); }
__device__ inline Half Halved(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ inline std::uint32_t Pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// What a block works on.
struct Work {
  const Half* rows;  // of the KV head
  int head_dim;
  int group;
  int first_row;  // of n_rows
  int n_rows;
  int first;  // position of the chunk's first query
  int last;   // last token any row sees
  int kv_head;
};

// Where row i of all lies in q and out.
__device__ inline std::int64_t RowAt(const PrefillAttention& a, const Work& work, int i) {
  const int t = i / work.group;
  const int head = work.kv_head * work.group + i - t * work.group;
  return (static_cast<std::int64_t>(t) * a.geometry.n_heads + head) * work.head_dim;
}

// fn(token of the tile, chunk of its row) for all 16-byte pieces of a tile that this thread copies;
// chunks of the value follow those of the key.
template <int kDim, typename Fn>
__device__ inline void ForPieces(int head_dim, const Fn& fn) {
  constexpr int kLanes = Tile<kDim>::kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll 4
  for (int u = 0; u < Tile<kDim>::kTokens; u += kThreads / kLanes) {
    const int j = u + static_cast<int>(threadIdx.x) / kLanes;
#pragma unroll
    for (int c = lane; c < kDim / 4; c += kLanes) {
      if (c * 4 < head_dim) fn(j, c);
    }
  }
}

// Where piece c of token j goes. keys: those of a tile, values follow.
template <int kDim>
__device__ inline Half* PieceAt(Half* keys, int head_dim, int j, int c) {
  const int chunk = c * 8 < head_dim ? c : c - head_dim / 8;
  return keys + (c * 8 < head_dim ? 0 : Tile<kDim>::kHalves) + Place<kDim>(j, chunk);
}

template <int kDim>
__device__ inline void LoadTile(const Work& work, int tile, Half* keys) {
  ForPieces<kDim>(work.head_dim, [&](int j, int c) {
    const int token = tile * Tile<kDim>::kTokens + j;
    const std::int64_t from = static_cast<std::int64_t>(min(token, work.last)) * 2 * work.head_dim;
    CopyAsync(PieceAt<kDim>(keys, work.head_dim, j, c), work.rows + from + c * 8,
              token > work.last);
  });
}

// Whether a piece that this thread has copied holds inf or NaN: then 0 times it is NaN.
template <int kDim>
__device__ inline bool HasBad(int head_dim, Half* keys) {
  const __half2 zero = __float2half2_rn(0);
  __half2 sum = zero;
  ForPieces<kDim>(head_dim, [&](int j, int c) {
    const uint4 piece = *reinterpret_cast<const uint4*>(PieceAt<kDim>(keys, head_dim, j, c));
    const std::uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = __hfma2(*reinterpret_cast<const __half2*>(&word[i]), zero, sum);
    }
  });
  return __hisnan(__low2half(sum)) || __hisnan(__high2half(sum));
}

// Marks the tokens of a tile: bit 0 for a bad key, bit 1 for a bad value, whose bad channels become
// zeros. Between barriers.
template <int kDim>
__device__ inline void MarkBad(int head_dim, Half* keys, unsigned char* bad) {
  const auto j = static_cast<int>(threadIdx.x);
  if (j >= Tile<kDim>::kTokens) return;
  unsigned mark = 0;
#pragma unroll 1
  for (int d = 0; d < head_dim; ++d) {
    const int at = Place<kDim>(j, d / 8) + d % 8;
    if (IsBad(keys[at])) mark |= 1;
    if (!IsBad(keys[Tile<kDim>::kHalves + at])) continue;
    keys[Tile<kDim>::kHalves + at] = 0;
    mark |= 2;
  }
  bad[j] = static_cast<unsigned char>(mark);
}

// A warp splits its 16 queries into halves: q = (high + low) * 2^-k. row_scale: what scores of the
// halves are multiplied by, log2(e) included.
template <int kDim>
__device__ inline void SplitQueries(const PrefillAttention& a, const Work& work, Half* high,
                                    Half* low, float* row_scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int row = warp * 16; row < warp * 16 + 16; ++row) {
    const int i = work.first_row + row;
    const float* q = a.q + RowAt(a, work, i);
    float x[kDim / 32];
    float most = 0;
#pragma unroll
    for (int u = 0; u < kDim / 32; ++u) {
      const int d = lane + u * 32;
      x[u] = i < work.n_rows && d < work.head_dim ? q[d] : 0;
      if (isfinite(x[u])) most = fmaxf(most, fabsf(x[u]));
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, d));
    // The largest comes to [2^14, 2^15), unless it is so small that the power leaves the range.
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
    const int k = min(14 - exponent, 126);
    const float up = __uint_as_float(static_cast<unsigned>(k + 127) << 23);
#pragma unroll
    for (int u = 0; u < kDim / 32; ++u) {
      const int d = lane + u * 32;
      const float scaled = x[u] * up;
      const Half h = Halved(scaled);
      const int at = Place<kDim>(row, d / 8) + d % 8;
      high[at] = h;
      low[at] = IsBad(h) ? 0 : Halved(scaled - Single(h));
    }
    if (lane == 0) {
      row_scale[row] = a.scale * kLog2E * __uint_as_float(static_cast<unsigned>(127 - k) << 23);
    }
  }
}

// Products of a warp's queries and the keys of a tile; score: eight tokens each, as mma leaves
// them.
template <int kDim>
__device__ inline void ScoreTile(const Half* high, const Half* low, const Half* keys,
                                 float (&score)[Tile<kDim>::kTokens / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane % 16;
  const int token = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < Tile<kDim>::kTokens / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) score[i][e] = 0;
  }
#pragma unroll 2  // all of it would hold addresses in registers that totals need
  for (int c = 0; c < Tile<kDim>::kChunks; c += 2) {
    std::uint32_t of_high[4], of_low[4];
    LoadMatrix(of_high, high + Place<kDim>(row, c + lane / 16));
    LoadMatrix(of_low, low + Place<kDim>(row, c + lane / 16));
#pragma unroll
    for (int i = 0; i < Tile<kDim>::kTokens / 16; ++i) {
      std::uint32_t key[4];
      LoadMatrix(key, keys + Place<kDim>(i * 16 + token, c + lane / 8 % 2));
      Mma(score[2 * i], of_low, key[0], key[1]);
      Mma(score[2 * i + 1], of_low, key[2], key[3]);
      Mma(score[2 * i], of_high, key[0], key[1]);
      Mma(score[2 * i + 1], of_high, key[2], key[3]);
    }
  }
}

// What a thread keeps of its two rows, row g and g + 8 of the warp's with g = lane / 4.
struct RowState {
  float scale[2];
  int sees[2];     // last token seen
  float top[2];    // largest score
  float shift[2];  // weights are 2^(score * scale - shift)
  float sum[2];    // of weights, over this thread's tokens
};

// A score without halves and tensor cores, up to a positive factor: it is inf or NaN anyway.
template <int kDim>
__device__ inline float BadScore(const float* q, const Half* keys, int j, int head_dim) {
  float sum = 0;
#pragma unroll 1
  for (int d = 0; d < head_dim; ++d) {
    sum = __fmaf_rn(q[d], Single(keys[Place<kDim>(j, d / 8) + d % 8]), sum);
  }
  return sum;
}

template <int kDim>
__device__ inline void FixScores(const PrefillAttention& a, const Work& work, const Half* keys,
                                 const unsigned char* bad,
                                 float (&score)[Tile<kDim>::kTokens / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll 1
  for (int j = 0; j < Tile<kDim>::kTokens; ++j) {
    if ((bad[j] & 1) == 0) continue;
    float fixed[2];
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const float* q = a.q + RowAt(a, work, min(work.first_row + row + r * 8, work.n_rows - 1));
      (r == 0 ? fixed[0] : fixed[1]) = BadScore<kDim>(q, keys, j, work.head_dim);
    }
    if (j % 8 / 2 != lane % 4) continue;  // another lane's
#pragma unroll
    for (int i = 0; i < Tile<kDim>::kTokens / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i * 8 + e % 2 == j - lane % 4 * 2) score[i][e] = fixed[e / 2];
      }
    }
  }
}

// Scores to weights, in place; back: what totals so far are multiplied by.
template <int kScores>
__device__ inline void Softmax(RowState* state, float (&score)[kScores][4], float (&back)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = state->top[r];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      top = fmaxf(top, fmaxf(score[i][2 * r], score[i][2 * r + 1]));  // passes over NaN
    }
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
    const float shift = (top == kNothing ? 0 : top * state->scale[r]) - kTopWeight;
    back[r] = state->top[r] == kNothing ? 0 : Exp2(state->shift[r] - shift);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        score[i][e] = Exp2(__fmaf_rn(score[i][e], state->scale[r], -shift));
        sum += score[i][e];
      }
    }
    state->sum[r] = __fmaf_rn(state->sum[r], back[r], sum);
    state->top[r] = top;
    state->shift[r] = shift;
  }
}

// The upper 11 bits of a weight, which make a half; the rest is exact in single precision.
__device__ inline float UpperBits(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xFFFFE000U);
}

// total = total * back + weights * values.
template <int kDim>
__device__ inline void AddValues(const float (&weight)[Tile<kDim>::kTokens / 8][4],
                                 const Half* values, const float (&back)[2],
                                 float (&total)[kDim / 8][4]) {
  constexpr int kSteps = Tile<kDim>::kTokens / 16;
  int lane = static_cast<int>(threadIdx.x) % 32;
  asm volatile("" : "+r"(lane));  // addresses are made anew for every tile: kept, they would spill
  const int token = lane % 16;
  std::uint32_t high[kSteps][4], low[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows g, g + 8, each of tokens 2t and of 8 + 2t
      const float x = weight[2 * k + i / 2][i % 2 * 2], y = weight[2 * k + i / 2][i % 2 * 2 + 1];
      high[k][i] = Pair(UpperBits(x), UpperBits(y));
      low[k][i] = Pair(x - UpperBits(x), y - UpperBits(y));
    }
  }
#pragma unroll
  for (int c = 0; c < Tile<kDim>::kChunks; c += 2) {
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      std::uint32_t value[4];
      LoadTransposed(value, values + Place<kDim>(k * 16 + token, c + lane / 16));
      Mma(sum[0], low[k], value[0], value[1]);
      Mma(sum[1], low[k], value[2], value[3]);
      Mma(sum[0], high[k], value[0], value[1]);
      Mma(sum[1], high[k], value[2], value[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[c + i][e] = __fmaf_rn(total[c + i][e], back[e / 2], sum[i][e]);
      }
    }
  }
}

// Adds the bad channels of values to the rows that see them: a positive weight leaves inf and NaN
// as they are.
template <int kDim>
__device__ inline void AddBadValues(const Work& work, const RowState& state, int first_token,
                                    const unsigned char* bad, float (&total)[kDim / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int j = 0; j < Tile<kDim>::kTokens; ++j) {
    const int token = first_token + j;
    if ((bad[j] & 2) == 0 || token > work.last) continue;
    const Half* value = work.rows + (static_cast<std::int64_t>(token) * 2 + 1) * work.head_dim;
#pragma unroll
    for (int c = 0; c < kDim / 8; ++c) {
      if (c * 8 >= work.head_dim) continue;
      const auto pair = *reinterpret_cast<const std::uint32_t*>(value + c * 8 + lane % 4 * 2);
      const auto low = static_cast<Half>(pair), high = static_cast<Half>(pair >> 16);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (token > state.sees[r]) continue;
        if (IsBad(low)) total[c][2 * r] += Single(low);
        if (IsBad(high)) total[c][2 * r + 1] += Single(high);
      }
    }
  }
}

template <int kDim>
__device__ inline void StoreRows(const PrefillAttention& a, const Work& work, const RowState& state,
                                 const float (&total)[kDim / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const int i = work.first_row + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + r * 8;
    if (i >= work.n_rows) continue;
    float* out = a.out + RowAt(a, work, i);
    const float part = 1 / sum;
#pragma unroll
    for (int c = 0; c < kDim / 8; ++c) {
      if (c * 8 >= work.head_dim) continue;
      const float x = sum == 0 ? 0 : total[c][2 * r] * part;
      const float y = sum == 0 ? 0 : total[c][2 * r + 1] * part;
      *reinterpret_cast<float2*>(out + c * 8 + lane % 4 * 2) = make_float2(x, y);
    }
  }
}

}  // namespace fathom::cuda::prefill
