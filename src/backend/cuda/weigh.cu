// SPDX-License-Identifier: MIT
// Few blocks have enough mass to be read by their own mean. A block of threads looks at the masses
// of 128 of them, a thread each, lists those that are read, and sums their means, eight channels a
// thread; then one block per list joins the parts.
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/check.h"
#include "backend/cuda/rows.cuh"
#include "backend/cuda/weigh.h"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 128;  // and blocks of a tile
constexpr int kWarps = kThreads / 32;
constexpr int kJoinThreads = 128;

// Masses of block `block` by all heads; zeros beyond the last.
template <int kHeads>
__device__ inline void LoadMasses(const WeighBlocks& a, std::int64_t list, int block, int n,
                                  float (&mass)[kHeads]) {
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
#pragma unroll(kHeads <= 8 ? 4 : 2)
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

// kColumns: threads that share a mean, eight channels each. kHeads: query heads, rounded up.
template <int kColumns, int kHeads>
__global__ void __launch_bounds__(kThreads) WeighKernel(const __grid_constant__ WeighBlocks a) {
  __shared__ __align__(16) float scratch[4 * kThreads * 8];  // kGroups * 4 * D at most
  __shared__ float of_listed[kThreads][kHeads];
  __shared__ float least[kHeads], sums[kWarps][kHeads];
  __shared__ int counts[kWarps];
  __shared__ unsigned char listed[kThreads];
  const auto head = static_cast<int>(blockIdx.y);
  const auto split = static_cast<int>(blockIdx.x);
  const int n = a.lengths[head / a.n_kv_heads].n_blocks;
  const int tiles = (n + kThreads - 1) / kThreads;
  const auto first = static_cast<int>(static_cast<std::int64_t>(tiles) * split / a.n_splits);
  const auto last = static_cast<int>(static_cast<std::int64_t>(tiles) * (split + 1) / a.n_splits);
  const std::int64_t list = static_cast<std::int64_t>(head) * a.group;
  const std::int64_t part = (static_cast<std::int64_t>(head) * a.n_splits + split) * a.group;
  const Half* means = a.means[head];
  if (static_cast<int>(threadIdx.x) < a.group) {
    least[threadIdx.x] = a.least[list + threadIdx.x];
  }

  float total[kHeads][8] = {}, other[kHeads] = {}, mass[kHeads];
  int n_read = 0;
  LoadMasses<kHeads>(a, list, first * kThreads + static_cast<int>(threadIdx.x),
                     first < last ? n : 0, mass);
  __syncthreads();
  for (int tile = first; tile < last; ++tile) {
    const bool may_read = means != nullptr && tile * kThreads + static_cast<int>(threadIdx.x) < n;
    const int n_listed =
        ListBlocks<kHeads>(mass, least, may_read, a.group, counts, listed, of_listed, other);
    if (tile + 1 < last) {
      LoadMasses<kHeads>(a, list, (tile + 1) * kThreads + static_cast<int>(threadIdx.x), n, mass);
    }
    if (n_listed == 0) continue;  // the same for all threads
    n_read += n_listed;
    AddMeans<kColumns, kHeads>(means + static_cast<std::int64_t>(tile) * kThreads * a.head_dim,
                               a.head_dim, n_listed, listed, of_listed, total);
    __syncthreads();  // before the lists are written again
  }
  if (threadIdx.x == 0 && a.n_read != nullptr && n_read > 0) atomicAdd(a.n_read + head, n_read);
  StoreOther<kHeads>(other, a.group, sums, a.part_other + part);
  StoreTotals<kThreads, kColumns, kHeads>(total, a.head_dim, a.group, scratch,
                                          a.part_out + part * a.head_dim);
}

// A block per list, a thread one or two channels.
__global__ void __launch_bounds__(kJoinThreads) JoinKernel(const __grid_constant__ WeighBlocks a) {
  const auto list = static_cast<int>(blockIdx.x);
  const int head = list / a.group;
  const std::int64_t first =
      static_cast<std::int64_t>(head) * a.n_splits * a.group + list % a.group;
  const float unit = a.add.unit != nullptr ? a.add.unit[list] : 1;
  float other = 0;
#pragma unroll 8
  for (int s = 0; s < a.n_splits; ++s) other += a.part_other[first + s * a.group];
  float weighed[2];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int d = i * kJoinThreads + static_cast<int>(threadIdx.x);
    if (d >= a.head_dim) continue;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < a.n_splits; ++s) {
      sum += a.part_out[(first + s * a.group) * a.head_dim + d];
    }
    sum = __fmaf_rn(other, a.mean[static_cast<std::int64_t>(head) * a.head_dim + d], sum);
    weighed[i] = sum * unit;
    finite = finite && isfinite(weighed[i]);
  }
  float* out = a.out + static_cast<std::int64_t>(list) * a.head_dim;
  float weight = 0, share = 1;
  if (a.add.unit != nullptr) {
    const float mass = a.add.mass[list], factor = a.add.factor[list];
    weight = 1.0F / (1.0F + factor * mass);
    share = factor * weight;
    const bool usable = factor != 0 && weight > 0 && isfinite(mass) && finite;
    if (__syncthreads_and(usable ? 1 : 0) == 0) return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int d = i * kJoinThreads + static_cast<int>(threadIdx.x);
    if (d >= a.head_dim) continue;
    out[d] = a.add.unit != nullptr ? out[d] * weight + share * weighed[i] : weighed[i];
  }
}

template <int kColumns, int kHeads>
void Launch(const WeighBlocks& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.n_splits), static_cast<unsigned>(a.n_heads));
  WeighKernel<kColumns, kHeads><<<grid, kThreads, 0, stream>>>(a);
  CheckLaunch("WeighKernel");
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
  JoinKernel<<<static_cast<unsigned>(a.n_heads * a.group), kJoinThreads, 0, stream>>>(a);
  CheckLaunch("JoinKernel");
}

}  // namespace fathom::cuda
