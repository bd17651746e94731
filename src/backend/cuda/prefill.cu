// SPDX-License-Identifier: MIT
// A block takes 64 rows, pairs of a query and a head of the group in that order, and goes over the
// tokens they see, tile by tile: two tiles in shared memory, one under way. Keys and values are
// fp16 as stored. Queries and weights are numbers of single precision, which fp16 would cut to 11
// bits: each is taken as the sum of two halves, after a scaling by a power of two that keeps 22
// bits in range. Products of a tile are summed by themselves and then added to the total in single
// precision, since tensor cores truncate: a long context would drift.
//
// Keys and values with inf or NaN cannot go through tensor cores: 0 * inf would spoil rows that do
// not see the token, and the two halves of a number need not agree on the sign of a product with
// inf. Tiles that hold such are found as they arrive; bad values are zeroed and added apart, scores
// of bad keys are recomputed.
#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/prefill.h"
#include "backend/cuda/prefill_tile.cuh"

namespace fathom::cuda {
namespace {

using namespace prefill;

__device__ inline Work WorkOfBlock(const PrefillAttention& a) {
  Work work;
  work.rows = a.rows[blockIdx.y];
  work.head_dim = a.geometry.head_dim;
  work.group = a.geometry.n_heads / a.geometry.n_kv_heads;
  work.n_rows = static_cast<int>(a.n_queries) * work.group;
  work.first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;  // longest first
  work.kv_head = static_cast<int>(blockIdx.y);
  work.first = static_cast<int>(a.first);
  work.last = work.first + (min(work.first_row + kRows, work.n_rows) - 1) / work.group;
  return work;
}

// Zeros the channels beyond head_dim in both tiles; no copy touches them.
template <int kDim>
__device__ inline void ZeroPadding(int head_dim, Half* tiles) {
  const int padding = Tile<kDim>::kChunks - head_dim / 8;
  for (auto i = static_cast<int>(threadIdx.x); i < 4 * Tile<kDim>::kTokens * padding;
       i += kThreads) {
    const int row = i / padding;  // of keys and values of both tiles
    const int place = Place<kDim>(row, head_dim / 8 + i % padding);
    *reinterpret_cast<uint4*>(tiles + place) = make_uint4(0, 0, 0, 0);
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim > 128 ? 1 : 2)
    PrefillKernel(const __grid_constant__ PrefillAttention a) {
  using T = Tile<kDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float row_scale[kRows];
  __shared__ unsigned char bad[T::kTokens];
  Half* const high = reinterpret_cast<Half*>(memory);
  Half* const low = high + kRows * kDim;
  Half* const tiles = low + kRows * kDim;  // [2][keys, values]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const Work work = WorkOfBlock(a);
  LoadTile<kDim>(work, 0, tiles);
  ZeroPadding<kDim>(work.head_dim, tiles);
  SplitQueries<kDim>(a, work, high, low, row_scale);
  __syncwarp();  // a warp reads only the queries that it wrote

  RowState state;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + lane / 4 + r * 8;
    const int i = min(work.first_row + row, work.n_rows - 1);
    state.scale[r] = row_scale[row];
    state.sees[r] = work.first + i / work.group;
    state.top[r] = kNothing;
    state.shift[r] = 0;
    state.sum[r] = 0;
  }
  const int all_see = work.first + min(work.first_row + warp_row, work.n_rows - 1) / work.group;
  const int any_sees =
      work.first + min(work.first_row + warp_row + 15, work.n_rows - 1) / work.group;
  float total[kDim / 8][4] = {};

  const int n_tiles = work.last / T::kTokens + 1;
  for (int tile = 0; tile < n_tiles; ++tile) {
    Half* const keys = tiles + tile % 2 * 2 * T::kHalves;
    const int first_token = tile * T::kTokens;
    WaitCopies();
    const int has_bad = __syncthreads_or(HasBad<kDim>(work.head_dim, keys) ? 1 : 0);
    // The tile is there, and all are done with the one before.
    if (tile + 1 < n_tiles) LoadTile<kDim>(work, tile + 1, tiles + (tile + 1) % 2 * 2 * T::kHalves);
    if (has_bad != 0) {
      MarkBad<kDim>(work.head_dim, keys, bad);
      __syncthreads();
    }
    if (first_token > any_sees) continue;
    float score[T::kTokens / 8][4], back[2];
    ScoreTile<kDim>(high, low, keys, score);
    if (has_bad != 0) FixScores<kDim>(a, work, keys, bad, score);
    if (first_token + T::kTokens - 1 > all_see) {
#pragma unroll
      for (int i = 0; i < T::kTokens / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = first_token + i * 8 + lane % 4 * 2 + e % 2;
          if (token > state.sees[e / 2]) score[i][e] = kNothing;
        }
      }
    }
    Softmax(&state, score, back);
    AddValues<kDim>(score, keys + T::kHalves, back, total);
    if (has_bad != 0) AddBadValues<kDim>(work, state, first_token, bad, total);
  }
  StoreRows<kDim>(a, work, state, total);
}

template <int kDim>
void Launch(const PrefillAttention& a, cudaStream_t stream) {
  constexpr int kBytes = Tile<kDim>::kBytes;
  Check(cudaFuncSetAttribute(PrefillKernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes),
        "shared memory of PrefillKernel");
  const std::int64_t rows = a.n_queries * a.geometry.group();
  const dim3 grid(static_cast<unsigned>((rows + kRows - 1) / kRows),
                  static_cast<unsigned>(a.geometry.n_kv_heads));
  PrefillKernel<kDim><<<grid, kThreads, kBytes, stream>>>(a);
  CheckLaunch("PrefillKernel");
}

}  // namespace

void Prefill(const PrefillAttention& a, cudaStream_t stream) {
  if (a.n_queries <= 0 || a.geometry.n_kv_heads <= 0) return;
  if (a.geometry.head_dim <= 64) {
    Launch<64>(a, stream);
  } else if (a.geometry.head_dim <= 96) {
    Launch<96>(a, stream);
  } else if (a.geometry.head_dim <= 128) {
    Launch<128>(a, stream);
  } else {
    Launch<256>(a, stream);
  }
}

}  // namespace fathom::cuda
