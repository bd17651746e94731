// SPDX-License-Identifier: MIT
// The plain scan of the mean codec: any number of planes and parts, every kind of output. A thread
// has four tokens and adds weights where their bits are set, those of four heads at once: a head's
// sum stays in 0 .. 255, so four of them are the bytes of a word, and the carries of negative
// weights cancel in the end.
#include <cmath>

#include "backend/cuda/scan_mean.cuh"

namespace fathom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostPlanes = kMaxHeadDim * kPlanes;

struct Shared {
  std::int32_t row[kMostPlanes];  // of the planes, in units of 16 words
  std::int32_t base[kTileBlocks][kMaxGroup];
};

__device__ int MeanCode(const std::uint8_t* row, int block, int bits) {
  if (bits == 8) return static_cast<std::int8_t>(row[block]);
  return ((row[block / 2] >> (block % 2 * 4)) & 15) - 8;
}

// base of the 16 blocks of a tile; a thread per block and head.
__device__ void TileBases(const MeanScan& s, const ScanPiece& piece, int tile, Shared& shared) {
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  const int block = static_cast<int>(threadIdx.x) / kMaxGroup;
  const int h = static_cast<int>(threadIdx.x) % kMaxGroup;
  const int at = tile * kTileBlocks + block;
  if (h >= t.group || at >= piece.n_blocks) return;
  const std::int32_t* weight = t.mean_weight + std::int64_t{piece.table} * t.head_dim * t.group + h;
  int base = head.constant[h];
  for (int c = 0; c < head.n_channels; ++c) {
    base += weight[c * t.group] *
            MeanCode(piece.means + MeanRow(piece, t, c) * piece.mean_stride, at, s.mean_bits);
  }
  shared.base[block][h] = base;
}

// U of a thread's four tokens, of four heads per word.
template <int kWords>
__device__ void TokenSums(const MeanScan& s, const ScanPiece& piece, int block,
                          const Shared& shared, std::uint32_t (&sum)[4][kWords]) {
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  const std::uint32_t* weight =
      t.packed + std::int64_t{piece.table} * t.head_dim * kPlanes * kWords;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4* words = reinterpret_cast<const uint4*>(piece.planes) + block / 2;
  const std::int64_t stride = piece.plane_stride / 2;
  std::uint32_t saved[3][4][kWords];  // averages of 1, 2 and 4 parts that wait for their partner
  int p = 0;
#pragma unroll
  for (int r = 0; r < kMostParts; ++r) {
    if (r >= head.n_parts) break;
    for (int w = 0; w < kWords; ++w) {
      std::uint32_t low = 0;
      for (int h = 4 * w; h < min(4 * w + 4, t.group); ++h) {
        low += static_cast<std::uint32_t>(head.low[r * kMaxGroup + h]) << 8 * (h % 4);
      }
      for (int i = 0; i < 4; ++i) sum[i][w] = low;
    }
#pragma unroll 4
    for (; p < head.part_end[r]; ++p) {
      const uint4 v = __ldcg(words + shared.row[p] * stride);
      const std::uint32_t bit[4] = {v.x, v.y, v.z, v.w};
      for (int w = 0; w < kWords; ++w) {
        const std::uint32_t add = weight[p * kWords + w];
        for (int i = 0; i < 4; ++i) sum[i][w] += add & (0u - ((bit[i] >> lane) & 1u));
      }
    }
    int level = 0;
#pragma unroll
    for (int m = r; (m & 1) != 0; m >>= 1, ++level) {
      for (int i = 0; i < 4; ++i) {
        for (int w = 0; w < kWords; ++w) sum[i][w] = __vavgu4(saved[level][i][w], sum[i][w]);
      }
    }
    if (level < 3) {
      for (int i = 0; i < 4; ++i) {
        for (int w = 0; w < kWords; ++w) saved[level][i][w] = sum[i][w];
      }
    }
  }
}

// Adds a block's 64 tokens (two per lane) and leaves the sum with lane 0.
__device__ float WarpSum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, i);
  return x;
}

// All outputs of the thread's four tokens for one head. block: the first of the warp's two.
__device__ void Put(const MeanScan& s, const ScanPiece& piece, int block, int h,
                    const Shared& shared, const int (&u)[4]) {
  const MeanTableHead& head = s.tables.head[piece.table];
  const Lengths& lengths = LengthsOf(s, piece.head);
  const std::int64_t list = std::int64_t{piece.head} * s.tables.group + h;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const ScoreSink& sink = s.sink;
  for (int b = 0; b < 2; ++b) {
    const bool used = block + b < piece.n_blocks;
    float mass = 0;
    for (int half = 0; half < 2; ++half) {
      const int in_block = half * 32 + lane;
      const int token = (piece.first_block + block + b) * kBlockTokens + in_block;
      const int value = u[2 * b + half];
      const int base = used ? shared.base[warp * 2 + b][h] : 0;
      const float score = static_cast<float>((value << head.shift[h]) + base) * head.scale[h];
      const bool candidate = used && token >= lengths.first && token < lengths.last;
      if (s.sums != nullptr) {
        if (used) s.sums[list * sink.stride + token] = static_cast<std::uint8_t>(value);
        if (used && in_block == 0) s.base[list * s.base_stride + token / kBlockTokens] = base;
      } else if (sink.scores != nullptr) {
        if (used) sink.scores[list * sink.stride + token] = score;
      } else if (candidate) {
        const float least = sink.candidates.least[list];
        if (score >= least) AddCandidate(sink.candidates, list, score, token);
        mass += expf(fminf(s.exp_scale * (score - least), 0.0F));
      }
    }
    if (s.rest != nullptr && sink.scores == nullptr && s.sums == nullptr) {
      mass = WarpSum(mass);
      if (lane == 0 && used) s.rest[list * s.rest_stride + piece.first_block + block + b] = mass;
    }
  }
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) ExactKernel(MeanScan s, bool heavy_only) {
  Follow();
  __shared__ Shared shared;
  const ScanPiece piece = s.pieces[blockIdx.y];
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  if (heavy_only && head.n_slots <= kFilterSlots) return;
  if (s.sink.only != nullptr && s.sink.only[piece.head] == 0) return;
  if (LengthsOf(s, piece.head).keep == 0) return;
  for (int p = static_cast<int>(threadIdx.x); p < head.n_planes; p += kThreads) {
    shared.row[p] = static_cast<std::int32_t>(PlaneRow(piece, t, p));
  }
  const int n_tiles = TilesOf(piece.n_blocks);
  for (int tile = static_cast<int>(blockIdx.x); tile < n_tiles;
       tile += static_cast<int>(gridDim.x)) {
    __syncthreads();  // rows are there; the bases of the tile before are not needed any more
    TileBases(s, piece, tile, shared);
    __syncthreads();
    const int block = tile * kTileBlocks + static_cast<int>(threadIdx.x) / 32 * 2;
    std::uint32_t sum[4][kWords];
    TokenSums<kWords>(s, piece, block, shared, sum);
    for (int h = 0; h < t.group; ++h) {
      int u[4] = {};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (h / 4 != w) continue;
        for (int i = 0; i < 4; ++i) u[i] = static_cast<int>((sum[i][w] >> 8 * (h % 4)) & 255u);
      }
      Put(s, piece, block, h, shared, u);
    }
  }
}

template <int kWords>
void Launch(const MeanScan& s, bool heavy_only, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(s.max_tiles), static_cast<unsigned>(s.n_pieces));
  LaunchFollower("ScanMean", ExactKernel<kWords>, grid, kThreads, 0, stream, s, heavy_only);
}

}  // namespace

void ScanMeanExact(const MeanScan& scan, bool heavy_only, cudaStream_t stream) {
  if (scan.n_pieces == 0 || scan.max_tiles == 0) return;
  MeanScan s = scan;
  // Most launches of these find nothing to do: few blocks of threads, which loop when there is.
  constexpr std::int32_t kRare = 48;
  if ((heavy_only || scan.sink.only != nullptr) && s.max_tiles > kRare) s.max_tiles = kRare;
  switch ((scan.tables.group + 3) / 4) {
    case 1:
      return Launch<1>(s, heavy_only, stream);
    case 2:
      return Launch<2>(s, heavy_only, stream);
    case 3:
      return Launch<3>(s, heavy_only, stream);
    default:
      return Launch<4>(s, heavy_only, stream);
  }
}

void ScanMean(const MeanScan& scan, cudaStream_t stream) {
  if (scan.n_pieces == 0 || scan.max_tiles == 0) return;
  if (scan.sink.scores != nullptr && scan.sink.tile_step > 1) return SampleMean(scan, stream);
  if (scan.sink.scores != nullptr || scan.sums != nullptr) {
    return ScanMeanExact(scan, false, stream);
  }
  FilterMean(scan, stream);
  ScanMeanExact(scan, true, stream);
}

}  // namespace fathom::cuda
