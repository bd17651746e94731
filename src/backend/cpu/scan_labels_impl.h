// SPDX-License-Identifier: MIT
// Label scan: scores of the tokens of up to 64 blocks of one segment of packed codes.
//
// Weights first, kLanes blocks at a time, a block to a lane: products of query and scale, their
// largest, 8-bit weights, four channels of a block in a lane (a quad). Then block by block dot
// products of codes with broadcast quads, for up to four heads at once, so that codes are unpacked
// once per group. With kTokens a vector of codes holds as many tokens as it has lanes, and its
// bytes the quads of one unit, which shifts bring down one after the other. With kChannels the rows
// of four channels are interleaved into the same shape, a quad of 32 tokens in the low halves and
// of 32 others in the high ones, in a buffer of kLabelScratchBytes. Sums are integers, so
// neither order nor instruction set shows. Bound by memory where bytes are multiplied and added in
// one instruction; else by those: per block and head, 64 C / kLanes / 4 of each.

constexpr int kMaxQuads = kMaxHeadDim / 4;
constexpr int kQuadDwords = 32;  // of 64 tokens, two to a byte
constexpr int kRowBytes = kBlockTokens / 2;
constexpr int kLabelAhead = 2048;  // bytes that are asked for ahead of the codes

// Weights of kLanes blocks.
template <int Heads>
struct LabelWeights {
  std::int32_t quad[kMaxQuads * Heads * kLanes];  // [quad][head][block] bytes of four channels
  float base[Heads * kLanes];                     // [head][block] -(2^t - 1) / 2 times their sum
  float scale[Heads * kLanes];                    // [head][block]
};

// What all heads share. Channels are filled up to whole units by such with scale 0.
struct LabelPass {
  int n_quads;
  int planes;
  float q[kMaxGroup * kMaxHeadDim];       // [group][4 * n_quads]
  float range[kMaxHeadDim * kLanes];      // [4 * n_quads][block] scales of kLanes blocks
  const unsigned char* row[kMaxHeadDim];  // [4 * n_quads] first block of a channel (kChannels)
  const unsigned char* codes;             // of block codes_block: the segment's, or interleaved
  int codes_block;
};

FATHOM_INLINE const Half* ScaleRow(const ScanLabelsArgs& a, int c) {
  const int channel = a.layout == LabelLayout::kTokens ? c : a.channels[c];
  return a.scales + static_cast<std::int64_t>(channel) * a.segment_blocks;
}

// Weights of heads head .. of the blocks whose scales are in s.range.
template <int Heads>
void WeighLabels(const LabelPass& s, int head, LabelWeights<Heads>* w) {
  const int width = 4 * s.n_quads;
  const float* q = s.q + head * width;
  F32 most[Heads];
  for (int h = 0; h < Heads; ++h) most[h] = Zero();
  for (int c = 0; c < width; ++c) {
    const F32 range = Load(s.range + c * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      most[h] = MaxBits(most[h], Abs(Mul(Set(q[h * width + c]), range)));
    }
  }
  F32 steps[Heads];
  const F32 cell = Set(static_cast<float>(2.0 / (1 << s.planes)));
  for (int h = 0; h < Heads; ++h) {
    steps[h] = ZeroBelow(most[h], Set(0x1p-100f), Div(Set(127.0f), most[h]));
    const F32 scale = Mul(Div(most[h], Set(127.0f)), cell);
    Store(w->scale + h * kLanes, Add(scale, Sub(most[h], most[h])));  // NaN where not finite
  }
  Dot sum[Heads];
  for (int h = 0; h < Heads; ++h) sum[h] = ZeroDot();
  static_assert(kDotAdds<1> >= kMaxQuads);
  for (int c = 0; c < width; c += 4) {
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      I32 weight[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const F32 range = Load(s.range + (c + k) * kLanes);
        weight[k] = RoundToInt(Mul(Mul(Set(q[h * width + c + k]), range), steps[h]));
      }
      const I32 quad = PackBytes(weight);
      StoreInt(w->quad + (c / 4 * Heads + h) * kLanes, quad);
      sum[h] = AddToDot(sum[h], SetInt(0x01010101), quad);
    }
  }
  const F32 centre = Set(-0.5f * static_cast<float>((1 << s.planes) - 1));
  for (int h = 0; h < Heads; ++h) {
    Store(w->base + h * kLanes, Mul(IntToFloat(DotTotal(sum[h])), centre));
  }
}

// sum[h][v] += codes[v] . quad of head h
template <int Heads, int Vectors>
FATHOM_INLINE void AddQuad(const I32* codes, const std::int32_t* quad, Dot* sum) {
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) {
    const I32 weight = SetInt(quad[h * kLanes]);
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      sum[h * Vectors + v] = AddToDot(sum[h * Vectors + v], codes[v], weight);
    }
  }
}

// kTokens: a step is a unit; the sums are those of `Vectors` vectors of tokens.
template <int Heads, int Vectors, int Bits>
struct TokenCodes {
  static constexpr int kFields = 8 / Bits;  // quads of a unit
  static constexpr int kSums = Vectors;
  static constexpr int kMaxSteps = kMaxQuads / kFields;
  static constexpr int kSteps = kDotAdds<(1 << Bits) - 1> / kFields;  // that a Dot can hold
  const unsigned char* codes;                                         // of the first token
  const std::int32_t* quad;                                           // of the block

  FATHOM_INLINE void Add(int first, int end, Dot* sum) const {
    for (int u = first; u < end; ++u) {
      I32 x[Vectors];
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) {
        x[v] = LoadCodes(codes + static_cast<std::int64_t>(u) * kBlockTokens * 4 + v * kLanes * 4);
      }
#pragma GCC unroll 4
      for (int f = 0; f < kFields; ++f) {
        I32 field[Vectors];
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) {
          field[v] = LowBits<Bits>(x[v]);
          x[v] = ShiftBits<Bits>(x[v]);
        }
        AddQuad<Heads, Vectors>(field, quad + (u * kFields + f) * Heads * kLanes, sum);
      }
    }
  }
};

// kChannels, interleaved: a step is a quad; the sums are those of Vectors / 2 vectors of tokens and
// of as many 32 tokens behind.
template <int Heads, int Vectors>
struct ChannelCodes {
  static constexpr int kSums = Vectors;
  static constexpr int kMaxSteps = kMaxQuads;
  static constexpr int kSteps = kDotAdds<15>;
  const unsigned char* codes;
  const std::int32_t* quad;

  FATHOM_INLINE void Add(int first, int end, Dot* sum) const {
    for (int g = first; g < end; ++g) {
      I32 field[Vectors];
#pragma GCC unroll 16
      for (int v = 0; v < Vectors / 2; ++v) {
        const I32 x = LoadCodes(codes + (g * kQuadDwords + v * kLanes) * 4);
        field[v] = LowBits<4>(x);
        field[Vectors / 2 + v] = LowBits<4>(ShiftBits<4>(x));
      }
      AddQuad<Heads, Vectors>(field, quad + g * Heads * kLanes, sum);
    }
  }
};

// total: [Heads][kSums] over all steps.
template <int Heads, typename Codes>
FATHOM_INLINE void SumSteps(const Codes& codes, int n_steps, I32* total) {
  constexpr int kSums = Heads * Codes::kSums;
  Dot sum[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sum[i] = ZeroDot();
  codes.Add(0, n_steps < Codes::kSteps ? n_steps : Codes::kSteps, sum);
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) total[i] = DotTotal(sum[i]);
  if (Codes::kSteps >= Codes::kMaxSteps) return;
  for (int first = Codes::kSteps; first < n_steps; first += Codes::kSteps) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sum[i] = ZeroDot();
    const int end = first + Codes::kSteps;
    codes.Add(first, n_steps < end ? n_steps : end, sum);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) total[i] = AddInt(total[i], DotTotal(sum[i]));
  }
}

// Scores of one head from sums of Vectors vectors of tokens.
template <int Vectors>
FATHOM_INLINE void StoreScores(const I32* total, F32 base, F32 scale, float* out) {
#pragma GCC unroll 16
  for (int v = 0; v < Vectors; ++v) {
    Store(out + v * kLanes, Mul(Add(IntToFloat(total[v]), base), scale));
  }
}

template <int Heads>
constexpr int kLabelVectors =
    kScanAccumulators / Heads < kBlockTokens / kLanes ? kScanAccumulators / Heads
                                                      : kBlockTokens / kLanes;

// One block, whose weights are those of the lane. out: the first head's scores.
template <int Heads, int Bits>
__attribute__((noinline)) void TokenBlock(const unsigned char* codes, const LabelPass& s,
                                          const LabelWeights<Heads>& w, int lane, float* out,
                                          std::int64_t stride) {
  constexpr int kVectors = kLabelVectors<Heads>;
  for (int v = 0; v < kBlockTokens / kLanes; v += kVectors, out += kVectors * kLanes) {
    const TokenCodes<Heads, kVectors, Bits> source = {codes + v * kLanes * 4, w.quad + lane};
    I32 total[Heads * kVectors];
    SumSteps<Heads>(source, s.n_quads * Bits / 8, total);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      StoreScores<kVectors>(total + h * kVectors, Set(w.base[h * kLanes + lane]),
                            Set(w.scale[h * kLanes + lane]), out + h * stride);
    }
  }
}

template <int Heads>
__attribute__((noinline)) void ChannelBlock(const unsigned char* codes, const LabelPass& s,
                                            const LabelWeights<Heads>& w, int lane, float* out,
                                            std::int64_t stride) {
  constexpr int kHalf = kLabelVectors<Heads> / 2;
  for (int v = 0; v < kQuadDwords / kLanes; v += kHalf, out += kHalf * kLanes) {
    const ChannelCodes<Heads, 2 * kHalf> source = {codes + v * kLanes * 4, w.quad + lane};
    I32 total[Heads * 2 * kHalf];
    SumSteps<Heads>(source, s.n_quads, total);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const F32 base = Set(w.base[h * kLanes + lane]);
      const F32 scale = Set(w.scale[h * kLanes + lane]);
      StoreScores<kHalf>(total + 2 * h * kHalf, base, scale, out + h * stride);
      StoreScores<kHalf>(total + (2 * h + 1) * kHalf, base, scale, out + h * stride + 32);
    }
  }
}

// Bytes of a block of codes.
FATHOM_INLINE std::int64_t BlockBytes(const LabelPass& s) {
  return static_cast<std::int64_t>(s.n_quads) * kBlockTokens * (s.planes > 2 ? 2 : 1);
}

// Asks for what is scanned kLabelAhead bytes after the block: the processor's own prefetching ends
// at each page.
FATHOM_INLINE void PrefetchCodes(const unsigned char* codes, std::int64_t bytes) {
  constexpr int kLine = 64;
  for (std::int64_t i = 0; i < bytes; i += kLine) Prefetch(codes + kLabelAhead + i);
}

// The rows of blocks first .. first + n - 1 into the scratch space, four channels at a time along
// their whole length: runs of kilobytes, which memory gives several times faster than lines.
void InterleaveBlocks(const ScanLabelsArgs& a, LabelPass* s, int first, int n) {
  for (int g = 0; g < s->n_quads; ++g) {
    const unsigned char* const* row = s->row + 4 * g;
    const bool ahead = g + 1 < s->n_quads;
    for (int b = 0; b < n; ++b) {
      const std::int64_t at = static_cast<std::int64_t>(first + b) * kRowBytes;
      for (int k = 0; ahead && b % 2 == 0 && k < 4; ++k) {
        Prefetch(row[4 + k] + at);
      }
      InterleaveRows(row, at, a.scratch + (b * s->n_quads + g) * kQuadDwords);
    }
  }
  s->codes = reinterpret_cast<const unsigned char*>(a.scratch);
  s->codes_block = first;
}

// Blocks first .. first + n - 1 of the segment, heads head .. of the group.
template <int Heads>
void LabelBlocks(const ScanLabelsArgs& a, const LabelPass& s, int head, int first, int n) {
  LabelWeights<Heads> w;
  WeighLabels<Heads>(s, head, &w);
  for (int b = 0; b < n; ++b) {
    const int block = first + b;
    float* out =
        a.scores + head * a.stride + static_cast<std::int64_t>(block - a.first) * kBlockTokens;
    const unsigned char* codes = s.codes + (block - s.codes_block) * BlockBytes(s);
    if (a.layout == LabelLayout::kChannels) {
      ChannelBlock<Heads>(codes, s, w, b, out, a.stride);
      continue;
    }
    if (head == 0) PrefetchCodes(codes, BlockBytes(s));
    if (a.planes > 2) {
      TokenBlock<Heads, 4>(codes, s, w, b, out, a.stride);
    } else {
      TokenBlock<Heads, 2>(codes, s, w, b, out, a.stride);
    }
  }
}

void StartPass(const ScanLabelsArgs& a, LabelPass* s) {
  const int unit = a.layout == LabelLayout::kChannels ? 4 : a.planes > 2 ? 8 : 16;
  const int width = (a.n_channels + unit - 1) / unit * unit;
  s->n_quads = width / 4;
  s->planes = a.planes;
  for (int h = 0; h < a.group; ++h) {
    for (int c = 0; c < width; ++c) {
      s->q[h * width + c] = c < a.n_channels ? a.q[h * a.n_channels + c] : 0.0f;
    }
  }
  for (int c = a.n_channels; c < width; ++c) Store(s->range + c * kLanes, Zero());
  for (int c = 0; a.layout == LabelLayout::kChannels && c < width; ++c) {
    const std::int64_t channel = a.channels[c < a.n_channels ? c : 0];
    s->row[c] = a.codes + channel * a.segment_blocks * kRowBytes;
  }
  s->codes = a.codes;
  s->codes_block = 0;
}

// Blocks whose interleaved rows fit the scratch space.
int InterleavedBlocks(const LabelPass& s) {
  constexpr int kBatch = 16;
  const int bytes = (s.n_quads > 0 ? s.n_quads : 1) * kQuadDwords * 4;
  const int fit = kLabelScratchBytes / bytes / kBatch * kBatch;
  return fit < kScanChunkBlocks ? fit : kScanChunkBlocks;
}

void ScanLabels(const ScanLabelsArgs* args) {
  const ScanLabelsArgs& a = *args;
  LabelPass pass;
  StartPass(a, &pass);
  const int end = a.first + a.count;
  const bool rows = a.layout == LabelLayout::kChannels;
  const int chunk = rows ? InterleavedBlocks(pass) : a.count;
  for (int start = a.first; start < end; start += chunk) {
    const int stop = end - start < chunk ? end : start + chunk;
    if (rows) InterleaveBlocks(a, &pass, start, stop - start);
    for (int first = start; first < stop; first += kLanes) {
      const int n = stop - first < kLanes ? stop - first : kLanes;
      for (int c = 0; c < a.n_channels; ++c) {
        Store(pass.range + c * kLanes, LoadHalf(ScaleRow(a, c) + first));
      }
      int head = 0;
      for (; head + 4 <= a.group; head += 4) LabelBlocks<4>(a, pass, head, first, n);
      for (; head + 2 <= a.group; head += 2) LabelBlocks<2>(a, pass, head, first, n);
      for (; head < a.group; ++head) LabelBlocks<1>(a, pass, head, first, n);
    }
  }
}
