// SPDX-License-Identifier: MIT
// The base of every block by products of bytes: what its two kernels share (scan_base_wide_impl.h,
// scan_base_amx_impl.h). Included before them and after base_codes_vbmi.h.
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
constexpr int kBaseVectors = 4;  // of 16 blocks; a call has no more than kScanChunkBlocks
constexpr int kBaseVectorBytes = 64;
constexpr int kBaseQuadBytes = kBaseVectors * kBaseVectorBytes;
constexpr int kMaxBaseQuads = kMaxHeadDim / kBaseQuad;

constexpr int BaseQuads(int n_active) { return (n_active + kBaseQuad - 1) / kBaseQuad; }

// Channels in the order of a plan, as numbers of ScanBasePlanArgs::channel; -1 fills up the last
// quad.
struct BaseOrder {
  int n_quads;
  int n_large;  // the first quads, whose weights need all digits
  std::int16_t channel[kMaxHeadDim + kBaseQuad];
};

// True where two digits, -32896 .. 32639, do not hold a channel's weights.
bool IsLarge(const ScanBasePlanArgs& a, int c) {
  for (int h = 0; h < a.group; ++h) {
    if ((a.mean_weight[c * a.group + h] + 0x8080) >> 16 != 0) return true;
  }
  return false;
}

// Fills `row` too: [n_quads][kBaseQuad], bytes from the segment's first mean.
void OrderChannels(const ScanBasePlanArgs& a, BaseOrder* order, std::int32_t* row) {
  order->n_quads = BaseQuads(a.n_active);
  int n = 0;
  for (int c = 0; c < a.n_active; ++c) {
    if (IsLarge(a, c)) order->channel[n++] = static_cast<std::int16_t>(c);
  }
  order->n_large = BaseQuads(n);
  for (int c = 0; c < a.n_active; ++c) {
    if (!IsLarge(a, c)) order->channel[n++] = static_cast<std::int16_t>(c);
  }
  for (; n < order->n_quads * kBaseQuad; ++n) order->channel[n] = -1;
  const int row_bytes = a.mean_bits == 8 ? a.segment_blocks : a.segment_blocks / 2;
  for (int i = 0; i < n; ++i) {
    const int c = order->channel[i];
    row[i] = (c < 0 ? 0 : a.channel[c]) * row_bytes;
  }
}

// The digits of one head's weights in a quad, a byte per channel; returns the sum of the weights.
std::int32_t QuadDigits(const ScanBasePlanArgs& a, const BaseOrder& order, int quad, int head,
                        std::int32_t (&digit)[kDigits]) {
  std::uint32_t packed[kDigits] = {};
  std::int32_t total = 0;
  for (int j = 0; j < kBaseQuad; ++j) {
    const int c = order.channel[quad * kBaseQuad + j];
    std::int32_t weight = c >= 0 ? a.mean_weight[c * a.group + head] : 0;
    total += weight;
    for (std::uint32_t& p : packed) {
      const auto low = static_cast<std::int8_t>(weight);
      p |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(low)) << (8 * j);
      weight = (weight - low) >> 8;
    }
  }
  for (int d = 0; d < kDigits; ++d) digit[d] = static_cast<std::int32_t>(packed[d]);
  return total;
}

// What is added to a head's products: its constant, less what making codes >= 0 has added. total:
// of its weights.
std::int32_t BaseOffset(const ScanBasePlanArgs& a, int head, std::int32_t total) {
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
