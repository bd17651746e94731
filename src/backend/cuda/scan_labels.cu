// SPDX-License-Identifier: MIT
// A warp takes a tile of 16 blocks, step by step: two blocks, or one for groups above 8. Codes come
// through a ring of stages in shared memory, filled by asynchronous copies several stages ahead.
//
// Sums of codes times 8-bit weights are products of matrices, 16 tokens x 32 channels x 8 columns.
// A column is one query head of one block, because weights belong to a block: up to 4 heads the 8
// columns hold both blocks of a step, and the half of a product that pairs one block's codes with
// the other's weights is ignored. Lane 4 n + k makes the weights that it needs itself as operand b:
// those of column n in the channels of unit k.
//
// Sums start from minus the least sum that can reach the limit of the column, so that a sign says
// whether a token may be a candidate, and all signs of a block are tested together. The few that
// pass are compared as scores, which are exact.
#include <algorithm>
#include <cmath>

#include "backend/cuda/check.h"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/scan_labels.cuh"
#include "backend/cuda/scan_labels.h"

namespace fathom::cuda {
namespace labels {
namespace {

// Where a warp's scores go.
struct Target {
  const LabelScan& s;
  const Shared& shared;
  std::int32_t head;
  std::int32_t token0;       // of the tile
  std::int32_t first, last;  // candidates
  std::int64_t out;          // where the tile's first token is in a row of scores
  int columns;
  bool sample;

  __device__ void Push(int h, float score, std::int32_t token) const {
    const int room = kQueueKeys / columns;
    const int at = atomicAdd(&shared.count[h], 1);
    if (at < room) {
      shared.queue[h * room + at] = CandidateKey(score, token);
    } else {
      AddCandidate(s.sink.candidates, static_cast<std::int64_t>(head) * s.group + h, score, token);
    }
  }
};

// A group of sums is ready: all columns of one block, whose first token in the tile is token0.
// head0, head1: query heads of the lane's two columns, or above the group where they are none.
// offset and unit: of the lane's two columns.
__device__ inline void WriteScores(const Target& t, const int (&acc)[16], int token, int head0,
                                   int head1, const int (&offset)[2], const float (&unit)[2]) {
  const ScoreSink& sink = t.s.sink;
  const bool wide =
      (sink.stride & 3) == 0 && (reinterpret_cast<std::uintptr_t>(sink.scores) & 15) == 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int h = e == 0 ? head0 : head1;
    if (h >= t.s.group) continue;
    float* out = sink.scores + (static_cast<std::int64_t>(t.head) * t.s.group + h) * sink.stride +
                 t.out + token;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float v[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int i = t.token0 + token + 32 * r + m;
        v[m] = __fmul_rn(static_cast<float>(2 * acc[4 * m + 2 * r + e] + offset[e]), unit[e]);
        if (t.sample && (i < t.first || i >= t.last)) v[m] = -INFINITY;
      }
      if (wide) {
        *reinterpret_cast<float4*>(out + 32 * r) = make_float4(v[0], v[1], v[2], v[3]);
      } else {
        for (int m = 0; m < 4; ++m) out[32 * r + m] = v[m];
      }
    }
  }
}

__device__ inline void PushScores(const Target& t, const int (&acc)[16], int token, int head0,
                                  int head1, const int (&offset)[2], const float (&unit)[2]) {
  unsigned below = 0;  // bit 15 - i: the sign of acc[i]
#pragma unroll
  for (int i = 0; i < 16; ++i) below = __funnelshift_l(static_cast<unsigned>(acc[i]), below, 1);
  for (unsigned reached = ~below & 0xFFFFu; reached != 0; reached &= reached - 1) {
    const int i = 16 - __ffs(static_cast<int>(reached));
    const int e = i & 1, h = e == 0 ? head0 : head1;
    const int at = t.token0 + token + (i >> 1 & 1) * 32 + (i >> 2);
    const float score = __fmul_rn(
        static_cast<float>(2 * Pick(acc, i) + (e ? offset[1] : offset[0])), e ? unit[1] : unit[0]);
    if (at < t.first || at >= t.last || h >= t.s.group) continue;
    if (score >= t.shared.least[h]) t.Push(h, score, at);
  }
}

// The scores of group j of sums. All lanes of the warp.
template <Codes kCodes, int kColumns>
__device__ inline void EndBlock(const Target& t, const int (&acc)[16], const Column& column, int j,
                                int block, int lane) {
  int signs = acc[0];
#pragma unroll
  for (int i = 1; i < 16; ++i) signs &= acc[i];
  const bool write = t.s.sink.scores != nullptr;
  if (!write && !__any_sync(kAll, signs >= 0)) return;
  const int k = lane & 3;
  int offset[2], head[2];
  float unit[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int n = 2 * k + e;
    offset[e] = __shfl_sync(kAll, column.offset, 4 * n);
    unit[e] = __shfl_sync(kAll, column.unit, 4 * n);
    head[e] = kColumns == 4 && n >> 2 != j ? kMaxGroup : Step<kColumns>::ColumnHead(j, n);
  }
  const int token = block * kBlockTokens + LaneTokens<kCodes>(lane);
  if (write) {
    WriteScores(t, acc, token, head[0], head[1], offset, unit);
  } else {
    PushScores(t, acc, token, head[0], head[1], offset, unit);
  }
}

// The scan of one warp's tile of n_blocks blocks.
template <Codes kCodes, int kColumns, bool kOneChunk>
class TileScan {
  using S = Step<kColumns>;
  static constexpr int kLane = kUnit<kCodes>;

 public:
  __device__ TileScan(const Shape& shape, const Target& target, int planes, int n_blocks, int lane)
      : shape_(shape),
        target_(target),
        n_blocks_(n_blocks),
        chunks_(kOneChunk ? 1 : shape.chunks),
        centre_((1 << planes) - 1),
        lane_(lane) {
#pragma unroll
    for (int s = 0; s < S::kSets; ++s) least_[s] = target.shared.least[Head(s)];
  }

  __device__ void Run(Reader<kCodes, kColumns, kOneChunk>& reader) {
    for (int block = 0; block < n_blocks_; block += S::kBlocks) {
      WaitStage<S::kStages - 2>();
      reader.Ask();
      if constexpr (kOneChunk) {
        OneChunk(reader.Next(), block);
      } else {
        ManyChunks(reader, block);
      }
    }
  }

 private:
  __device__ int Head(int set) const { return S::ColumnHead(set, lane_ >> 2); }

  // Products of the lane's column and channels, and their largest magnitude together with m.
  __device__ float Products(int set, int block, int chunk, float m, float (&p)[kLane]) const {
    const int channel = (4 * chunk + (lane_ & 3)) * kLane;
    const unsigned char* scales = target_.shared.scales + ScaleOffset(channel) +
                                  2 * (block + S::ColumnBlock(set, lane_ >> 2));
    const float* q = target_.shared.q + Head(set) * (shape_.channels + 4) + channel;
#pragma unroll
    for (int i = 0; i < kLane; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(q + i);
      const float qs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto* scale = reinterpret_cast<const __half*>(scales + ScaleOffset(i + j));
        p[i + j] = __fmul_rn(qs[j], __half2float(*scale));
        m = MaxNan(m, fabsf(p[i + j]));
      }
    }
    return m;
  }

  // What sums start from: minus the limits of the lane's two columns of each set.
  __device__ void Starts(const Column* columns, int (&start)[S::kSets][2]) const {
#pragma unroll
    for (int s = 0; s < S::kSets; ++s) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        start[s][e] = -__shfl_sync(kAll, columns[s].limit, 4 * (2 * (lane_ & 3) + e));
      }
    }
  }
  // The same for group j, in which columns of the other block do not count.
  __device__ int Start(const int (&start)[S::kSets][2], int j, int e) const {
    return kColumns == 4 && (lane_ >> 1 & 1) != j ? -kNever : start[S::Set(j)][e];
  }

  __device__ void OneChunk(const unsigned char* stage, int block) const {
    Column columns[S::kSets];
    std::uint32_t b[S::kSets][kLane / 4];
#pragma unroll
    for (int s = 0; s < S::kSets; ++s) {
      float p[kLane];
      Scale(Products(s, block, 0, 0.0f, p), shape_.scale_power, &columns[s]);
      Weigh(p, &columns[s], b[s]);
      Finish(least_[s], centre_, shape_.least_power, &columns[s]);
    }
    int start[S::kSets][2];
    Starts(columns, start);
    std::uint32_t x[8];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = S::Block(j), set = S::Set(j);
      if (block + at >= n_blocks_) break;
      if (j == 0 || S::kBlocks == 2) LoadCodes<kCodes, kColumns>(stage, at, lane_, x);
      int acc[16];
      Multiply<kCodes, false>(x, b[set], Start(start, j, 0), Start(start, j, 1), acc);
      EndBlock<kCodes, kColumns>(target_, acc, columns[set], j, block + at, lane_);
    }
  }

  // Weights need the largest product of all channels, so products are made twice. The first stage
  // is there already, and with it all scales of the tile.
  __device__ void ManyChunks(Reader<kCodes, kColumns, kOneChunk>& reader, int block) const {
    Column columns[S::kSets];
    float p[kLane];
#pragma unroll
    for (int s = 0; s < S::kSets; ++s) {
      float m = 0;
      for (int chunk = 0; chunk < chunks_; ++chunk) m = Products(s, block, chunk, m, p);
      Scale(m, shape_.scale_power, &columns[s]);
    }
    int acc[2][16] = {};
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      if (chunk > 0) {
        WaitStage<S::kStages - 2>();
        reader.Ask();
      }
      const unsigned char* stage = reader.Next();
      std::uint32_t b[S::kSets][kLane / 4];
#pragma unroll
      for (int s = 0; s < S::kSets; ++s) {
        Products(s, block, chunk, 0.0f, p);
        Weigh(p, &columns[s], b[s]);
      }
      std::uint32_t x[8];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j == 0 || S::kBlocks == 2) LoadCodes<kCodes, kColumns>(stage, S::Block(j), lane_, x);
        Multiply<kCodes, true>(x, b[S::Set(j)], 0, 0, acc[j]);
      }
    }
#pragma unroll
    for (int s = 0; s < S::kSets; ++s) {
      Finish(least_[s], centre_, shape_.least_power, &columns[s]);
    }
    int start[S::kSets][2];
    Starts(columns, start);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (block + S::Block(j) >= n_blocks_) break;
#pragma unroll
      for (int i = 0; i < 16; ++i) acc[j][i] += Start(start, j, i & 1);
      EndBlock<kCodes, kColumns>(target_, acc[j], columns[S::Set(j)], j, block + S::Block(j),
                                 lane_);
    }
  }

  const Shape& shape_;
  const Target& target_;
  int n_blocks_, chunks_, centre_, lane_;
  float least_[S::kSets];
};

// Queries, rows and limits of the piece's head; zeros in the scales of channels that fill the last
// chunk up, whose codes may then be anything.
__device__ inline void Prepare(const LabelScan& s, const Shape& shape, const Shared& shared,
                               int head, int lane) {
  const int width = shape.channels + 4;
  for (int i = threadIdx.x; i < shape.columns * shape.channels; i += kThreads) {
    const int h = i / shape.channels, c = i - h * shape.channels;
    const std::int64_t list = static_cast<std::int64_t>(head) * s.group + h;
    shared.q[h * width + c] = h < s.group && c < s.n_channels ? s.q[list * s.n_channels + c] : 0.0f;
  }
  for (int c = threadIdx.x; c < s.n_channels; c += kThreads) {
    const bool named = s.layout == LabelLayout::kChannels && s.channels != nullptr;
    shared.rows[c] = named ? s.channels[static_cast<std::int64_t>(head) * s.n_channels + c] : c;
  }
  if (threadIdx.x < kMaxGroup) {
    const int h = threadIdx.x;
    shared.least[h] = h >= s.group ? NAN
                      : s.sink.scores != nullptr
                          ? 0.0f
                          : s.sink.candidates.least[std::int64_t{head} * s.group + h];
    shared.count[h] = 0;
  }
  for (int i = s.n_channels * 2 + lane; i < shape.channels * 2; i += 32) {
    *reinterpret_cast<uint4*>(shared.scales + ScaleOffset(i >> 1) + (i & 1) * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// The candidates of the thread block, with one addition to each count.
__device__ inline void FlushQueue(const Target& t, int warp, int lane) {
  const Candidates& to = t.s.sink.candidates;
  const int room = kQueueKeys / t.columns;
  for (int h = warp; h < t.s.group; h += kWarps) {
    const int n = min(t.shared.count[h], room);
    if (n == 0) continue;
    const std::int64_t list = static_cast<std::int64_t>(t.head) * t.s.group + h;
    int at = 0;
    if (lane == 0) at = atomicAdd(to.count + list, n);
    at = __shfl_sync(kAll, at, 0);
    for (int i = lane; i < n; i += 32) {
      if (at + i < to.capacity) to.keys[list * to.capacity + at + i] = t.shared.queue[h * room + i];
    }
  }
}

template <Codes kCodes, int kColumns, bool kOneChunk>
__global__ void __launch_bounds__(kThreads, kOneChunk ? 5 : 4)
    LabelKernel(const __grid_constant__ LabelScan s, const __grid_constant__ Shape shape) {
  Follow();
  extern __shared__ __align__(16) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int index = static_cast<int>(blockIdx.x) / shape.parts;
  const LabelPiece piece = s.pieces[index];
  const bool write = s.sink.scores != nullptr;
  const int step = write ? s.sink.tile_step : 1;
  const int phase = (step - piece.first_block / kTileBlocks % step) % step;
  const int tile0 = phase + (static_cast<int>(blockIdx.x) - index * shape.parts) * kWarps * step;
  if (tile0 * kTileBlocks >= piece.n_blocks) return;
  if (write && s.sink.only != nullptr && s.sink.only[piece.head] == 0) return;

  const int tile = tile0 + warp * step;
  int n_blocks = max(0, min(kTileBlocks, piece.n_blocks - tile * kTileBlocks));
  const Shared shared(memory, shape, warp);
  Target target = {
      s, shared,   piece.head,       (piece.first_block + tile * kTileBlocks) * kBlockTokens, 0, 0,
      0, kColumns, write && step > 1};
  target.out = target.sample
                   ? static_cast<std::int64_t>(target.token0 / kTileTokens / step) * kTileTokens
                   : target.token0;
  if (!write || target.sample) {
    const Lengths& lengths = s.lengths[piece.head / s.n_kv_heads];
    target.first = lengths.first;
    target.last = lengths.last;
  }
  const int in_tile = n_blocks;
  if (!write &&
      (target.token0 >= target.last || target.token0 + n_blocks * kBlockTokens <= target.first)) {
    n_blocks = 0;
  }

  Prepare(s, shape, shared, piece.head, lane);
  __syncthreads();
  Reader<kCodes, kColumns, kOneChunk> reader(s, shape, piece, shared, tile, n_blocks, lane);
  if (n_blocks > 0) {
    for (int i = lane; i < 2 * s.n_channels; i += 32) {
      const Half* from = piece.scales +
                         static_cast<std::int64_t>(shared.rows[i >> 1]) * piece.row_blocks +
                         tile * kTileBlocks + (i & 1) * 8;
      CopyAsync16(SharedAddress(shared.scales) + ScaleOffset(i >> 1) + (i & 1) * 16, from);
    }
  }
  for (int i = 0; i < Step<kColumns>::kStages - 1; ++i) reader.Ask();
  TileScan<kCodes, kColumns, kOneChunk>(shape, target, s.planes, n_blocks, lane).Run(reader);

  if (!write) {
    __syncthreads();
    FlushQueue(target, warp, lane);
  } else if (target.sample && in_tile > 0) {
    for (int h = 0; h < s.group; ++h) {  // a sample has whole tiles
      float* out = s.sink.scores +
                   (static_cast<std::int64_t>(piece.head) * s.group + h) * s.sink.stride +
                   target.out;
      for (int i = in_tile * kBlockTokens + lane; i < kTileTokens; i += 32) out[i] = -INFINITY;
    }
  }
}

template <Codes kCodes, int kColumns, bool kOneChunk>
void Launch(const LabelScan& scan, const Shape& shape, cudaStream_t stream) {
  const auto kernel = LabelKernel<kCodes, kColumns, kOneChunk>;
  const int bytes = SharedBytes(shape);
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  const auto blocks = static_cast<unsigned>(scan.n_pieces) * static_cast<unsigned>(shape.parts);
  LaunchFollower("LabelKernel", kernel, blocks, kThreads, bytes, stream, scan, shape);
}

template <Codes kCodes, int kColumns>
void LaunchColumns(const LabelScan& scan, const Shape& shape, cudaStream_t stream) {
  if (shape.chunks == 1) {
    Launch<kCodes, kColumns, true>(scan, shape, stream);
  } else {
    Launch<kCodes, kColumns, false>(scan, shape, stream);
  }
}

template <Codes kCodes>
void LaunchCodes(const LabelScan& scan, Shape shape, cudaStream_t stream) {
  const int chunk = 4 * kUnit<kCodes>;
  shape.chunks = std::max(1, (scan.n_channels + chunk - 1) / chunk);
  shape.channels = shape.chunks * chunk;
  shape.units = (scan.n_channels + kUnit<kCodes> - 1) / kUnit<kCodes>;
  if (shape.columns == 4) {
    LaunchColumns<kCodes, 4>(scan, shape, stream);
  } else if (shape.columns == 8) {
    LaunchColumns<kCodes, 8>(scan, shape, stream);
  } else {
    LaunchColumns<kCodes, 16>(scan, shape, stream);
  }
}

}  // namespace
}  // namespace labels

void ScanLabels(const LabelScan& scan, cudaStream_t stream) {
  if (scan.n_pieces <= 0 || scan.max_tiles <= 0) return;
  const int step = scan.sink.scores != nullptr ? scan.sink.tile_step : 1;
  const int tiles = (scan.max_tiles + step - 1) / step;
  labels::Shape shape = {};
  shape.parts = (tiles + labels::kWarps - 1) / labels::kWarps;
  shape.columns = scan.group <= 4 ? 4 : scan.group <= 8 ? 8 : 16;
  shape.least_power = std::ldexp(1.0f, scan.planes);
  shape.scale_power = std::ldexp(1.0f, -scan.planes);
  if (scan.layout == LabelLayout::kChannels) {
    labels::LaunchCodes<labels::Codes::kChannels4>(scan, shape, stream);
  } else if (scan.planes > 2) {
    labels::LaunchCodes<labels::Codes::kTokens4>(scan, shape, stream);
  } else {
    labels::LaunchCodes<labels::Codes::kTokens2>(scan, shape, stream);
  }
}

}  // namespace fathom::cuda
