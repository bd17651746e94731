// SPDX-License-Identifier: MIT
// Scan of the paper codec. Weights depend on the block (q times its scale), so sums are floats, in
// ascending channel order per token:
//   score = sum_j q a_j sum_p bit 2^-p - sum_j q a_j (1 - 2^-t_j)
// A plane word is a mask of tokens under which a broadcast weight is added, for up to four heads at
// once, so that a mask is made once per group. Bound by the masked adds.

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
          reinterpret_cast<const unsigned char*>(a.planes + plane * a.row_blocks + block);
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
