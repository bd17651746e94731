// SPDX-License-Identifier: MIT
// A warp takes a block of 64 tokens, two per lane. What a set bit adds depends on the block through
// its scale, so the warp first makes a table of weights, q * scale * 2^-(p + 1) of every plane and
// head, in shared memory, piece by piece; then every lane adds them with the sign of its bits.
#include <cuda_fp16.h>

#include <cmath>

#include "backend/cuda/follow.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/scan_paper.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kMostPlanes = kMaxHeadDim * kPlanes;
constexpr int kTable = 64;  // planes whose weights are in shared memory at a time

template <int kGroup>
struct Shared {
  std::int16_t plane[kMostPlanes];  // channel * 4 + p of what is read, ascending
  std::int16_t rank[kMaxHeadDim];   // of the channel among those that are read
  int n_planes;
  float weight[kWarps][kTable][kGroup];
};

template <int kGroup>
__device__ void FillWeights(const PaperScan& s, const PaperPiece& piece, int block, int first,
                            Shared<kGroup>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int n = min(kTable, shared.n_planes - first);
  for (int i = lane; i < n; i += 32) {
    const int plane = shared.plane[first + i], channel = plane / kPlanes;
    const std::int64_t row = piece.gathered ? shared.rank[channel] : channel;
    const float scale = __half2float(
        reinterpret_cast<const __half*>(piece.scales)[row * piece.scale_stride + block]);
    const float value = PlaneValue(plane % kPlanes);
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      const float q =
          h < s.group ? s.q[(std::int64_t{piece.head} * s.group + h) * s.head_dim + channel] : 0;
      shared.weight[warp][i][h] = PlaneWeight(q * value, scale);
    }
  }
}

template <int kGroup>
__device__ void ScanBlock(const PaperScan& s, const PaperPiece& piece, int block,
                          Shared<kGroup>& shared, float (&score)[2][kGroup]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int h = 0; h < kGroup; ++h) score[0][h] = score[1][h] = 0;
  for (int first = 0; first < shared.n_planes; first += kTable) {
    __syncwarp();  // the table is read by all before it is written again
    FillWeights<kGroup>(s, piece, block, first, shared);
    __syncwarp();
    const int n = min(kTable, shared.n_planes - first);
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
      const std::int64_t row = piece.gathered ? first + i : shared.plane[first + i];
      const uint2 word =
          __ldcg(reinterpret_cast<const uint2*>(piece.planes + row * piece.plane_stride + block));
      const std::uint32_t low = (~word.x >> lane) << 31, high = (~word.y >> lane) << 31;
#pragma unroll
      for (int h = 0; h < kGroup; ++h) {
        const std::uint32_t weight = __float_as_uint(shared.weight[warp][i][h]);
        score[0][h] += __uint_as_float(weight ^ low);
        score[1][h] += __uint_as_float(weight ^ high);
      }
    }
  }
}

// index: of the block in a sample.
template <int kGroup>
__device__ void Put(const PaperScan& s, const PaperPiece& piece, int block, int index,
                    const float (&score)[2][kGroup]) {
  const ScoreSink& sink = s.sink;
  const Lengths& lengths = s.lengths[piece.head / s.n_kv_heads];
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    if (h >= s.group) break;
    const std::int64_t list = std::int64_t{piece.head} * s.group + h;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_block = half * 32 + lane;
      const int token = (piece.first_block + block) * kBlockTokens + in_block;
      const bool used = block >= 0 && block < piece.n_blocks;
      const bool candidate = used && token >= lengths.first && token < lengths.last;
      const float value = score[half][h];
      if (sink.scores != nullptr && sink.tile_step == 1) {
        if (used) sink.scores[list * sink.stride + token] = value;
      } else if (sink.scores != nullptr) {
        // Other pieces write their own blocks; what no block is behind is no candidate.
        if (!used && token < lengths.n_blocks * kBlockTokens) continue;
        const std::int64_t at = std::int64_t{index} * kBlockTokens + in_block;
        sink.scores[list * sink.stride + at] = candidate ? value : -INFINITY;
      } else if (candidate && value >= sink.candidates.least[list]) {
        AddCandidate(sink.candidates, list, value, token);
      }
    }
  }
}

template <int kGroup>
__global__ void __launch_bounds__(kThreads) PaperKernel(PaperScan s, bool heavy_only) {
  Follow();
  __shared__ Shared<kGroup> shared;
  const PaperPiece piece = s.pieces[blockIdx.y];
  if (s.sink.only != nullptr && s.sink.only[piece.head] == 0) return;
  if (s.lengths[piece.head / s.n_kv_heads].keep == 0) return;
  shared.n_planes = s.n_planes[piece.head];
  if (heavy_only && shared.n_planes <= kFilterPlanes) return;
  RankChannels(s, piece.head, shared.rank);
  for (int i = static_cast<int>(threadIdx.x); i < s.n_planes[piece.head]; i += kThreads) {
    shared.plane[i] = PlanesOf(s, piece.head)[i];
  }
  __syncthreads();
  // A sample takes one block of every `step`, each from a random place.
  const bool sample = s.sink.scores != nullptr && s.sink.tile_step > 1;
  const int step = sample ? s.sink.tile_step : 1;
  const int from = sample ? piece.first_block : 0;
  const int group = kTileBlocks * step;
  const int end = (from + piece.n_blocks + group - 1) / group * kTileBlocks;
  for (int i =
           from / group * kTileBlocks + static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
       i < end; i += static_cast<int>(gridDim.x) * kWarps) {
    const std::uint32_t place = static_cast<std::uint32_t>(i) * 2654435761u >> 8;
    const int block = i * step + static_cast<int>(place % static_cast<std::uint32_t>(step)) - from;
    float score[2][kGroup] = {};
    if (block >= 0 && block < piece.n_blocks) ScanBlock<kGroup>(s, piece, block, shared, score);
    Put<kGroup>(s, piece, block, i, score);
  }
}

template <int kGroup>
void Launch(const PaperScan& s, bool heavy_only, cudaStream_t stream) {
  // As many blocks of threads as run at once; launches that rarely find work have fewer.
  const int resident = heavy_only || s.sink.only != nullptr ? 132 * 4 : 132 * 16;
  const int most = s.max_tiles * kTileBlocks / kWarps;
  const int wanted = (resident + s.n_pieces - 1) / s.n_pieces;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most),
                  static_cast<unsigned>(s.n_pieces));
  LaunchFollower("ScanPaper", PaperKernel<kGroup>, grid, kThreads, 0, stream, s, heavy_only);
}

}  // namespace

void ScanPaper(const PaperScan& scan, cudaStream_t stream) {
  if (scan.n_pieces == 0 || scan.max_tiles == 0) return;
  const bool heavy_only = scan.sink.scores == nullptr && FilterPaper(scan, stream);
  if (scan.group <= 4) return Launch<4>(scan, heavy_only, stream);
  if (scan.group <= 8) return Launch<8>(scan, heavy_only, stream);
  Launch<16>(scan, heavy_only, stream);
}

}  // namespace fathom::cuda
