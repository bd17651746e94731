// SPDX-License-Identifier: MIT
// Few blocks have enough mass to be read by their own mean. A block of threads looks at the masses
// of 256 of them, a thread each, lists those that are read, and sums their means, eight channels a
// thread; then one block per list joins the parts. Loads that depend on nothing go first.
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/rows.cuh"
#include "backend/cuda/weigh.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;  // and blocks of a tile
constexpr int kWarps = kThreads / 32;
constexpr int kJoinThreads = 1024;
constexpr int kJoinWarps = kJoinThreads / 32;
constexpr int kHeldSplits = 2;  // of a warp, and of a lane, whose loads go first

// Masses of block `block` by all heads; zeros from n on.
template <int kHeads>
__device__ inline void LoadMasses(const WeighBlocks& a, std::int64_t list, std::int64_t block,
                                  std::int64_t n, float (&mass)[kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    mass[h] = h < a.group && block < n ? __ldcs(a.mass + (list + h) * a.stride + block) : 0;
  }
}

// Lists the blocks of a tile that are read, ascending, with their masses; the others' masses are
// added to `other`. Returns how many there are. All threads; counts: [kWarps].
template <int kHeads>
__device__ inline int ListBlocks(const float (&mass)[kHeads], const float* least, bool may_read,
                                 int group, int* counts, unsigned char* listed,
                                 float (*of_listed)[kHeads], float (&other)[kHeads]) {
  bool read = false;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) read = read || (h < group && mass[h] > least[h]);
  read = read && may_read;
  const unsigned vote = __ballot_sync(kAll, read);
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) counts[warp] = __popc(vote);
  __syncthreads();
  int at = __popc(vote & ((1U << threadIdx.x % 32) - 1)), n = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) at += counts[w];
    n += counts[w];
  }
  if (read) listed[at] = static_cast<unsigned char>(threadIdx.x);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (read) {
      of_listed[at][h] = mass[h];
    } else {
      other[h] += mass[h];
    }
  }
  __syncthreads();
  return n;
}

// Threads are groups of kColumns; a group takes every kGroups-th listed block. means: of the tile's
// first block.
template <int kColumns, int kHeads>
__device__ inline void AddMeans(const Half* means, int head_dim, int n, const unsigned char* listed,
                                const float (*of_listed)[kHeads], float (&total)[kHeads][8]) {
  constexpr int kGroups = kThreads / kColumns;
  const auto c = static_cast<int>(threadIdx.x) % kColumns;
  if (c * 8 >= head_dim) return;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) / kColumns; i < n; i += kGroups) {
    float mean[8];
    Unpack(__ldcs(reinterpret_cast<const uint4*>(means + listed[i] * head_dim + c * 8)), mean);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float m = of_listed[i][h];
#pragma unroll
      for (int j = 0; j < 8; ++j) total[h][j] = __fmaf_rn(m, mean[j], total[h][j]);
    }
  }
}

// Sums of `other` over the threads.
template <int kHeads>
__device__ inline void StoreOther(const float (&other)[kHeads], int group, float (*sums)[kHeads],
                                  float* out) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float sum = other[h];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][h] = sum;
  }
  __syncthreads();
  const auto h = static_cast<int>(threadIdx.x);
  if (h >= group) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += sums[w][h];
  out[h] = sum;
}

// The masses of a tile that are beyond the last block become zeros.
template <int kHeads>
__device__ inline void Mask(bool there, float (&mass)[kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) mass[h] = there ? mass[h] : 0;
}

// kColumns: threads that share a mean, eight channels each. kHeads: query heads, rounded up.
// A block takes every n_splits-th tile.
template <int kColumns, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads == 4 && kColumns <= 16 ? 4 : 1)
    WeighKernel(const __grid_constant__ WeighBlocks a) {
  Follow();
  __shared__ __align__(16) float scratch[4 * kThreads * 8];  // kGroups * 4 * D at most
  __shared__ float least[kHeads], sums[kWarps][kHeads];
  __shared__ int counts[kWarps];
  __shared__ unsigned char listed[kThreads];
  static_assert(sizeof(scratch) >= sizeof(float) * kThreads * kHeads);
  auto* of_listed = reinterpret_cast<float(*)[kHeads]>(scratch);  // until totals are stored
  const auto tid = static_cast<int>(threadIdx.x);
  const auto head = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.x);
  const std::int64_t list = static_cast<std::int64_t>(head) * a.group;
  const std::int64_t part = (static_cast<std::int64_t>(head) * a.n_splits + split) * a.group;
  // Asked for before it is known how many blocks there are.
  float mass[kHeads];
  LoadMasses<kHeads>(a, list, split * static_cast<std::int64_t>(kThreads) + tid, a.stride, mass);
  const int n = a.lengths[head / a.n_kv_heads].n_blocks;
  const Half* means = a.means[head];
  if (tid < a.group) least[tid] = a.least[list + tid];
  const int tiles = (n + kThreads - 1) / kThreads;

  float total[kHeads][8] = {}, other[kHeads] = {};
  int n_read = 0;
  Mask(split < tiles && split * kThreads + tid < n, mass);
  __syncthreads();
#pragma unroll 1
  for (int tile = split; tile < tiles; tile += a.n_splits) {
    const bool may_read = means != nullptr && tile * kThreads + tid < n;
    const int n_listed =
        ListBlocks<kHeads>(mass, least, may_read, a.group, counts, listed, of_listed, other);
    if (tile + a.n_splits < tiles) {
      LoadMasses<kHeads>(a, list, (tile + a.n_splits) * kThreads + tid, n, mass);
    }
    if (n_listed == 0) continue;  // the same for all threads
    n_read += n_listed;
    AddMeans<kColumns, kHeads>(means + static_cast<std::int64_t>(tile) * kThreads * a.head_dim,
                               a.head_dim, n_listed, listed, of_listed, total);
    __syncthreads();  // before the lists are written again
  }
  if (tid == 0 && a.n_read != nullptr && n_read > 0) atomicAdd(a.n_read + head, n_read);
  StoreOther<kHeads>(other, a.group, sums, a.part_other + part);
  float* out = a.part_out + part * a.head_dim;
  if (n_read == 0) {
#pragma unroll 2
    for (int i = tid; i < a.group * a.head_dim; i += kThreads) out[i] = 0;
    return;
  }
  StoreTotals<kThreads, kColumns, kHeads>(total, a.head_dim, a.group, scratch, out);
}

__device__ inline void Add(const float4& x, float4* to) {
  to->x += x.x, to->y += x.y, to->z += x.z, to->w += x.w;
}

// A block per list: a warp takes every 32nd split, a lane kPieces columns of four channels, then a
// thread one channel.
template <int kPieces>
__global__ void __launch_bounds__(kJoinThreads, 1)
    JoinKernel(const __grid_constant__ WeighBlocks a) {
  Follow();
  __shared__ float4 total[kJoinWarps][kMaxHeadDim / 4];
  const auto tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32, warp = tid / 32;
  const auto list = static_cast<int>(blockIdx.x);
  const int head = list / a.group;
  const std::int64_t first =
      static_cast<std::int64_t>(head) * a.n_splits * a.group + list % a.group;
  const auto piece = [&](int split, int p) {
    const int column = lane + p * 32;
    if (split >= a.n_splits || column * 4 >= a.head_dim) return make_float4(0, 0, 0, 0);
    const float* from = a.part_out + (first + split * a.group) * a.head_dim;
    return __ldcg(reinterpret_cast<const float4*>(from) + column);
  };
  float4 sum[kHeldSplits][kPieces];
  float other = 0;
#pragma unroll
  for (int u = 0; u < kHeldSplits; ++u) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) sum[u][p] = piece(u * kJoinWarps + warp, p);
  }
#pragma unroll 2
  for (int s = lane; s < a.n_splits; s += 32) other += a.part_other[first + s * a.group];
  const bool has_channel = tid < a.head_dim;
  float* const out = a.out + static_cast<std::int64_t>(list) * a.head_dim + tid;
  const float mean = has_channel ? a.mean[static_cast<std::int64_t>(head) * a.head_dim + tid] : 0;
  const bool adds = a.add.unit != nullptr;
  const float before = adds && has_channel ? *out : 0;
  const float unit = adds ? a.add.unit[list] : 1;
  const float mass = adds ? a.add.mass[list] : 0, factor = adds ? a.add.factor[list] : 0;

#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int u = 1; u < kHeldSplits; ++u) Add(sum[u][p], &sum[0][p]);
#pragma unroll 1
    for (int s = kHeldSplits * kJoinWarps + warp; s < a.n_splits; s += kJoinWarps) {
      Add(piece(s, p), &sum[0][p]);
    }
    total[warp][lane + p * 32] = sum[0][p];
  }
  other = WarpSum(other);  // the same in every warp
  __syncthreads();
  float weighed = 0;
  if (has_channel) {
#pragma unroll 8
    for (int w = 0; w < kJoinWarps; ++w) weighed += reinterpret_cast<const float*>(total[w])[tid];
    weighed = __fmaf_rn(other, mean, weighed) * unit;
  }
  float weight = 0, share = 1;
  if (adds) {
    weight = 1.0F / (1.0F + factor * mass);
    share = factor * weight;
    const bool usable = factor != 0 && weight > 0 && isfinite(mass) && isfinite(weighed);
    if (__syncthreads_and(usable ? 1 : 0) == 0) return;
  }
  if (has_channel) *out = adds ? before * weight + share * weighed : weighed;
}

template <int kColumns, int kHeads>
void Launch(const WeighBlocks& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.n_splits), static_cast<unsigned>(a.n_heads));
  LaunchFollower("WeighKernel", WeighKernel<kColumns, kHeads>, grid, kThreads, 0, stream, a);
}

template <int kColumns>
void LaunchForGroup(const WeighBlocks& a, cudaStream_t stream) {
  if (a.group <= 4) return Launch<kColumns, 4>(a, stream);
  if (a.group <= 8) return Launch<kColumns, 8>(a, stream);
  Launch<kColumns, 16>(a, stream);
}

}  // namespace

void Weigh(const WeighBlocks& a, cudaStream_t stream) {
  if (a.n_heads <= 0) return;
  if (a.head_dim <= 64) {
    LaunchForGroup<8>(a, stream);
  } else if (a.head_dim <= 128) {
    LaunchForGroup<16>(a, stream);
  } else {
    LaunchForGroup<32>(a, stream);
  }
  const auto lists = static_cast<unsigned>(a.n_heads * a.group);
  LaunchFollower("JoinKernel", a.head_dim <= 128 ? JoinKernel<1> : JoinKernel<2>, lists,
                 kJoinThreads, 0, stream, a);
}

}  // namespace fathom::cuda
