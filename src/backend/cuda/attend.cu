// SPDX-License-Identifier: MIT
// A block takes every n_splits-th of one head's tiles of 32 rows. Tiles come through shared memory,
// several of them under way; the keys are scored with the queries in registers, a warp turns the
// scores of a query head into weights, and every thread sums eight channels of the values for all
// heads. A value touches only heads that attend its row, so that rows may hold anything for the
// others.
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/attend.h"
#include "backend/cuda/check.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/rows.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTileRows = 32;

template <int kLanes>
constexpr int kStages = kLanes == 16 ? 2 : 4;

// Bytes from a row to the next in shared memory: 64 bytes beyond a multiple of 128, so that
// two rows that a quarter of a warp reads together lie in different banks.
__host__ __device__ constexpr int RowPitch(int head_dim) {
  const int pieces = head_dim / 4;
  return (pieces % 8 == 4 ? pieces : pieces + 4) * 16;
}

// The rows of one head, as a block sees them.
struct HeadRows {
  const Half* staged;          // null: in place
  const std::int32_t* tokens;  // null: all tokens
  const std::uint16_t* mask;   // null: all heads
  int head;
  int sequence;
  int n;
};

__device__ inline HeadRows RowsOfHead(const AttendRows& a, int head) {
  const int sequence = head / a.n_kv_heads;
  if (a.attended.count == nullptr || a.attended.count[head] < 0) {
    return {nullptr, nullptr, nullptr, head, sequence, a.lengths[sequence].n_tokens};
  }
  const std::int64_t first = static_cast<std::int64_t>(head) * a.attended.capacity;
  return {a.staged == nullptr ? nullptr : a.staged + first * 2 * a.head_dim,
          a.attended.tokens == nullptr ? nullptr : a.attended.tokens + first,
          a.attended.mask + first,
          head,
          sequence,
          min(a.attended.count[head], a.attended.capacity)};
}

// The staged rows of a head, as many as there may be.
__device__ inline HeadRows AllStaged(const AttendRows& a, int head) {
  const std::int64_t first = static_cast<std::int64_t>(head) * a.attended.capacity;
  return {a.staged + first * 2 * a.head_dim, nullptr, nullptr, head, 0, a.attended.capacity};
}

// A warp takes every fourth row of the tile. Rows beyond the last stay as they are: nothing of
// them is used. Loops stay loops: the copies do not wait for each other, and code that is fetched
// for a kernel of few tiles costs more than its branches.
__device__ inline void LoadTile(const AttendRows& a, const HeadRows& rows, int tile,
                                std::uint32_t stage, int pitch) {
  const auto lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pieces = a.head_dim / 4;
  const int first = tile * kTileRows + warp;
  std::uint32_t to = stage + warp * pitch + lane * 16;
  if (rows.staged != nullptr) {
    const Half* row = rows.staged + static_cast<std::int64_t>(first) * 2 * a.head_dim + lane * 8;
#pragma unroll 2
    for (int i = first; i < min(rows.n, (tile + 1) * kTileRows); i += kWarps) {
      for (int c = lane; c < pieces; c += 32) {
        CopyAsync(to + (c - lane) * 16, row + (c - lane) * 8);
      }
      row += kWarps * 2 * a.head_dim;
      to += kWarps * pitch;
    }
    return;
  }
  const HeadSource source = SourceOf(a.source, rows.head, rows.sequence, a.head_dim);
  int token = first + lane * kWarps;  // of the warp's row `lane`
  if (rows.tokens != nullptr) token = token < rows.n ? rows.tokens[token] : 0;
#pragma unroll 1
  for (int u = 0; u < kTileRows / kWarps && first + u * kWarps < rows.n; ++u) {
    const Half* row = RowOf(source, a.head_dim, __shfl_sync(kAll, token, u));
    for (int c = lane; c < pieces; c += 32) CopyAsync(to + (c - lane) * 16, row + c * 8);
    to += kWarps * pitch;
  }
}

// The query heads that attend the row of this lane.
__device__ inline unsigned MaskOfLane(const HeadRows& rows, int tile, unsigned everyone) {
  const int i = tile * kTileRows + static_cast<int>(threadIdx.x) % 32;
  if (i >= rows.n) return 0;
  return rows.mask == nullptr ? everyone : rows.mask[i] & everyone;
}

// What a lane multiplies of four queries: eights of channels lane and lane + kLanes.
struct QueryPart {
  float x[4][2][8];
};

template <int kLanes>
__device__ inline void LoadQuery(const AttendRows& a, int head, int quad, QueryPart* part) {
  const auto lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    const int of_group = quad * 4 + h;
    const float* q = a.q + (static_cast<std::int64_t>(head) * a.group + of_group) * a.head_dim;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int c = lane + u * kLanes;
      float4 low = make_float4(0, 0, 0, 0), high = low;
      if (of_group < a.group && c * 8 < a.head_dim) {
        low = __ldcg(reinterpret_cast<const float4*>(q + c * 8));
        high = __ldcg(reinterpret_cast<const float4*>(q + c * 8 + 4));
      }
      float(&x)[8] = part->x[h][u];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
  }
}

// Sums four numbers each over kLanes lanes; lane l is left with that of number l % 4.
template <int kLanes>
__device__ inline float SumByLane(const float (&x)[4], int lane) {
  const bool upper = (lane & 2) != 0, odd = (lane & 1) != 0;
  float even = upper ? x[2] : x[0], uneven = upper ? x[3] : x[1];
  even += __shfl_xor_sync(kAll, upper ? x[0] : x[2], 2);
  uneven += __shfl_xor_sync(kAll, upper ? x[1] : x[3], 2);
  float sum = odd ? uneven : even;
  sum += __shfl_xor_sync(kAll, odd ? even : uneven, 1);
#pragma unroll
  for (int d = 4; d < kLanes; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
  return sum;
}

// Products of the tile's keys and four queries.
template <int kLanes, int kHeads>
__device__ inline void ScoreTile(const QueryPart& q, int quad, const unsigned char* stage,
                                 int pitch, int head_dim, float (*score)[kHeads]) {
  const auto lane = static_cast<int>(threadIdx.x) % kLanes;
  constexpr int kAtOnce = kThreads / kLanes;
#pragma unroll
  for (int pass = 0; pass < kTileRows / kAtOnce; ++pass) {
    const int row = pass * kAtOnce + static_cast<int>(threadIdx.x) / kLanes;
    float dot[4] = {};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int c = lane + u * kLanes;
      if (c * 8 >= head_dim) continue;
      float key[8];
      Unpack(*reinterpret_cast<const uint4*>(stage + row * pitch + c * 16), key);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 4; ++h) dot[h] = __fmaf_rn(q.x[h][u][j], key[j], dot[h]);
      }
    }
    const float sum = SumByLane<kLanes>(dot, lane);
    if (lane < 4) score[row][quad * 4 + lane] = sum;
  }
}

// Scores to weights relative to the largest so far. Warp w does heads w, w + 4, ..., a lane a row;
// heavy: bit r of a head's word says that the value of row r counts.
template <int kQuads>
__device__ inline void WeighTile(const AttendRows& a, unsigned mask, const float (&limit)[kQuads],
                                 float (*weight)[4 * kQuads], float* correction, unsigned* heavy,
                                 PartState (&state)[kQuads]) {
  const auto row = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int h = j * kWarps + static_cast<int>(threadIdx.x) / 32;
    const bool attends = (mask >> h & 1) != 0;
    const float x = attends ? weight[row][h] * a.scale : kNothing;
    const bool is_heavy = attends && !(x < limit[j]);  // NaN among them
    const float top = fmaxf(state[j].top, WarpMax(x));
    const float shift = top == kNothing ? 0 : top;
    const float p = attends ? Exp(x - shift) : 0;
    // Exactly 1 in most tiles, and for heads beyond the group: then totals stay as they are.
    const float back = top == state[j].top ? 1 : Exp(state[j].top - shift);
    weight[row][h] = p;
    state[j].top = top;
    state[j].sum = __fmaf_rn(state[j].sum, back, WarpSum(p));
    if (a.limit != nullptr) {
      state[j].light = __fmaf_rn(state[j].light, back, WarpSum(is_heavy ? 0 : p));
    }
    const unsigned rows = __ballot_sync(kAll, is_heavy);
    if (row == 0) {
      correction[h] = back;
      heavy[h] = rows;
    }
  }
}

// Threads are groups of 2 * kLanes; a group takes every kGroups-th row, a thread eight channels.
template <int kLanes, int kQuads>
__device__ inline void AddValues(const unsigned char* stage, int pitch, int head_dim,
                                 const float (*weight)[4 * kQuads], const float* correction,
                                 const unsigned* heavy, float (&total)[4 * kQuads][8]) {
  constexpr int kGroups = kThreads / (2 * kLanes);
  const auto c = static_cast<int>(threadIdx.x) % (2 * kLanes);
  const auto group = static_cast<int>(threadIdx.x) / (2 * kLanes);
  if (c * 8 >= head_dim) return;
  unsigned rows[4 * kQuads];
#pragma unroll
  for (int h = 0; h < 4 * kQuads; ++h) {
    rows[h] = heavy[h] >> group;
    const float back = correction[h];
    if (back == 1) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) total[h][j] *= back;
  }
#pragma unroll(kQuads == 1 ? kTileRows / kGroups : 1)
  for (int i = 0; i < kTileRows; i += kGroups) {
    const int r = i + group;
    float value[8];
    Unpack(*reinterpret_cast<const uint4*>(stage + r * pitch + head_dim * 2 + c * 16), value);
#pragma unroll
    for (int h = 0; h < 4 * kQuads; ++h) {
      if ((rows[h] >> i & 1) == 0) continue;
      const float p = weight[r][h];
#pragma unroll
      for (int j = 0; j < 8; ++j) total[h][j] = __fmaf_rn(p, value[j], total[h][j]);
    }
  }
}

// kLanes: lanes that share a key, 16 channels each. kQuads: query heads in fours.
template <int kLanes, int kQuads>
__global__ void __launch_bounds__(kThreads) AttendKernel(const __grid_constant__ AttendRows a) {
  Follow();
  constexpr int kHeads = 4 * kQuads;
  constexpr int kDepth = kStages<kLanes>;
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ __align__(16) float weight[kTileRows][kHeads];
  __shared__ float correction[kHeads];
  __shared__ unsigned heavy[kHeads];
  const auto head = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.x);
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const int pitch = RowPitch(a.head_dim);
  const int stage_bytes = kTileRows * pitch;
  const auto base = static_cast<std::uint32_t>(__cvta_generic_to_shared(stages));
  const unsigned everyone = (1U << a.group) - 1;
  const std::int64_t list = static_cast<std::int64_t>(head) * a.group;
  const std::int64_t part = (static_cast<std::int64_t>(head) * a.n_splits + split) * a.group;

  // The first tile of a list is asked for before it is known how many there are.
  if (a.staged != nullptr) LoadTile(a, AllStaged(a, head), split, base, pitch);
  const HeadRows rows = RowsOfHead(a, head);
  const int tiles = (rows.n + kTileRows - 1) / kTileRows;
  if (a.staged != nullptr && (rows.staged == nullptr || split >= tiles)) {  // not wanted
    CommitCopies();
    WaitCopies<0>();
  }
#pragma unroll 1
  for (int s = 0; s < kDepth - 1; ++s) {
    const int tile = split + s * a.n_splits;
    if (tile < tiles && (s > 0 || rows.staged == nullptr)) {
      LoadTile(a, rows, tile, base + s * stage_bytes, pitch);
    }
    CommitCopies();
  }
  QueryPart q;
  if constexpr (kQuads == 1) LoadQuery<kLanes>(a, head, 0, &q);
  PartState state[kQuads];
  float limit[kQuads];
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int h = j * kWarps + warp;
    state[j] = {kNothing, 0, 0, 0};
    limit[j] = a.limit != nullptr && h < a.group ? a.limit[list + h] : kNothing;
  }
  float total[kHeads][8] = {};
  int n_values = 0;
  unsigned mask = MaskOfLane(rows, split, everyone);
#pragma unroll 1
  for (int tile = split, i = 0; tile < tiles; tile += a.n_splits, ++i) {
    const unsigned char* stage = stages + i % kDepth * stage_bytes;
    const unsigned next_mask = MaskOfLane(rows, tile + a.n_splits, everyone);
    WaitCopies<kDepth - 2>();
    __syncthreads();  // the tile is there, and the one before is done with
    const int ahead = tile + (kDepth - 1) * a.n_splits;
    if (ahead < tiles) {
      LoadTile(a, rows, ahead, base + (i + kDepth - 1) % kDepth * stage_bytes, pitch);
    }
    CommitCopies();
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if constexpr (kQuads > 1) LoadQuery<kLanes>(a, head, quad, &q);
      ScoreTile<kLanes, kHeads>(q, quad, stage, pitch, a.head_dim, weight);
    }
    __syncthreads();
    WeighTile<kQuads>(a, mask, limit, weight, correction, heavy, state);
    __syncthreads();
    AddValues<kLanes, kQuads>(stage, pitch, a.head_dim, weight, correction, heavy, total);
    if (a.n_values != nullptr && threadIdx.x == 0) {
      unsigned any = 0;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) any |= heavy[h];
      n_values += __popc(any);
    }
    mask = next_mask;
  }
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int h = j * kWarps + warp;
    if (threadIdx.x % 32 == 0 && h < a.group) a.part[part + h] = state[j];
  }
  if (split >= tiles) return;
  if (a.n_values != nullptr && threadIdx.x == 0) atomicAdd(a.n_values + head, n_values);
  StoreTotals<kThreads, 2 * kLanes, kHeads>(
      total, a.head_dim, a.group, reinterpret_cast<float*>(stages), a.part_out + part * a.head_dim);
}

template <int kLanes, int kQuads>
void LaunchAttend(const AttendRows& a, cudaStream_t stream) {
  const int bytes = kStages<kLanes> * kTileRows * RowPitch(a.head_dim);
  Check(cudaFuncSetAttribute(AttendKernel<kLanes, kQuads>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "shared memory of AttendKernel");
  const dim3 grid(static_cast<unsigned>(a.n_splits), static_cast<unsigned>(a.n_heads));
  LaunchFollower("AttendKernel", AttendKernel<kLanes, kQuads>, grid, kThreads, bytes, stream, a);
}

template <int kLanes>
void LaunchForGroup(const AttendRows& a, cudaStream_t stream) {
  if (a.group <= 4) return LaunchAttend<kLanes, 1>(a, stream);
  if (a.group <= 8) return LaunchAttend<kLanes, 2>(a, stream);
  LaunchAttend<kLanes, 4>(a, stream);
}

// --- limits of lazy values: a warp per list ------------------------------------------------------

__global__ void __launch_bounds__(32) LazyLimitKernel(const __grid_constant__ LazyLimits a) {
  const auto list = static_cast<int>(blockIdx.x);
  const int head = list / a.group;
  const int n = min(a.attended.count[head], a.attended.capacity);
  const std::int64_t first = static_cast<std::int64_t>(head) * a.attended.capacity;
  const float* q = a.q + static_cast<std::int64_t>(list) * a.head_dim;
  float top = kNothing, sum = 0;
  for (int i = 0; i < n; ++i) {
    if (i >= kSinks && i < n - kWindow) i = n - kWindow;
    if ((a.attended.mask[first + i] >> (list % a.group) & 1) == 0) continue;
    const Half* key = a.staged + (first + i) * 2 * a.head_dim;
    float dot = 0;
    for (auto d = static_cast<int>(threadIdx.x); d < a.head_dim; d += 32) {
      dot = __fmaf_rn(q[d], __half2float(__ushort_as_half(key[d])), dot);
    }
    const float x = WarpSum(dot) * a.scale;
    const float new_top = fmaxf(top, x);
    const float shift = new_top == kNothing ? 0 : new_top;
    sum = __fmaf_rn(sum, Exp(top - shift), Exp(x - shift));
    top = new_top;
  }
  if (threadIdx.x != 0) return;
  a.limit[list] = sum == 0 ? kNothing : top + logf(sum) + logf(a.least_weight);
}

}  // namespace

void Attend(const AttendRows& a, cudaStream_t stream) {
  if (a.n_heads <= 0) return;
  if (a.head_dim <= 64) return LaunchForGroup<4>(a, stream);
  if (a.head_dim <= 128) return LaunchForGroup<8>(a, stream);
  LaunchForGroup<16>(a, stream);
}

void FindLazyLimits(const LazyLimits& a, cudaStream_t stream) {
  if (a.n_heads <= 0) return;
  LazyLimitKernel<<<static_cast<unsigned>(a.n_heads * a.group), 32, 0, stream>>>(a);
  CheckLaunch("LazyLimitKernel");
}

}  // namespace fathom::cuda
