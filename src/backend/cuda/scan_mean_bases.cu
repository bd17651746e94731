// SPDX-License-Identifier: MIT
// What a block adds to all of its tokens' scores, by tensor cores: its mean codes times the
// weights, which are split into three signed bytes. A warp takes 64 blocks, 32 bytes of every
// channel's row of 4-bit means. Lane 4g + t reads blocks 8g .. 8g + 7 of channels 4t .. 4t + 3 of
// sixteen; in the j-th of four MMAs row g is block 8g + 2j and row g + 8 the one behind it.
#include "backend/cuda/scan_mean.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kWarpBlocks = 64;
constexpr int kDigits = 3;

struct Shared {
  uint2 fragment[2][MeanChunks(kMaxHeadDim)][kDigits][32];
  std::int32_t row[kMaxHeadDim];
};

// Operands of four MMAs for 32 channels: a[j] as MmaU8S8 takes it.
template <int kMeanBits>
__device__ void MeanOperands(const ScanPiece& piece, const Shared& shared, int n_channels,
                             int chunk, int first, std::uint32_t (&a)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const int block = first + lane / 4 * 8;
  const bool inside = block < TilesOf(piece.n_blocks) * kTileBlocks;
  std::uint32_t low[2][4] = {}, high[2][4] = {};  // high: of 8-bit means, blocks 4 .. 7
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int c = chunk * 32 + r * 16 + t * 4 + k;
      if (c >= n_channels || !inside) continue;
      const std::uint8_t* row = piece.means + shared.row[c] * piece.mean_stride;
      if (kMeanBits == 4) {
        low[r][k] = __ldg(reinterpret_cast<const std::uint32_t*>(row + block / 2));
      } else {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(row + block));
        low[r][k] = v.x;
        high[r][k] = v.y;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    TransposeBytes(low[r][0], low[r][1], low[r][2], low[r][3]);
    if (kMeanBits == 8) TransposeBytes(high[r][0], high[r][1], high[r][2], high[r][3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kMeanBits == 4) {
        a[j][2 * r] = low[r][j] & 0x0F0F0F0Fu;
        a[j][2 * r + 1] = low[r][j] >> 4 & 0x0F0F0F0Fu;
      } else {
        const std::uint32_t(&from)[4] = j < 2 ? low[r] : high[r];
        a[j][2 * r] = from[j % 2 * 2];
        a[j][2 * r + 1] = from[j % 2 * 2 + 1];
      }
    }
  }
}

// Bases of the warp's blocks for eight heads.
template <int kMeanBits>
__device__ void WriteBases(const MeanScan& s, const ScanPiece& piece, const Shared& shared,
                           int column, int first) {
  const MeanTableHead& head = s.tables.head[piece.table];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int digit[4][kDigits][4] = {};
  for (int chunk = 0; chunk * 32 < head.n_channels; ++chunk) {
    std::uint32_t a[4][4];
    MeanOperands<kMeanBits>(piece, shared, head.n_channels, chunk, first, a);
#pragma unroll
    for (int d = 0; d < kDigits; ++d) {
      const uint2 b = shared.fragment[column][chunk][d][lane];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        kMeanBits == 4 ? MmaU8S8(digit[j][d], a[j], b, digit[j][d])
                       : MmaS8S8(digit[j][d], a[j], b, digit[j][d]);
      }
    }
  }
  const int block = first + lane / 4 * 8;
  if (block >= (piece.n_blocks + 7) / 8 * 8) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int h = column * 8 + lane % 4 * 2 + i;
    if (h >= s.tables.group) continue;
    // 4-bit codes are stored with 8 added.
    const int constant = head.constant[h] - (kMeanBits == 4 ? 8 * head.mean_total[h] : 0);
    std::int32_t* out = s.bases + (std::int64_t{piece.head} * s.tables.group + h) * s.bases_stride +
                        piece.first_block + block;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = 2 * r + i;
        const int base =
            constant + digit[j][0][at] + (digit[j][1][at] << 8) + (digit[j][2][at] << 16);
        if (block + 2 * j + r < piece.n_blocks) out[2 * j + r] = base;
      }
    }
  }
}

template <int kMeanBits>
__device__ void FillPiece(const MeanScan& s) {
  __shared__ Shared shared;
  const ScanPiece piece = s.pieces[blockIdx.y];
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  if (LengthsOf(s, piece.head).keep == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) s.next_tile[blockIdx.y] = 0;
  const int columns = ColumnGroups(t.group), chunks = MeanChunks(t.head_dim);
  const int n_fragments = columns * chunks * kDigits * 32;
  for (int i = static_cast<int>(threadIdx.x); i < n_fragments; i += kThreads) {
    shared.fragment[i / (chunks * 96)][i / 96 % chunks][i / 32 % 3][i % 32] =
        t.mean_fragment[std::int64_t{piece.table} * n_fragments + i];
  }
  for (int c = static_cast<int>(threadIdx.x); c < head.n_channels; c += kThreads) {
    shared.row[c] = static_cast<std::int32_t>(MeanRow(piece, t, c));
  }
  __syncthreads();
  for (int first = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32) * kWarpBlocks;
       first < piece.n_blocks; first += static_cast<int>(gridDim.x) * kWarps * kWarpBlocks) {
    for (int column = 0; column < columns; ++column) {
      WriteBases<kMeanBits>(s, piece, shared, column, first);
    }
  }
}

template <int kMeanBits>
__global__ void __launch_bounds__(kThreads)
    BasesKernel(const __grid_constant__ MeanScan s, bool beside_gather) {
  RunBeside(beside_gather, [&] { FillPiece<kMeanBits>(s); });
}

}  // namespace

void FillBases(const MeanScan& scan, cudaStream_t stream, bool beside_gather) {
  if (scan.n_pieces == 0 || scan.max_tiles == 0) return;
  constexpr int kResident = 132 * 4;
  constexpr int kTiles = kWarps * kWarpBlocks / kTileBlocks;  // of a block of threads
  const int most = (scan.max_tiles + kTiles - 1) / kTiles;
  const int wanted = (kResident + scan.n_pieces - 1) / scan.n_pieces;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most),
                  static_cast<unsigned>(scan.n_pieces));
  LaunchFollower("FillBases", scan.mean_bits == 4 ? BasesKernel<4> : BasesKernel<8>, grid, kThreads,
                 0, stream, scan, beside_gather);
}

}  // namespace fathom::cuda
