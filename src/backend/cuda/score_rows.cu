// SPDX-License-Identifier: MIT
// A warp takes 64 keys, 32 at a time, and multiplies them as they lie in memory: 16 bytes of a lane
// are 8 channels of one key, and serve as operand a of two products of 16 keys x 16 channels x 8
// columns. The order of channels inside a product is free as long as both operands share it. Four
// query heads take the eight columns: one for the high part of the query and one for the low, so
// that a lane finds both sums of a head and key in its own registers.
#include <cuda_fp16.h>

#include <cmath>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/score_rows.h"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpKeys = 64;
constexpr int kPassKeys = 32;
constexpr int kBlockKeys = kWarps * kWarpKeys;
constexpr int kTileParts = kTileTokens / kBlockKeys;  // thread blocks to a tile
constexpr int kSegment = 32;                          // channels that four lanes load at once
constexpr int kMaxSegments = kMaxHeadDim / kSegment;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Of a thread block's head; kSets: sets of four query heads.
template <int kSets>
struct Queries {
  uint4 part[kSets * kMaxSegments * 32];  // [set][segment][lane]
  float factor[kMaxGroup];                // the power of two that q was multiplied by, or 0 where
  float unit[kMaxGroup];                  // q is not finite; and what undoes it
  float least[kMaxGroup];
};

__device__ inline uint4 Load16(const Half* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// d += a * b, 16 x 8 x 16. Lane 4g + t holds of a (words 0, 2) row g and (1, 3) row g + 8, columns
// 2t, 2t + 1 and 8 more in words 2 and 3; of b column g, the same rows; of d rows g and g + 8,
// columns 2t and 2t + 1.
__device__ inline void MmaHalf(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The largest element of a scaled query lies in [2^14, 2^15).
template <int kSets>
__device__ inline void ScaleQueries(const RowScores& s, int head, Queries<kSets>& out) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int h = warp; h < s.group; h += kWarps) {
    const std::int64_t list = static_cast<std::int64_t>(head) * s.group + h;
    unsigned most = 0;  // bits of magnitudes sort as they do
    for (int c = lane; c < s.head_dim; c += 32) {
      most = max(most, __float_as_uint(s.q[list * s.head_dim + c]) & 0x7FFFFFFFu);
    }
    most = __reduce_max_sync(kAll, most);
    if (lane == 0) {
      const int exponent = max(static_cast<int>(most >> 23) - 127, -100);
      const bool finite = most < 0x7F800000u;
      out.factor[h] = finite ? __uint_as_float(static_cast<unsigned>(141 - exponent) << 23) : 0.0f;
      out.unit[h] = finite ? __uint_as_float(static_cast<unsigned>(exponent + 113) << 23) : 1.0f;
      out.least[h] = s.sink.scores == nullptr ? s.sink.candidates.least[list] : 0.0f;
    }
  }
}

// One of the two parts of an element. A query that is not finite keeps its infinities and NaNs, and
// its other elements only their sign and some size: no score of it is finite.
__device__ inline __half Part(float q, float factor, bool low) {
  if (factor == 0) {
    if (low) return __float2half_rn(0.0f);
    return __float2half_rn(isfinite(q) ? fminf(fmaxf(q, -65504.0f), 65504.0f) : q);
  }
  const float scaled = __fmul_rn(q, factor);
  const __half high = __float2half_rn(scaled);
  return low ? __float2half_rn(__fsub_rn(scaled, __half2float(high))) : high;
}

template <int kSets>
__device__ inline void SplitQueries(const RowScores& s, int head, Queries<kSets>& out) {
  const int segments = (s.head_dim + kSegment - 1) / kSegment;
  for (int i = threadIdx.x; i < kSets * segments * 32; i += kThreads) {
    const int set = i / (segments * 32), segment = i / 32 % segments, lane = i % 32;
    const int column = lane / 4, h = set * 4 + column / 2;
    const int channel = segment * kSegment + lane % 4 * 8;
    __half2 pair[4];
    for (int j = 0; j < 4; ++j) pair[j] = __float2half2_rn(0.0f);
    if (h < s.group && channel < s.head_dim) {
      const float* q = s.q + (static_cast<std::int64_t>(head) * s.group + h) * s.head_dim + channel;
      for (int j = 0; j < 4; ++j) {
        pair[j] = __halves2half2(Part(q[2 * j], out.factor[h], column % 2),
                                 Part(q[2 * j + 1], out.factor[h], column % 2));
      }
    }
    const auto word = [&pair](int j) {
      return static_cast<std::uint32_t>(__half_as_ushort(__low2half(pair[j]))) |
             static_cast<std::uint32_t>(__half_as_ushort(__high2half(pair[j]))) << 16;
    };
    out.part[(set * kMaxSegments + segment) * 32 + lane] =
        make_uint4(word(0), word(1), word(2), word(3));
  }
}

// acc[t][set]: keys g and g + 8 of 16 t .., high and low part. row: the lane's four keys, g + 8 i.
template <int kSets>
__device__ inline void MultiplyKeys(const RowScores& s, const Queries<kSets>& queries,
                                    const Half* const (&row)[4], float (&acc)[2][kSets][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < s.head_dim; first += 2 * kSegment) {
    uint4 x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = first + half * kSegment + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[half][i] = make_uint4(0, 0, 0, 0);
        if (channel < s.head_dim) x[half][i] = Load16(row[i] + channel);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int segment = first / kSegment + half;
      if (segment * kSegment >= s.head_dim) break;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const uint4 b = queries.part[(set * kMaxSegments + segment) * 32 + lane];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const uint4 lo = x[half][2 * t], hi = x[half][2 * t + 1];
          MmaHalf(acc[t][set], lo.x, hi.x, lo.y, hi.y, b.x, b.y);
          MmaHalf(acc[t][set], lo.z, hi.z, lo.w, hi.w, b.z, b.w);
        }
      }
    }
  }
}

template <int kSets>
__global__ void __launch_bounds__(kThreads, kSets == 1 ? 3 : 2)
    RowKernel(const __grid_constant__ RowScores s, int parts) {
  Follow();
  __shared__ Queries<kSets> queries;
  const int head = static_cast<int>(blockIdx.x) / parts;
  const int part = static_cast<int>(blockIdx.x) - head * parts;
  const int n = s.n_keys[head];
  const bool write = s.sink.scores != nullptr;
  const int step = write ? s.sink.tile_step : 1;
  const bool sample = write && step > 1;
  const int slot = part / kTileParts;  // which of the tiles that are taken
  const int tile = slot * step;
  const int key0 = tile * kTileTokens + part % kTileParts * kBlockKeys;
  if (tile * kTileTokens >= n || (key0 >= n && !sample)) return;
  if (write && s.sink.only != nullptr && s.sink.only[head] == 0) return;
  int first = 0, last = n;  // keys that have a score
  if (!write || sample) {
    const Lengths& lengths = s.lengths[head / s.n_kv_heads];
    first = lengths.first;
    last = min(n, lengths.last);
    if (!write && (key0 >= last || key0 + kBlockKeys <= first)) return;
  }
  ScaleQueries(s, head, queries);
  __syncthreads();
  SplitQueries(s, head, queries);
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Half* rows = s.rows[head];
  const std::int64_t list0 = static_cast<std::int64_t>(head) * s.group;
  for (int pass = 0; pass < kWarpKeys / kPassKeys; ++pass) {
    const int base = key0 + warp * kWarpKeys + pass * kPassKeys;
    if (base >= n && !sample) break;
    const Half* row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row[i] = rows + min(base + lane / 4 + 8 * i, n - 1) * s.key_stride;
    }
    float acc[2][kSets][4] = {};
    MultiplyKeys<kSets>(s, queries, row, acc);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int h = set * 4 + lane % 4;
      if (h >= s.group) continue;
      const float unit = queries.unit[h], least = queries.least[h];
      float* out = write ? s.sink.scores + (list0 + h) * s.sink.stride +
                               static_cast<std::int64_t>(slot - tile) * kTileTokens
                         : nullptr;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = base + lane / 4 + 8 * i;
        const float high = acc[i / 2][set][i % 2 * 2], low = acc[i / 2][set][i % 2 * 2 + 1];
        // Where a key is not finite, its product with the low part may be of either sign.
        const float score = __fmul_rn(isfinite(high) ? __fadd_rn(high, low) : high, unit);
        const bool counts = key >= first && key < last;
        if (!write) {
          if (counts && score >= least) AddCandidate(s.sink.candidates, list0 + h, score, key);
        } else if (counts || sample) {
          out[key] = counts ? score : -INFINITY;
        }
      }
    }
  }
}

template <int kSets>
void Launch(const RowScores& scores, int parts, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(scores.n_heads) * static_cast<unsigned>(parts);
  LaunchFollower("RowKernel", RowKernel<kSets>, blocks, kThreads, 0, stream, scores, parts);
}

}  // namespace

void ScoreRows(const RowScores& scores, cudaStream_t stream) {
  if (scores.n_heads <= 0 || scores.max_keys <= 0) return;
  const int step = scores.sink.scores != nullptr ? scores.sink.tile_step : 1;
  const int tiles = (scores.max_keys - 1) / kTileTokens + 1;
  const int parts = ((tiles - 1) / step + 1) * kTileParts;
  if (scores.group <= 4) {
    Launch<1>(scores, parts, stream);
  } else if (scores.group <= 8) {
    Launch<2>(scores, parts, stream);
  } else {
    Launch<4>(scores, parts, stream);
  }
}

}  // namespace fathom::cuda
