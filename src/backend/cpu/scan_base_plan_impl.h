// SPDX-License-Identifier: MIT
// The base of every block by products of bytes: the plan, and codes in its order, for the kernel of
// scan_base_wide_impl.h. Included before it and after base_codes_vbmi.h.
//
// A weight is three digits of 8 bits, w = d0 + 256 d1 + 65536 d2 with digits in -128 .. 127 (|w| <
// 2^22, since codes up to 7 keep below 2^24), and a code is a byte >= 0, so that four channels of a
// block, a quad, are a doubleword that one instruction multiplies by four digits. Sums are exact in
// 32 bits, of which the last addition may use all: modulo 2^32, base is right.
//
// Few weights need the third digit. A plan, made once per table, puts their channels first; it also
// has the digits, so that a call is left with the codes. These are brought into the plan's order
// once, for all heads, into a buffer that stays in the first-level cache.

static_assert(kScanChunkBlocks == 64);
constexpr int kDigits = 3;
constexpr int kBaseQuad = 4;     // channels of a doubleword
constexpr int kBaseHeads = 4;    // whose digits are brought into order together
constexpr int kBaseVectors = 4;  // of 16 blocks; a call has no more than kScanChunkBlocks
constexpr int kBaseVectorBytes = 64;
constexpr int kBaseQuadBytes = kBaseVectors * kBaseVectorBytes;
constexpr int kMaxBaseQuads = kMaxHeadDim / kBaseQuad;

constexpr int BaseQuads(int n_active) { return (n_active + kBaseQuad - 1) / kBaseQuad; }

// All weights in bytes, [n_active][group] as they lie in ScanBasePlanArgs. Every thread of a scan
// makes its own plan, so this is done for many at a time.
struct WeightDigits {
  static constexpr int kMost =
      kMaxHeadDim * kMaxGroup + kBaseHeads;  // four may be read at the last
  // The third is 0 where two, -32896 .. 32639, hold the weight.
  std::int8_t digit[kDigits][kMost];
};

void SplitWeights(const ScanBasePlanArgs& a, WeightDigits* out) {
  const std::int32_t* __restrict weight = a.mean_weight;
  std::int8_t* __restrict low = out->digit[0];
  std::int8_t* __restrict middle = out->digit[1];
  std::int8_t* __restrict high = out->digit[2];
  const int n = a.n_active * a.group;
  for (int i = 0; i < n; ++i) {
    const std::int32_t w = weight[i];
    const std::int32_t w1 = (w + 0x80) >> 8, w2 = (w1 + 0x80) >> 8;  // what is left above a digit
    low[i] = static_cast<std::int8_t>(w);
    middle[i] = static_cast<std::int8_t>(w1);
    high[i] = static_cast<std::int8_t>(w2);
  }
  for (int i = n; i < n + kBaseHeads; ++i) low[i] = middle[i] = high[i] = 0;
}

// Channels in the order of a plan, as numbers of ScanBasePlanArgs::channel; -1 fills up the last
// quad.
struct BaseOrder {
  int n_quads;
  int n_large;  // the first quads, whose weights need all digits
  std::int16_t channel[kMaxHeadDim + kBaseQuad];
};

// Fills `row` too: [n_quads][kBaseQuad], bytes from the segment's first mean.
void OrderChannels(const ScanBasePlanArgs& a, const WeightDigits& digits, BaseOrder* order,
                   std::int32_t* row) {
  const auto is_large = [&](int c) {
    int any = 0;
    for (int h = 0; h < a.group; ++h) any |= digits.digit[kDigits - 1][c * a.group + h];
    return any != 0;
  };
  std::int16_t others[kMaxHeadDim];
  int n = 0, n_others = 0;
  for (int c = 0; c < a.n_active; ++c) {
    if (is_large(c)) {
      order->channel[n++] = static_cast<std::int16_t>(c);
    } else {
      others[n_others++] = static_cast<std::int16_t>(c);
    }
  }
  order->n_large = BaseQuads(n);
  for (int i = 0; i < n_others; ++i) order->channel[n++] = others[i];
  order->n_quads = BaseQuads(a.n_active);
  for (; n < order->n_quads * kBaseQuad; ++n) order->channel[n] = -1;
  const int row_bytes = a.mean_bits == 8 ? a.segment_blocks : a.segment_blocks / 2;
  for (int i = 0; i < n; ++i) {
    const int c = order->channel[i];
    row[i] = (c < 0 ? 0 : a.channel[c]) * row_bytes;
  }
}

// One digit of heads head .. head + 3 in a quad: a doubleword per head, a byte per channel; of
// heads beyond the group anything.
FATHOM_INLINE void QuadDigits(const std::int8_t* digit, int group, const BaseOrder& order, int quad,
                              int head, std::int32_t* out) {
  using Bytes16 = unsigned char __attribute__((vector_size(16)));
  std::uint32_t of_channel[kBaseQuad] = {};
  for (int j = 0; j < kBaseQuad; ++j) {
    const int c = order.channel[quad * kBaseQuad + j];
    if (c >= 0) __builtin_memcpy(&of_channel[j], digit + c * group + head, sizeof(std::uint32_t));
  }
  Bytes16 x;
  __builtin_memcpy(&x, of_channel, sizeof x);
  x = __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __builtin_memcpy(out, &x, sizeof x);
}

// What is added to a head's products: its constant, less what making codes >= 0 has added.
std::int32_t BaseOffset(const ScanBasePlanArgs& a, int head) {
  std::int32_t total = 0;
  for (int c = 0; c < a.n_active; ++c) total += a.mean_weight[c * a.group + head];
  return a.constant[head] - (a.mean_bits == 8 ? 128 : 8) * total;
}

// Codes of the call's blocks, made non-negative, in doublewords of a quad: [n_quads][kBaseVectors]
// vectors of 16 blocks, as PairNibbles and PairBytes write them. What lies beyond the call's blocks
// is anything.
void PairCodes(const ScanBaseArgs& a, int n_quads, const std::int32_t* row, unsigned char* out) {
  const bool nibbles = a.mean_bits == 4;
  const int row_bytes = nibbles ? a.segment_blocks / 2 : a.segment_blocks;
  const int first = nibbles ? a.first / 2 : a.first;
  const std::uint8_t* side = a.side + first;
  const int left = row_bytes - first;
  const unsigned char* end = out + n_quads * kBaseQuadBytes;
  if (nibbles) {
    for (; out != end; out += kBaseQuadBytes, row += kBaseQuad) PairNibbles(side, row, left, out);
  } else {
    for (; out != end; out += kBaseQuadBytes, row += kBaseQuad) PairBytes(side, row, left, out);
  }
}

// Writes the bases of blocks b .. b + 2 kLanes - 1 of one head, from the sums of two vectors of
// codes.
template <bool Nibbles>
FATHOM_INLINE void StoreBases(const ScanBaseArgs& a, int head, int b, I32 offset, I32 (&x)[2]) {
  if (Nibbles) {
    const I32 even = SubInt(x[0], x[1]);
    ZipInts(even, Sixteenth(x[1]), x);
  }
  std::int32_t* out = a.base + head * a.stride + b;
  StoreFirstInts(out, AddInt(x[0], offset), a.count - b);
  if (a.count - b > kLanes) {
    StoreFirstInts(out + kLanes, AddInt(x[1], offset), a.count - b - kLanes);
  }
}
