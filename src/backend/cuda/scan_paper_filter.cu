// SPDX-License-Identifier: MIT
// The tensor-core scan of the paper codec: candidates above a limit.
//
// What a bit adds depends on the scale of its block, so the operand of weights is made anew for
// every block, rounded to bytes of the block's largest weight. The sums are then off by no more
// than half a unit per plane: tokens whose sum could reach the limit are scored exactly, as the
// plain scan does, and compared. A warp takes two blocks: rows 0 .. 7 of an MMA are the octets of
// the first, rows 8 .. 15 those of the second, columns 0 .. 3 four heads with the weights of the
// first block, columns 4 .. 7 the same heads with those of the second. Half of the products mean
// nothing. Bits of planes become operands as in scan_mean_filter.cu.
#include <cuda_fp16.h>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/scan_paper.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kHeads = 4;  // query heads of a group; larger groups take the plain scan
constexpr int kMostPlanes = kFilterPlanes;
constexpr int kBlocksPerSm = 4;
constexpr int kBatch = 8;  // loads of a lane on their way together

// Tokens of a warp that have to be scored exactly: block * 64 + token, and the head.
constexpr int kQueue = 128;
struct Queue {
  int count;  // may exceed kQueue: what did not fit was scored at once
  std::uint32_t place[kQueue];
  std::uint8_t head[kQueue];
};

struct Shared {
  Queue queue[kWarps];
  PaperPiece piece;
  int n_planes;
  std::int32_t plane_offset[kMostPlanes];  // in units of 16 bytes
  std::int32_t scale_offset[kMostPlanes];  // in halfs, of the plane's channel
  float q[kHeads][kMostPlanes];            // times 2^-(p + 1)
  float least[kHeads];
};

__device__ float ScaleAt(const Shared& shared, int slot, int block) {
  const auto* scales = reinterpret_cast<const __half*>(shared.piece.scales);
  return __half2float(scales[shared.scale_offset[slot] + block]);
}

// What planes of the lane's head add in its block: slots 32c + 16r + 4t + k.
template <int kChunks>
__device__ void PlaneWeights(const Shared& shared, int head, int block,
                             float (&weight)[kChunks][8]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int slot = c * 32 + i / 4 * 16 + t * 4 + i % 4;
      weight[c][i] = slot < shared.n_planes ? ScaleAt(shared, slot, block) : 0.0F;
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int slot = c * 32 + i / 4 * 16 + t * 4 + i % 4;
      if (slot < shared.n_planes) weight[c][i] *= shared.q[head][slot];
    }
  }
}

// The largest magnitude of a weight of the lane's head and block, infinity where one is not finite;
// the same in the four lanes that share them.
template <int kChunks>
__device__ float Largest(const float (&weight)[kChunks][8]) {
  const float inf = __int_as_float(0x7F800000);
  float most = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float w = fabsf(weight[c][i]);
      most = fmaxf(most, w < inf ? w : inf);
    }
  }
  most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
  return fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
}

// A chunk of weights as the second operand, in units of which the largest is 127; their sum is
// added to total.
__device__ uint2 Operand(const float (&weight)[8], float inverse, int* total) {
  std::uint32_t word[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = __float2int_rn(weight[r * 4 + k] * inverse);
    word[r] = __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
    *total = __dp4a(static_cast<int>(word[r]), 0x01010101, *total);
  }
  return {word[0], word[1]};
}

// Bits of all chunks as the first operand: the lane's octet of four slots and four more, of the two
// blocks, every byte eight tokens of a plane.
template <int kChunks>
__device__ void Octets(const Shared& shared, int pair, std::uint32_t (&x)[kChunks][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, octet = lane / 4, t = lane % 4;
  const uint4* planes = reinterpret_cast<const uint4*>(shared.piece.planes) + pair;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint4 word[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int slot = c * 32 + i / 4 * 16 + t * 4 + i % 4;
      word[i] = slot < shared.n_planes ? __ldcg(planes + shared.plane_offset[slot]) : uint4{};
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t first[4], second[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        first[k] = __byte_perm(word[r * 4 + k].x, word[r * 4 + k].y, octet);
        second[k] = __byte_perm(word[r * 4 + k].z, word[r * 4 + k].w, octet);
      }
      x[c][2 * r] = __byte_perm(__byte_perm(first[0], first[1], 0x0040),
                                __byte_perm(first[2], first[3], 0x0040), 0x5410);
      x[c][2 * r + 1] = __byte_perm(__byte_perm(second[0], second[1], 0x0040),
                                    __byte_perm(second[2], second[3], 0x0040), 0x5410);
    }
  }
}

// The least sum of weights of set bits that can belong to a candidate; in units of most / 127.
__device__ int LeastSum(float least, float most, int total, int n_planes) {
  constexpr int kNever = 1 << 21, kAlways = -(1 << 21);
  if (!(most < __int_as_float(0x7F800000))) return kAlways;  // not finite: look at every token
  if (most == 0) return least <= 0 ? kAlways : kNever;
  if (!(least == least)) return kNever;
  // Half a unit per plane for rounding, and some more for that of the products.
  const float units = least * (127.0F / most) * (1 - copysignf(1e-5F, least)) -
                      0.501F * static_cast<float>(n_planes) - 1.0F;
  const float sum = (units + static_cast<float>(total)) * 0.5F;
  return sum >= static_cast<float>(kNever)    ? kNever
         : sum <= static_cast<float>(kAlways) ? kAlways
                                              : __float2int_rd(sum);
}

// A token that may be a candidate: its score as the plain scan sums it.
__device__ __noinline__ void Examine(const PaperScan& s, const Shared& shared, int h, int place) {
  const PaperPiece& piece = shared.piece;
  const int token = piece.first_block * kBlockTokens + place;
  const int block = place / kBlockTokens, bit = place % 32;
  const auto* half =
      reinterpret_cast<const std::uint32_t*>(piece.planes + block) + place % kBlockTokens / 32;
  float score = 0;
  for (int i = 0; i < shared.n_planes; i += kBatch) {
    std::uint32_t word[kBatch];
    float weight[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int at = min(i + k, shared.n_planes - 1);
      word[k] = __ldcg(half + std::int64_t{shared.plane_offset[at]} * 4);
      weight[k] = PlaneWeight(shared.q[h][at], ScaleAt(shared, at, block));
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (i + k < shared.n_planes) score += (word[k] >> bit & 1) != 0 ? weight[k] : -weight[k];
    }
  }
  if (score >= shared.least[h]) {
    AddCandidate(s.sink.candidates, std::int64_t{piece.head} * s.group + h, score, token);
  }
}

__device__ __noinline__ void Wait(const PaperScan& s, Shared& shared, int h, int place) {
  const int token = shared.piece.first_block * kBlockTokens + place;
  const Lengths& lengths = s.lengths[shared.piece.head / s.n_kv_heads];
  if (token < lengths.first || token >= lengths.last || h >= s.group) return;
  // The word beside an odd last block may hold anything, and be tokens of the next piece.
  if (place >= shared.piece.n_blocks * kBlockTokens) return;
  Queue& queue = shared.queue[threadIdx.x / 32];
  const int at = atomicAdd(&queue.count, 1);
  if (at >= kQueue) return Examine(s, shared, h, place);
  queue.place[at] = static_cast<std::uint32_t>(place);
  queue.head[at] = static_cast<std::uint8_t>(h);
}

// Scores what waits, a token a lane.
__device__ void Flush(const PaperScan& s, Shared& shared) {
  Queue& queue = shared.queue[threadIdx.x / 32];
  __syncwarp();
  const int n = min(queue.count, kQueue);
  for (int i = static_cast<int>(threadIdx.x) % 32; i < n; i += 32) {
    Examine(s, shared, queue.head[i], static_cast<int>(queue.place[i]));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) queue.count = 0;
  __syncwarp();
}

template <int kChunks>
__device__ void FilterPair(const PaperScan& s, Shared& shared, int pair) {
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int head = lane / 4 % kHeads, block = pair * 2 + lane / 16;  // of the lane's weights
  std::uint32_t x[kChunks][4];
  float weight[kChunks][8];
  PlaneWeights<kChunks>(shared, head, block, weight);
  Octets<kChunks>(shared, pair, x);
  const float most = Largest<kChunks>(weight);
  const float inverse = most > 0 && most < __int_as_float(0x7F800000) ? 127.0F / most : 0.0F;
  int acc[8][4] = {};
  int total = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint2 operand = Operand(weight[c], inverse, &total);
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const std::uint32_t mask = 0x01010101u << bit;
      const std::uint32_t a[4] = {x[c][0] & mask, x[c][1] & mask, x[c][2] & mask, x[c][3] & mask};
      MmaU8S8(acc[bit], a, operand, acc[bit]);
    }
  }
  total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
  total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
  const int mine = LeastSum(shared.least[head], most, total, shared.n_planes);
  // Columns 2t and 2t + 1 of the accumulators: lanes with t < 2 have heads of the first block.
  const int least[2] = {__shfl_sync(0xFFFFFFFFu, mine, t * 8),
                        __shfl_sync(0xFFFFFFFFu, mine, t * 8 + 4)};
  int below = -1;
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    acc[bit][0] = (t < 2 ? acc[bit][0] : acc[bit][2]) - (least[0] << bit);
    acc[bit][1] = (t < 2 ? acc[bit][1] : acc[bit][3]) - (least[1] << bit);
    below &= acc[bit][0] & acc[bit][1];
  }
  if (below < 0) return;
  const int first = (pair * 2 + t / 2) * kBlockTokens + lane / 4 * 8;
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (acc[bit][i] >= 0) Wait(s, shared, t % 2 * 2 + i, first + bit);
    }
  }
}

__device__ void Prepare(const PaperScan& s, Shared& shared) {
  __shared__ std::int16_t rank[kMaxHeadDim];
  const PaperPiece& piece = shared.piece;
  const std::int16_t* plane = PlanesOf(s, piece.head);
  RankChannels(s, piece.head, rank);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < s.n_planes[piece.head]; i += kThreads) {
    const int channel = plane[i] / kPlanes;
    const std::int64_t row = piece.gathered ? i : plane[i];
    const std::int64_t scale_row = piece.gathered ? rank[channel] : channel;
    shared.plane_offset[i] = static_cast<std::int32_t>(row * (piece.plane_stride / 2));
    shared.scale_offset[i] = static_cast<std::int32_t>(scale_row * piece.scale_stride);
    for (int h = 0; h < kHeads; ++h) {
      const float q =
          h < s.group ? s.q[(std::int64_t{piece.head} * s.group + h) * s.head_dim + channel] : 0;
      shared.q[h][i] = q * PlaneValue(plane[i] % kPlanes);
    }
  }
  if (threadIdx.x < kHeads) {
    const auto h = static_cast<int>(threadIdx.x);
    shared.least[h] = h < s.group ? s.sink.candidates.least[std::int64_t{piece.head} * s.group + h]
                                  : __int_as_float(0x7F800000);
  }
}

template <int kChunks>
__device__ void FilterPiece(const PaperScan& s, Shared& shared) {
  const int n_pairs = (shared.piece.n_blocks + 1) / 2;
  for (int pair = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); pair < n_pairs;
       pair += static_cast<int>(gridDim.x) * kWarps) {
    FilterPair<kChunks>(s, shared, pair);
    __syncwarp();
    if (__shfl_sync(0xFFFFFFFFu, shared.queue[threadIdx.x / 32].count, 0) >= 32) Flush(s, shared);
  }
  Flush(s, shared);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    FilterKernel(const __grid_constant__ PaperScan s) {
  Follow();
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.piece = s.pieces[blockIdx.y];
  if (threadIdx.x < kWarps) shared.queue[threadIdx.x].count = 0;
  __syncthreads();
  const int n_planes = s.n_planes[shared.piece.head];
  if (s.lengths[shared.piece.head / s.n_kv_heads].keep == 0 || n_planes > kMostPlanes) return;
  shared.n_planes = n_planes;
  Prepare(s, shared);
  __syncthreads();
  n_planes > 64 ? FilterPiece<4>(s, shared) : FilterPiece<2>(s, shared);
}

}  // namespace

bool FilterPaper(const PaperScan& scan, cudaStream_t stream) {
  if (scan.group > kHeads) return false;
  constexpr int kResident = 132 * kBlocksPerSm;
  const int most = (scan.max_tiles * kTileBlocks / 2 + kWarps - 1) / kWarps;
  const int wanted = scan.n_pieces < kResident ? kResident / scan.n_pieces : 1;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most),
                  static_cast<unsigned>(scan.n_pieces));
  LaunchFollower("FilterPaper", FilterKernel, grid, kThreads, 0, stream, scan);
  return true;
}

}  // namespace fathom::cuda
