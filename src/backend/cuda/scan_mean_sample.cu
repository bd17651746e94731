// SPDX-License-Identifier: MIT
// A sample of the scores of the mean codec: one token of every block, at a place that looks random.
// Tokens of a block have similar scores, so that few tokens of many blocks say more than many of
// few. A lane has one token; see scan_mean_exact.cu for its sums.
#include <cmath>

#include "backend/cuda/scan_mean.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
static_assert(kMeanSampleStep == kBlockTokens);

constexpr int kBatch = 16;  // loads of a lane on their way together

template <int kWords>
struct Shared {
  std::int32_t row[kMaxHeadDim * kPlanes];  // of the planes
  std::uint32_t weight[kMaxHeadDim * kPlanes + kBatch][kWords];
  std::int32_t part_end[kMostParts];
  std::uint32_t low[kMostParts][kWords];
};

// U of the lane's token, of four heads per word. half: the 32-bit words of the lane's block.
template <int kWords>
__device__ void TokenSum(const Shared<kWords>& shared, int n_parts, std::int64_t stride,
                         const std::uint32_t* half, int bit, std::uint32_t (&sum)[kWords]) {
  std::uint32_t saved[3][kWords];  // averages of 1, 2 and 4 parts that wait for their partner
  int p = 0;
#pragma unroll
  for (int r = 0; r < kMostParts; ++r) {
    if (r >= n_parts) break;
    for (int w = 0; w < kWords; ++w) sum[w] = shared.low[r][w];
    for (const int end = shared.part_end[r]; p < end; p += kBatch) {
      std::uint32_t word[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        word[i] = p + i < end ? __ldcg(half + shared.row[p + i] * stride) : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint32_t set = 0u - ((word[i] >> bit) & 1u);
        // Rows beyond the part have no bit set.
        for (int w = 0; w < kWords; ++w) sum[w] += shared.weight[p + i][w] & set;
      }
    }
    p = shared.part_end[r];
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

template <int kWords>
__device__ void FillShared(const MeanScan& s, const ScanPiece& piece, Shared<kWords>& shared) {
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  const std::int64_t table = piece.table;
  for (int p = static_cast<int>(threadIdx.x); p < head.n_planes; p += kThreads) {
    shared.row[p] = static_cast<std::int32_t>(PlaneRow(piece, t, p));
    for (int w = 0; w < kWords; ++w) {
      shared.weight[p][w] = t.packed[(table * t.head_dim * kPlanes + p) * kWords + w];
    }
  }
  const int r = static_cast<int>(threadIdx.x);
  if (r < kMostParts) {
    shared.part_end[r] = head.part_end[r];
    for (int w = 0; w < kWords; ++w) {
      shared.low[r][w] = 0;
      for (int h = 4 * w; r < head.n_parts && h < min(4 * w + 4, t.group); ++h) {
        shared.low[r][w] += static_cast<std::uint32_t>(head.low[r * kMaxGroup + h]) << 8 * (h % 4);
      }
    }
  }
  __syncthreads();
}

template <int kWords>
__global__ void __launch_bounds__(kThreads) SampleKernel(const __grid_constant__ MeanScan s) {
  Follow();
  __shared__ Shared<kWords> shared;
  const ScanPiece piece = s.pieces[blockIdx.y];
  const MeanTables& t = s.tables;
  const MeanTableHead& head = t.head[piece.table];
  const Lengths& lengths = LengthsOf(s, piece.head);
  if (lengths.keep == 0) return;
  FillShared<kWords>(s, piece, shared);
  // The last piece of a sequence fills its sample up with what is no candidate.
  const bool last = piece.first_block + piece.n_blocks >= lengths.n_blocks;
  const int n_samples =
      last ? SampleTokens(lengths.n_blocks, kMeanSampleStep) - piece.first_block : piece.n_blocks;
  for (int block = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       block < n_samples; block += static_cast<int>(gridDim.x) * kThreads) {
    const int in_sequence = piece.first_block + block;
    const int bit = static_cast<int>(static_cast<std::uint32_t>(in_sequence) * 2654435761u >> 26);
    const int token = in_sequence * kBlockTokens + bit;
    const bool used = block < piece.n_blocks;
    const bool candidate = used && token >= lengths.first && token < lengths.last;
    std::uint32_t sum[kWords] = {};
    if (used) {
      TokenSum<kWords>(shared, head.n_parts, piece.plane_stride * 2,
                       reinterpret_cast<const std::uint32_t*>(piece.planes + block) + bit / 32,
                       bit % 32, sum);
    }
#pragma unroll
    for (int h = 0; h < kWords * 4; ++h) {
      if (h >= t.group) break;
      const std::int64_t list = std::int64_t{piece.head} * t.group + h;
      const int base = used ? __ldcg(s.bases + list * s.bases_stride + in_sequence) : 0;
      const int u = static_cast<int>(sum[h / 4] >> 8 * (h % 4) & 255u);
      const int total = (u << head.shift[h]) + base;
      const float score = static_cast<float>(total) * head.scale[h];
      s.sink.scores[list * s.sink.stride + in_sequence] = candidate ? score : -INFINITY;
    }
  }
}

template <int kWords>
void Launch(const MeanScan& s, cudaStream_t stream) {
  const int most = (s.max_tiles * kTileBlocks + kThreads - 1) / kThreads;
  const int wanted = (132 * 8 + s.n_pieces - 1) / s.n_pieces;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most),
                  static_cast<unsigned>(s.n_pieces));
  LaunchFollower("SampleMean", SampleKernel<kWords>, grid, kThreads, 0, stream, s);
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
