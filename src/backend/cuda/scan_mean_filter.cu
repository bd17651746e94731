// SPDX-License-Identifier: MIT
// The tensor-core scan of the mean codec: candidates above a limit, and the mass of the rest.
//
// A warp takes a tile of 16 blocks. Lane 4g + t loads the words of blocks 2g and 2g + 1 of eight
// planes; a transpose of bytes inside the lane turns the words of four planes into registers that
// hold four planes of eight tokens, and an AND with 0x01010101 << s leaves token s of them, worth
// 2^s: an operand of the MMA without any exchange between lanes. Row g of an MMA is block 2g, row
// g + 8 block 2g + 1; the other operand, the weights, never changes. The accumulator begins at
// minus the least sum that makes a candidate, so that its sign is the comparison, and the signs of
// 32 accumulators are tested at once.
#include <cmath>

#include "backend/cuda/scan_mean.cuh"

namespace fathom::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kBlocksPerSm = 3;  // 168 registers a thread
constexpr int kLimit = 512;      // of U in the least sum; U is below 256

// What the kernel needs of a query head.
struct HeadInfo {
  int least;  // T of a candidate
  int shift;
  int low;  // of all parts
  float scale;
  float least_score;
  float step;    // what one of the sum is worth in the exponent, base 2
  float unit;    // what one of T is
  float origin;  // of T = 0
};

// Tokens of a warp that reached their limit wait here, place and sum of each in a word. They come
// in clusters, up to thousands in a tile: putting one down has to be cheap, and everything else is
// done for 32 of them at a time.
constexpr int kStepTokens = 4 * 4 * 32;  // most that are put down together
constexpr int kQueue = 2 * kStepTokens;
constexpr int kRounds = 8;  // of 32 that move to the lists together

__device__ std::uint32_t Waiting(int block, int bit, int h, int sum) {
  return static_cast<std::uint32_t>(block) << 28 | static_cast<std::uint32_t>(bit) << 22 |
         static_cast<std::uint32_t>(h) << 18 | static_cast<std::uint32_t>(sum & 0x3FFF);
}

struct Shared {
  std::uint32_t queue[kWarps][kQueue];
  ScanPiece piece;
  std::int32_t slot_offset[kFilterSlots];  // of the planes, in units of 16 bytes; -1: no plane
  HeadInfo head[kMaxGroup];                // columns beyond the group never reach their limit
  int first, last;                         // candidates
  int n_parts;
};

// base[0], [1]: block 2g, heads 2t and 2t + 1; [2], [3]: block 2g + 1.
__device__ void LoadBases(const MeanScan& s, const Shared& shared, int tile, int column,
                          int (&base)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int block = shared.piece.first_block + tile * kTileBlocks + lane / 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int h = min(column * 8 + lane % 4 * 2 + i, s.tables.group - 1);
    const std::int32_t* from =
        s.bases + (std::int64_t{shared.piece.head} * s.tables.group + h) * s.bases_stride + block;
    base[i] = __ldcg(from);
    base[2 + i] = __ldcg(from + 1);
  }
}

// The least sum over all planes at which a token of the block may be a candidate. Averaging parts
// rounds up: two at most by a half, four by one, eight by one and a half.
__device__ int LeastSum(int least, int base, int shift, int low, int n_parts) {
  const int u = (least - base + (1 << shift) - 1) >> shift;  // of U; the shift rounds down
  const int near = min(max(u, -kLimit), kLimit);
  const int slack = n_parts == 1 ? 0 : n_parts == 2 ? 1 : n_parts == 4 ? 4 : 12;
  return near * n_parts - slack - low;
}

// U of a token where several averages make the sum ambiguous: from the planes again. Rare.
__device__ __noinline__ int ExactSum(const MeanTables& t, const ScanPiece& piece, int h, int block,
                                     int bit) {
  const MeanTableHead& head = t.head[piece.table];
  const std::int64_t row = std::int64_t{piece.table} * t.head_dim * kPlanes;
  int part[kMostParts];
  for (int r = 0, p = 0; r < head.n_parts; ++r) {
    part[r] = head.low[r * kMaxGroup + h];
    for (; p < head.part_end[r]; ++p) {
      const std::uint64_t word = piece.planes[PlaneRow(piece, t, p) * piece.plane_stride + block];
      if ((word >> bit & 1) != 0) part[r] += t.weight[(row + p) * t.group + h];
    }
  }
  for (int n = head.n_parts; n > 1; n /= 2) {
    for (int i = 0; i < n / 2; ++i) part[i] = (part[2 * i] + part[2 * i + 1] + 1) / 2;
  }
  return part[0];
}

// The exact score of a token that waits, compared as `ref` would: its key, or 0.
__device__ std::uint64_t KeyOf(const MeanScan& s, const Shared& shared, int tile,
                               std::uint32_t word) {
  const int in_tile = static_cast<int>(word >> 28), bit = static_cast<int>(word >> 22 & 63u);
  const int h = static_cast<int>(word >> 18 & 15u);
  const int sum = static_cast<int>(word << 18) >> 18;
  const int block = tile * kTileBlocks + in_tile;
  const int token = (shared.piece.first_block + block) * kBlockTokens + bit;
  if (h >= s.tables.group || block >= shared.piece.n_blocks) return 0;
  if (token < shared.first || token >= shared.last) return 0;
  const HeadInfo& head = shared.head[h];
  int u = sum + head.low;
  if (shared.n_parts == 2) u = (u + 1) >> 1;
  if (shared.n_parts > 2) u = ExactSum(s.tables, shared.piece, h, block, bit);
  const std::int64_t list = std::int64_t{shared.piece.head} * s.tables.group + h;
  const int base = __ldcg(s.bases + list * s.bases_stride + shared.piece.first_block + block);
  const float score = static_cast<float>((u << head.shift) + base) * head.scale;
  return score >= head.least_score ? CandidateKey(score, token) : 0;
}

// Moves what waits, n <= kQueue, to the lists: up to kRounds * 32 for one step of each list's
// counter. All lanes.
__device__ __noinline__ void Flush(const MeanScan& s, Shared& shared, int tile, int n) {
  const std::uint32_t* queue = shared.queue[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned before = (1u << lane) - 1;
  const Candidates& c = s.sink.candidates;
  const std::int64_t first_list = std::int64_t{shared.piece.head} * s.tables.group;
  __syncwarp();  // what the lanes wrote is there
  for (int first = 0; first < n; first += kRounds * 32) {
    std::uint64_t key[kRounds];
    int head[kRounds], rank[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int at = first + r * 32 + lane;
      const std::uint32_t word = at < n ? queue[at] : 0;
      key[r] = at < n ? KeyOf(s, shared, tile, word) : 0;
      head[r] = key[r] != 0 ? static_cast<int>(word >> 18 & 15u) : -1;
    }
    int mine = 0;
    for (int h = 0; h < s.tables.group; ++h) {
      int count = 0;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const unsigned same = __ballot_sync(0xFFFFFFFFu, head[r] == h);
        if (head[r] == h) rank[r] = count + __popc(same & before);
        count += __popc(same);
      }
      if (lane == h) mine = count;
    }
    int base = 0;
    if (mine > 0) base = atomicAdd(c.count + first_list + lane, mine);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int at = __shfl_sync(0xFFFFFFFFu, base, max(head[r], 0)) + rank[r];
      if (head[r] >= 0 && at < c.capacity)
        c.keys[(first_list + head[r]) * c.capacity + at] = key[r];
    }
  }
  __syncwarp();  // it is read before others take its place
}

__device__ void FillHeads(const MeanScan& s, Shared& shared) {
  const int h = static_cast<int>(threadIdx.x);
  if (h >= kMaxGroup) return;
  HeadInfo info{};
  info.least = 1 << 26;
  if (h < s.tables.group) {
    const MeanTableHead& head = s.tables.head[shared.piece.table];
    info.least_score =
        s.sink.candidates.least[std::int64_t{shared.piece.head} * s.tables.group + h];
    info.scale = head.scale[h];
    info.least = LeastTotal(info.least_score, info.scale);
    info.shift = head.shift[h];
    for (int r = 0; r < head.n_parts; ++r) info.low += head.low[r * kMaxGroup + h];
    constexpr float kLog2E = 1.4426950408889634F;
    info.unit = s.exp_scale * kLog2E * info.scale;
    info.step = info.unit * static_cast<float>(1 << info.shift) / static_cast<float>(head.n_parts);
    info.origin = -s.exp_scale * kLog2E * info.least_score;
  }
  shared.head[h] = info;
}

struct Tile {
  int index;
  int column;   // group of eight heads
  int base[4];  // as accumulators: two blocks, two heads
  int least_sum[4];
};

// The exponent of a token with an accumulator of 0, base 2.
__device__ float OriginOf(const Shared& shared, const Tile& tile, int i) {
  const HeadInfo& head = shared.head[tile.column * 8 + threadIdx.x % 4 * 2 + i % 2];
  const int n = shared.n_parts;
  // What rounding up adds to the average in the mean, log2(n) / 4, times n.
  const float bias = n == 1 ? 0.0F : n == 2 ? 0.5F : n == 4 ? 2.0F : 6.0F;
  return head.step * (static_cast<float>(tile.least_sum[i] + head.low) + bias) +
         head.unit * static_cast<float>(tile.base[i]) + head.origin;
}

// The masses of 16 accumulators of one bit position; first: the token of the first octet.
template <bool kEdge>
__device__ void AddMasses(const int (&acc)[4][4], const float (&step)[2], const float (&origin)[4],
                          int first, int begin, int end, float (&mass)[4]) {
#pragma unroll
  for (int o = 0; o < 4; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = __fmaf_rn(static_cast<float>(acc[o][i]), step[i % 2], origin[i]);
      float e = Exp2(fminf(x, 0.0F));
      if (kEdge) {
        const int token = first + i / 2 * kBlockTokens + o * 8;
        if (token < begin || token >= end) e = 0;
      }
      mass[i] += e;
    }
  }
}

// Puts down the tokens whose accumulators reached zero, of the octets of one half at one bit;
// first: the token of the first octet. n wait already; returns how many do then. All lanes.
__device__ int PutDown(Shared& shared, const Tile& tile, int first, const int (&acc)[4][4], int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t* queue = shared.queue[threadIdx.x / 32];
#pragma unroll
  for (int o = 0; o < 4; ++o) {
    if (!__any_sync(0xFFFFFFFFu, (acc[o][0] & acc[o][1] & acc[o][2] & acc[o][3]) >= 0)) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool reached = acc[o][i] >= 0;
      const unsigned all = __ballot_sync(0xFFFFFFFFu, reached);
      if (reached) {
        queue[n + __popc(all & ((1u << lane) - 1))] =
            Waiting(lane / 4 * 2 + i / 2, first + o * 8, tile.column * 8 + lane % 4 * 2 + i % 2,
                    (acc[o][i] >> first % 8) + tile.least_sum[i]);
      }
      n += __popc(all);
    }
  }
  return n;
}

// Sums of the octets of one half at one bit, from `start`.
template <int kChunks>
__device__ void AddPlanes(const uint4 (&word)[kChunks][8], const uint2 (&weight)[kChunks], int half,
                          int bit, const int (&start)[4], int (&acc)[4][4]) {
  const std::uint32_t mask = 0x01010101u << bit;
#pragma unroll
  for (int o = 0; o < 4; ++o) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 &x = word[c][o], &y = word[c][o + 4];
      const std::uint32_t a[4] = {(half == 0 ? x.x : x.y) & mask, (half == 0 ? x.z : x.w) & mask,
                                  (half == 0 ? y.x : y.y) & mask, (half == 0 ? y.z : y.w) & mask};
      c == 0 ? MmaU8S8(acc[o], a, weight[c], start) : MmaU8S8(acc[o], a, weight[c], acc[o]);
    }
  }
}

// The start of accumulators whose sign is the comparison.
__device__ void StartOf(const Tile& tile, int bit, int (&start)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) start[i] = -(tile.least_sum[i] << bit);
}

// Candidates of a tile, of those halves and bits (bit 2b + h of reached) in which there are any:
// their sums are made again.
template <int kChunks>
__device__ __forceinline__ void PutDownTile(const MeanScan& s, Shared& shared, const Tile& tile,
                                            const uint4 (&word)[kChunks][8],
                                            const uint2 (&weight)[kChunks], std::uint32_t reached) {
  int n = 0;  // that wait
  for (; reached != 0; reached &= reached - 1) {
    const int at = __ffs(static_cast<int>(reached)) - 1, bit = at / 2, half = at % 2;
    if (n > kQueue - kStepTokens) {
      Flush(s, shared, tile.index, n);
      n = 0;
    }
    int start[4], acc[4][4];
    StartOf(tile, bit, start);
    AddPlanes<kChunks>(word, weight, half, bit, start, acc);
    n = PutDown(shared, tile, half * 32 + bit, acc, n);
  }
  if (n > 0) Flush(s, shared, tile.index, n);
}

// Sums of the tile's planes in one group of heads. Returns in which halves and bits some lane has a
// candidate; adds the masses.
template <int kChunks, bool kRest, bool kEdge>
__device__ std::uint32_t FilterTile(const Shared& shared, const Tile& tile,
                                    const uint4 (&word)[kChunks][8], const uint2 (&weight)[kChunks],
                                    float (&mass)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int h = tile.column * 8 + lane % 4 * 2;
  float origin[4] = {}, step[2] = {};
  if (kRest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) origin[i] = OriginOf(shared, tile, i);
    step[0] = shared.head[h].step;
    step[1] = shared.head[h + 1].step;
  }
  std::uint32_t reached = 0;
#pragma unroll 1
  for (int bit = 0; bit < 8; ++bit) {
    int start[4];
    StartOf(tile, bit, start);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // tokens 0 .. 31 and 32 .. 63 of the blocks
      int acc[4][4];
      AddPlanes<kChunks>(word, weight, half, bit, start, acc);
      int below = -1;  // negative while all sums are below their limits
#pragma unroll
      for (int o = 0; o < 4; ++o) below &= acc[o][0] & acc[o][1] & acc[o][2] & acc[o][3];
      if (below >= 0) reached |= 1u << (2 * bit + half);
      if (kRest) {
        const int block = shared.piece.first_block + tile.index * kTileBlocks + lane / 4 * 2;
        AddMasses<kEdge>(acc, step, origin, block * kBlockTokens + half * 32 + bit, shared.first,
                         shared.last, mass);
      }
    }
    if (kRest) {
      step[0] *= 0.5F;
      step[1] *= 0.5F;
    }
  }
  return __reduce_or_sync(0xFFFFFFFFu, reached);
}

// Words of the lane's planes, made words of octets: see the top.
template <int kChunks>
__device__ void LoadWords(const Shared& shared, int tile, uint4 (&word)[kChunks][8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4* planes =
      reinterpret_cast<const uint4*>(shared.piece.planes) + tile * (kTileBlocks / 2) + lane / 4;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int offset = shared.slot_offset[c * 32 + i / 4 * 16 + lane % 4 * 4 + i % 4];
      word[c][i] = offset >= 0 ? __ldcg(planes + offset) : uint4{0, 0, 0, 0};
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      TransposeBytes(word[c][i].x, word[c][i + 1].x, word[c][i + 2].x, word[c][i + 3].x);
      TransposeBytes(word[c][i].y, word[c][i + 1].y, word[c][i + 2].y, word[c][i + 3].y);
      TransposeBytes(word[c][i].z, word[c][i + 1].z, word[c][i + 2].z, word[c][i + 3].z);
      TransposeBytes(word[c][i].w, word[c][i + 1].w, word[c][i + 2].w, word[c][i + 3].w);
    }
  }
}

// Limits of a tile's heads, and the scan of it.
template <bool kRest, int kChunks>
__device__ void FilterColumn(const MeanScan& s, Shared& shared, int tile, int column, bool edge,
                             const uint4 (&word)[kChunks][8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const HeadInfo* heads = shared.head + column * 8 + lane % 4 * 2;
  Tile state{tile, column, {}, {}};
  LoadBases(s, shared, tile, column, state.base);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const HeadInfo& head = heads[i % 2];
    state.least_sum[i] = LeastSum(head.least, state.base[i], head.shift, head.low, shared.n_parts);
  }
  uint2 weight[kChunks];
  const std::int64_t fragment =
      std::int64_t{shared.piece.table} * ColumnGroups(s.tables.group) + column;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    weight[c] = s.tables.fragment[(fragment * 2 + c) * 32 + lane];
  }
  float mass[4] = {};
  const std::uint32_t reached =
      kRest && edge ? FilterTile<kChunks, kRest, true>(shared, state, word, weight, mass)
                    : FilterTile<kChunks, kRest, false>(shared, state, word, weight, mass);
  if (reached != 0) PutDownTile<kChunks>(s, shared, state, word, weight, reached);
  if constexpr (kRest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = column * 8 + lane % 4 * 2 + i % 2;
      const int block = tile * kTileBlocks + lane / 4 * 2 + i / 2;
      if (h >= s.tables.group || block >= shared.piece.n_blocks) continue;
      s.rest[(std::int64_t{shared.piece.head} * s.tables.group + h) * s.rest_stride +
             shared.piece.first_block + block] = mass[i];
    }
  }
}

template <bool kRest, int kChunks>
__device__ void FilterPiece(const MeanScan& s, Shared& shared) {
  const int n_tiles = TilesOf(shared.piece.n_blocks);
  // Tiles differ in how many candidates they have, so a warp takes the next when it is done with
  // one; it asks for it in time.
  const auto take = [&] {
    return threadIdx.x % 32 == 0 ? atomicAdd(s.next_tile + blockIdx.y, 1) : 0;
  };
  int tile = __shfl_sync(0xFFFFFFFFu, take(), 0);
  while (tile < n_tiles) {
    const int following = take();
    uint4 word[kChunks][8];
    LoadWords<kChunks>(shared, tile, word);
    const int first = (shared.piece.first_block + tile * kTileBlocks) * kBlockTokens;
    const bool edge = first < shared.first || first + kTileTokens > shared.last;
#pragma unroll 1
    for (int column = 0; column < ColumnGroups(s.tables.group); ++column) {
      FilterColumn<kRest, kChunks>(s, shared, tile, column, edge, word);
    }
    tile = __shfl_sync(0xFFFFFFFFu, following, 0);
  }
}

template <bool kRest>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    FilterKernel(const __grid_constant__ MeanScan s) {
  Follow();
  __shared__ Shared shared;
  const MeanTables& t = s.tables;
  if (threadIdx.x == 0) shared.piece = s.pieces[blockIdx.y];
  __syncthreads();
  const ScanPiece& piece = shared.piece;
  const MeanTableHead& head = t.head[piece.table];
  if (head.n_slots > kFilterSlots || LengthsOf(s, piece.head).keep == 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < kFilterSlots; i += kThreads) {
    const int slot = t.slot[piece.table * kFilterSlots + i];
    shared.slot_offset[i] =
        slot < 0 ? -1 : static_cast<int>(PlaneRow(piece, t, slot) * (piece.plane_stride / 2));
  }
  if (threadIdx.x == 0) {
    const int end = (piece.first_block + piece.n_blocks) * kBlockTokens;
    shared.n_parts = head.n_parts;
    shared.first = LengthsOf(s, piece.head).first;
    // Words beyond the piece's blocks are no tokens of it.
    shared.last = min(LengthsOf(s, piece.head).last, end);
  }
  FillHeads(s, shared);
  __syncthreads();
  head.n_slots > 32 ? FilterPiece<kRest, 2>(s, shared) : FilterPiece<kRest, 1>(s, shared);
}

}  // namespace

void FilterMean(const MeanScan& scan, cudaStream_t stream) {
  if (scan.n_pieces == 0 || scan.max_tiles == 0) return;
  // As many blocks of threads as run at once, each of which reads its operands once for all its
  // tiles, and not one more: it would begin when the others have ended.
  constexpr int kResident = 132 * kBlocksPerSm;
  const int most = (scan.max_tiles + kWarps - 1) / kWarps;
  const int wanted = scan.n_pieces < kResident ? kResident / scan.n_pieces : 1;
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most),
                  static_cast<unsigned>(scan.n_pieces));
  LaunchFollower("FilterMean", scan.rest != nullptr ? FilterKernel<true> : FilterKernel<false>,
                 grid, kThreads, 0, stream, scan);
}

}  // namespace fathom::cuda
