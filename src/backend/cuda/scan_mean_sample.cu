// SPDX-License-Identifier: MIT
// A sample of the scores of the mean codec: two tokens of every block, one in each half, at places
// that look random. Tokens of a block have similar scores, so that few tokens of many blocks say
// more than many of few. A lane has one token; see scan_mean_exact.cu for its sums.
#include <cmath>

#include "backend/cuda/scan_mean.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
static_assert(kBlockTokens / kMeanSampleStep == 2);

struct Shared {
  std::int32_t row[kMaxHeadDim * kPlanes];  // of the planes
  std::int32_t mean_row[kMaxHeadDim];
};

// U of the lane's token, of four heads per word. half: the 32-bit words of the lane's block.
template <int kWords>
__device__ void TokenSum(const MeanTables& t, const ScanPiece& piece, const Shared& shared,
                         const std::uint32_t* half, int bit, std::uint32_t (&sum)[kWords]) {
  const MeanTableHead& head = t.head[piece.table];
  const std::uint32_t* weight =
      t.packed + std::int64_t{piece.table} * t.head_dim * kPlanes * kWords;
  std::uint32_t saved[3][kWords];  // averages of 1, 2 and 4 parts that wait for their partner
  int p = 0;
#pragma unroll
  for (int r = 0; r < kMostParts; ++r) {
    if (r >= head.n_parts) break;
    for (int w = 0; w < kWords; ++w) {
      sum[w] = 0;
      for (int h = 4 * w; h < min(4 * w + 4, t.group); ++h) {
        sum[w] += static_cast<std::uint32_t>(head.low[r * kMaxGroup + h]) << 8 * (h % 4);
      }
    }
#pragma unroll 8
    for (; p < head.part_end[r]; ++p) {
      const std::uint32_t word = __ldg(half + std::int64_t{shared.row[p]} * piece.plane_stride * 2);
      const std::uint32_t set = 0u - ((word >> bit) & 1u);
      for (int w = 0; w < kWords; ++w) sum[w] += __ldg(weight + p * kWords + w) & set;
    }
    int level = 0;
#pragma unroll
    for (int m = r; (m & 1) != 0; m >>= 1, ++level) {
      for (int w = 0; w < kWords; ++w) sum[w] = __vavgu4(saved[level][w], sum[w]);
    }
    if (level < 3) {
      for (int w = 0; w < kWords; ++w) saved[level][w] = sum[w];
    }
  }
}

// base of a block for the heads of one word.
__device__ void BlockBases(const MeanScan& s, const ScanPiece& piece, const Shared& shared,
                           int block, int word, int (&base)[4]) {
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  const std::int32_t* weight = t.mean_weight + std::int64_t{piece.table} * t.head_dim * t.group;
  for (int i = 0; i < 4; ++i) base[i] = head.constant[min(word * 4 + i, kMaxGroup - 1)];
#pragma unroll 8
  for (int c = 0; c < head.n_channels; ++c) {
    const std::uint8_t* row = piece.means + std::int64_t{shared.mean_row[c]} * piece.mean_stride;
    const int code = s.mean_bits == 8 ? static_cast<std::int8_t>(__ldg(row + block))
                                      : (__ldg(row + block / 2) >> block % 2 * 4 & 15) - 8;
    for (int i = 0; i < 4; ++i) {
      if (word * 4 + i < t.group) base[i] += __ldg(weight + c * t.group + word * 4 + i) * code;
    }
  }
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) SampleKernel(const __grid_constant__ MeanScan s) {
  __shared__ Shared shared;
  const ScanPiece piece = s.pieces[blockIdx.y];
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  const Lengths& lengths = LengthsOf(s, piece.head);
  if (lengths.keep == 0) return;
  for (int p = static_cast<int>(threadIdx.x); p < head.n_planes; p += kThreads) {
    shared.row[p] = static_cast<std::int32_t>(PlaneRow(piece, t, p));
  }
  for (int c = static_cast<int>(threadIdx.x); c < head.n_channels; c += kThreads) {
    shared.mean_row[c] = static_cast<std::int32_t>(MeanRow(piece, t, c));
  }
  __syncthreads();
  // The last piece of a sequence fills its sample up with what is no candidate.
  const bool last = piece.first_block + piece.n_blocks >= lengths.n_blocks;
  const int n_samples =
      last ? SampleTokens(lengths.n_blocks, kMeanSampleStep) - 2 * piece.first_block
           : 2 * piece.n_blocks;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       i < n_samples; i += static_cast<int>(gridDim.x) * kThreads) {
    const int block = i / 2;
    const std::uint32_t place =
        static_cast<std::uint32_t>(2 * piece.first_block + i) * 2654435761u >> 27;
    const int bit = static_cast<int>(place);
    const int token = (piece.first_block + block) * kBlockTokens + i % 2 * 32 + bit;
    const bool used = block < piece.n_blocks;
    const bool candidate = used && token >= lengths.first && token < lengths.last;
    std::uint32_t sum[kWords] = {};
    if (used) {
      TokenSum<kWords>(t, piece, shared, reinterpret_cast<const std::uint32_t*>(piece.planes) + i,
                       bit, sum);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      int base[4] = {};
      if (used) BlockBases(s, piece, shared, block, w, base);
      for (int k = 0; k < 4 && w * 4 + k < t.group; ++k) {
        const int h = w * 4 + k;
        const int u = static_cast<int>(sum[w] >> 8 * k & 255u);
        const float score = static_cast<float>((u << head.shift[h]) + base[k]) * head.scale[h];
        s.sink.scores[(std::int64_t{piece.head} * t.group + h) * s.sink.stride +
                      2 * piece.first_block + i] = candidate ? score : -INFINITY;
      }
    }
  }
}

template <int kWords>
void Launch(const MeanScan& s, cudaStream_t stream) {
  const int most = (s.max_tiles * kTileBlocks * 2 + kThreads - 1) / kThreads;
  const int wanted = (132 * 6 + s.n_pieces - 1) / s.n_pieces;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most),
                  static_cast<unsigned>(s.n_pieces));
  SampleKernel<kWords><<<grid, kThreads, 0, stream>>>(s);
  CheckLaunch("SampleMean");
}

}  // namespace

void SampleMean(const MeanScan& scan, cudaStream_t stream) {
  switch ((scan.tables.group + 3) / 4) {
    case 1:
      return Launch<1>(scan, stream);
    case 2:
      return Launch<2>(scan, stream);
    case 3:
      return Launch<3>(scan, stream);
    default:
      return Launch<4>(scan, stream);
  }
}

}  // namespace fathom::cuda
