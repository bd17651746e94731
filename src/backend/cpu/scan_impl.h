// SPDX-License-Identifier: MIT
// Scan: approximate scores of the tokens of up to 64 blocks of one segment.
//
// Mean codec, exact in integers:
//   T = 32 * sum_p weight_p bit_p + base,   base(block) = -16 weight_sum + sum_a mean_weight_a
//   code_a
// A plane word is a mask of tokens: the kernel adds a broadcast int16 weight under it, for up to
// four heads at once so that a mask is made once per group; sums stay in registers over all planes.
// 64 blocks are 512 bytes of each plane, so every cache line is used as a whole, and the planes of
// a chunk (12 KB at 24 planes) stay in the first cache while head passes and blocks go by.
// Base is a product of small integers, evaluated in floats: every partial sum is an integer below
// 2^24, hence exact in any order, and so is the conversion. The result equals the reference bit for
// bit on every instruction set. Bound by the masked adds: heads * planes * 64 / lanes per block.
//
// Paper codec: weights depend on the block (q times its scale), so sums are floats, in ascending
// channel order per token:
//   score = sum_j q a_j sum_p bit 2^-p - sum_j q a_j (1 - 2^-t_j)

constexpr int kMaxScanPlanes = kMaxHeadDim * kPlanes;

struct MeanPass {
  const unsigned char* planes;  // first word of the chunk in plane 0
  const std::int64_t* offset;   // [n_planes] bytes from there to the plane
  const std::int32_t* pairs;    // [n_planes][heads] the weight in both halves
  const float* base;            // [heads][kScanChunkBlocks]
  const float* scale;           // [heads]
  int n_planes;
  float* scores;
  std::int64_t stride;
};

// kPieces times kLanes16 tokens, from token piece * kLanes16 of the chunk.
template <int Heads, int Pieces>
FATHOM_INLINE void MeanPieces(const MeanPass& s, int piece) {
  constexpr int kPieceBytes = kLanes16 / 8;
  I16 sum[Heads][Pieces];
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < Pieces; ++v) sum[h][v] = Zero16();
  }
  const unsigned char* chunk = s.planes + piece * kPieceBytes;
  const std::int32_t* pair = s.pairs;
  for (int p = 0; p < s.n_planes; ++p, pair += Heads) {
    const unsigned char* bits = chunk + s.offset[p];
    Mask16 mask[Pieces];
#pragma GCC unroll 16
    for (int v = 0; v < Pieces; ++v) mask[v] = LoadMask16(bits + v * kPieceBytes);
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      const I16 weight = SetPair16(pair[h]);
#pragma GCC unroll 16
      for (int v = 0; v < Pieces; ++v) sum[h][v] = MaskedAdd16(sum[h][v], mask[v], weight);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
    const F32 scale = Set(s.scale[h]);
    float* out = s.scores + h * s.stride + piece * kLanes16;
#pragma GCC unroll 16
    for (int v = 0; v < Pieces; ++v) {
      const int block = (piece + v) * kLanes16 / kBlockTokens;
      const F32 base = Set(s.base[h * kScanChunkBlocks + block]);
      F32 part[2];
      ToFloat16(sum[h][v], part);
      Store(out + v * kLanes16, Mul(MulAdd(part[0], Set(32.0f), base), scale));
      Store(out + v * kLanes16 + kLanes, Mul(MulAdd(part[1], Set(32.0f), base), scale));
    }
  }
}

// Mean codes of blocks block .. of one channel; beyond the segment, whatever the buffer holds.
FATHOM_INLINE F32 LoadMeans(const ScanMeanArgs& a, int channel, int block) {
  const bool bytes = a.mean_bits == 8;
  const int row_bytes = bytes ? a.segment_blocks : a.segment_blocks / 2;
  const int at = bytes ? block : block / 2;
  const std::uint8_t* p = a.side + static_cast<std::int64_t>(channel) * row_bytes + at;
  std::uint8_t copy[kLanes] = {};
  if (block + kLanes > a.segment_blocks) {
    __builtin_memcpy(copy, p, static_cast<unsigned>(row_bytes - at));
    p = copy;
  }
  return bytes ? LoadInt8(p) : LoadNibbles(p);
}

template <int Heads>
void MeanBase(const ScanMeanArgs& a, int head, float* base) {
  float weight[kMaxHeadDim * Heads];
  for (int c = 0; c < a.n_active; ++c) {
    for (int h = 0; h < Heads; ++h) {
      weight[c * Heads + h] = static_cast<float>(a.mean_weight[c * a.group + head + h]);
    }
  }
  for (int b = 0; b < a.count; b += kLanes) {
    F32 sum[Heads];
    for (int h = 0; h < Heads; ++h) {
      sum[h] = Set(static_cast<float>(-16 * a.weight_sum[head + h]));
    }
    for (int c = 0; c < a.n_active; ++c) {
      const F32 codes = LoadMeans(a, a.channel[c], a.first + b);
      for (int h = 0; h < Heads; ++h) {
        sum[h] = MulAdd(Set(weight[c * Heads + h]), codes, sum[h]);
      }
    }
    for (int h = 0; h < Heads; ++h) Store(base + h * kScanChunkBlocks + b, sum[h]);
  }
}

template <int Heads>
void ScanMeanHeads(const ScanMeanArgs& a, int head) {
  constexpr int kPiecesPerBlock = kBlockTokens / kLanes16;
  constexpr int kPieces = kScanAccumulators / Heads;
  constexpr int kRest = kPieces < kPiecesPerBlock ? kPieces : kPiecesPerBlock;
  static_assert(kPiecesPerBlock % kRest == 0);
  std::int64_t offset[kMaxScanPlanes];
  std::int32_t pairs[kMaxScanPlanes * Heads];
  float base[Heads * kScanChunkBlocks];
  for (int p = 0; p < a.n_planes; ++p) {
    offset[p] = static_cast<std::int64_t>(a.plane[p]) * a.segment_blocks * 8;
    for (int h = 0; h < Heads; ++h) {
      const auto weight = static_cast<std::uint16_t>(a.weight[p * a.group + head + h]);
      pairs[p * Heads + h] = static_cast<std::int32_t>(weight * 0x10001u);
    }
  }
  MeanBase<Heads>(a, head, base);
  const MeanPass pass = {reinterpret_cast<const unsigned char*>(a.planes + a.first),
                         offset,
                         pairs,
                         base,
                         a.scale + head,
                         a.n_planes,
                         a.scores + head * a.stride,
                         a.stride};
  const int n = a.count * kPiecesPerBlock;
  int piece = 0;
  for (; piece + kPieces <= n; piece += kPieces) MeanPieces<Heads, kPieces>(pass, piece);
  for (; piece < n; piece += kRest) MeanPieces<Heads, kRest>(pass, piece);
}

void ScanMean(const ScanMeanArgs* args) {
  int head = 0;
  for (; head + 4 <= args->group; head += 4) ScanMeanHeads<4>(*args, head);
  for (; head + 2 <= args->group; head += 2) ScanMeanHeads<2>(*args, head);
  for (; head < args->group; ++head) ScanMeanHeads<1>(*args, head);
}

// The read channels of a chunk and their scales in kLanes blocks.
struct PaperPass {
  int n_active;
  std::int32_t channel[kMaxHeadDim];
  std::int32_t depth[kMaxHeadDim];
  float range[kMaxHeadDim * kLanes];
};

template <int Heads, int Pieces>
FATHOM_INLINE void PaperPieces(const ScanPaperArgs& a, const PaperPass& s, int head, int block,
                               int lane, int piece) {
  // 1 - 2^-depth: what all-zero bits of weights 2^-1, 2^-2, ... amount to.
  constexpr float kAllBits[kPlanes + 1] = {0, 0.5f, 0.75f, 0.875f, 0.9375f};
  F32 sum[Heads][Pieces];
  F32 base[Heads];
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
    base[h] = Zero();
#pragma GCC unroll 16
    for (int v = 0; v < Pieces; ++v) sum[h][v] = Zero();
  }
  for (int c = 0; c < s.n_active; ++c) {
    const int channel = s.channel[c];
    const F32 range = Set(s.range[c * kLanes + lane]);
    const F32 all = Set(kAllBits[s.depth[c]]);
    F32 weight[Heads];
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      weight[h] = Mul(Set(a.q[(head + h) * a.head_dim + channel]), range);
      base[h] = MulAdd(weight[h], all, base[h]);
    }
    for (int p = 0; p < s.depth[c]; ++p) {
      const std::int64_t plane = static_cast<std::int64_t>(channel) * kPlanes + p;
      const auto* word =
          reinterpret_cast<const unsigned char*>(a.planes + plane * a.segment_blocks + block);
      Mask32 mask[Pieces];
#pragma GCC unroll 16
      for (int v = 0; v < Pieces; ++v) mask[v] = LoadMask32(word, piece + v);
#pragma GCC unroll 16
      for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
        for (int v = 0; v < Pieces; ++v) sum[h][v] = MaskedAdd(sum[h][v], mask[v], weight[h]);
        weight[h] = Mul(weight[h], Set(0.5f));
      }
    }
  }
  float* out = a.scores + static_cast<std::int64_t>(block - a.first) * kBlockTokens +
               static_cast<std::int64_t>(piece) * kLanes;
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < Pieces; ++v) {
      Store(out + (head + h) * a.stride + v * kLanes, Sub(sum[h][v], base[h]));
    }
  }
}

template <int Heads>
void PaperBlock(const ScanPaperArgs& a, const PaperPass& s, int head, int block, int lane) {
  constexpr int kPiecesPerBlock = kBlockTokens / kLanes;
  constexpr int kWanted = kScanAccumulators / Heads;
  constexpr int kPieces = kWanted < kPiecesPerBlock ? kWanted : kPiecesPerBlock;
  for (int piece = 0; piece < kPiecesPerBlock; piece += kPieces) {
    PaperPieces<Heads, kPieces>(a, s, head, block, lane, piece);
  }
}

void LoadRanges(const ScanPaperArgs& a, int block, PaperPass* s) {
  for (int c = 0; c < s->n_active; ++c) {
    const Half* p = a.scales + static_cast<std::int64_t>(s->channel[c]) * a.segment_blocks + block;
    Half copy[kLanes] = {};
    if (block + kLanes > a.segment_blocks) {
      __builtin_memcpy(copy, p, static_cast<unsigned>(a.segment_blocks - block) * sizeof(Half));
      p = copy;
    }
    Store(s->range + c * kLanes, LoadHalf(p));
  }
}

void ScanPaper(const ScanPaperArgs* args) {
  const ScanPaperArgs& a = *args;
  PaperPass pass;
  pass.n_active = 0;
  for (int j = 0; j < a.head_dim; ++j) {
    if (a.depth[j] == 0) continue;
    pass.channel[pass.n_active] = j;
    pass.depth[pass.n_active++] = a.depth[j];
  }
  const int end = a.first + a.count;
  for (int first = a.first; first < end; first += kLanes) {
    LoadRanges(a, first, &pass);
    for (int block = first; block < end && block < first + kLanes; ++block) {
      int head = 0;
      for (; head + 4 <= a.group; head += 4) PaperBlock<4>(a, pass, head, block, block - first);
      for (; head + 2 <= a.group; head += 2) PaperBlock<2>(a, pass, head, block, block - first);
      for (; head < a.group; ++head) PaperBlock<1>(a, pass, head, block, block - first);
    }
  }
}
