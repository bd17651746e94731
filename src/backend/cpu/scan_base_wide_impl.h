// SPDX-License-Identifier: MIT
// The base of every block with AVX-512 VBMI and VNNI.
//
// A weight is three digits of 8 bits, w = d0 + 256 d1 + 65536 d2 with digits in -128 .. 127 (|w| <
// 2^22, since codes up to 7 keep below 2^24), and a code is made a byte >= 0 by adding what it can
// be below 0. Then four channels of a block are a doubleword, and `vpdpbusd` multiplies them by
// four digits: three instructions for 16 blocks, four channels and one head. Sums are exact in 32
// bits, of which the last addition may use all: modulo 2^32, base is right.
//
// The codes of a call are brought into that order once, for all heads, into a buffer that stays in
// the first-level cache: per four channels and 64 blocks four loads, four byte permutations of two
// vectors and two steps each for the nibbles. The products bind.

static_assert(kScanChunkBlocks == 64);
constexpr int kDigits = 3;
constexpr int kBaseQuad = 4;     // channels of a doubleword
constexpr int kBaseVectors = 4;  // of 16 blocks; a call has no more than kScanChunkBlocks
constexpr int kMaxBaseQuads = kMaxHeadDim / kBaseQuad;

// Digits of the weights of up to four heads: [quad][digit][head] of doublewords, and what the
// codes' offset adds to each head.
struct BaseDigits {
  alignas(16) std::int32_t digit[kMaxBaseQuads * kDigits * kBaseQuad];
  std::int32_t offset[kBaseQuad];
};

// Weights of channels 4 i .. 4 i + 3 for Heads heads, [head][channel] in doublewords; zeros beyond
// the last channel.
template <int Heads>
FATHOM_INLINE I32 LoadQuad(const ScanBaseArgs& a, int head, int quad) {
  const auto lanes = static_cast<__mmask8>((1 << Heads) - 1);
  __m128i row[kBaseQuad];
#pragma GCC unroll 4
  for (int j = 0; j < kBaseQuad; ++j) {
    const int c = quad * kBaseQuad + j;
    const auto some = static_cast<__mmask8>(c < a.n_active ? lanes : 0);
    const int at = c < a.n_active ? c : 0;
    row[j] = _mm_maskz_loadu_epi32(some, a.mean_weight + at * a.group + head);
  }
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row[0]), row[1], 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row[2]), row[3], 1);
  const I32 all = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
}

template <int Heads>
FATHOM_INLINE void MakeDigits(const ScanBaseArgs& a, int head, int n_quads, BaseDigits* out) {
  I32 total = _mm512_setzero_si512();
  for (int quad = 0; quad < n_quads; ++quad) {
    I32 weight = LoadQuad<Heads>(a, head, quad);
    total = AddInt(total, weight);
    for (int d = 0; d < kDigits; ++d) {
      auto* at = reinterpret_cast<__m128i*>(out->digit + (quad * kDigits + d) * kBaseQuad);
      _mm_store_si128(at, _mm512_cvtepi32_epi8(weight));
      // The digit is the low byte as a signed number; what is left is a multiple of 256.
      const I32 digit = _mm512_srai_epi32(_mm512_slli_epi32(weight, 24), 24);
      weight = _mm512_srai_epi32(SubInt(weight, digit), 8);
    }
  }
  std::int32_t sums[kLanes];
  StoreInt(sums, total);
  const int shift = a.mean_bits == 8 ? 128 : 8;
  for (int h = 0; h < Heads; ++h) {
    std::int32_t sum = 0;
    for (int j = 0; j < kBaseQuad; ++j) sum += sums[h * kBaseQuad + j];
    out->offset[h] = a.constant[head + h] - shift * sum;
  }
}

// Codes of four channels made non-negative, of up to 64 blocks: doubleword i of vector v holds
// those of block 16 v + i. What lies beyond the call's blocks is anything.
FATHOM_INLINE void PairNibbles(const std::uint8_t* const* row, __mmask32 bytes, Bytes* out) {
  const auto load = [bytes](const std::uint8_t* p) { return _mm256_maskz_loadu_epi8(bytes, p); };
  const Bytes low = _mm512_inserti64x4(_mm512_castsi256_si512(load(row[0])), load(row[1]), 1);
  const Bytes high = _mm512_inserti64x4(_mm512_castsi256_si512(load(row[2])), load(row[3]), 1);
  // Byte j of doubleword i comes from byte i / 2 of row j, which holds two codes.
  const Bytes half = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const Bytes from = AddBytes(_mm512_mullo_epi32(half, _mm512_set1_epi32(0x01010101)),
                              _mm512_set1_epi32(0x60402000));
#pragma GCC unroll 4
  for (int v = 0; v < kBaseVectors; ++v) {
    const Bytes codes = _mm512_permutex2var_epi8(low, AddBytes(from, SetByte(8 * v)), high);
    const Bytes own = _mm512_mask_srli_epi32(codes, 0xAAAA, codes, 4);
    StoreBytes(out + v, _mm512_and_si512(own, SetByte(15)));
  }
}

FATHOM_INLINE void PairBytes(const std::uint8_t* const* row, std::uint64_t bytes, Bytes* out) {
  const Bytes lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Bytes from = AddBytes(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)),
                              _mm512_set1_epi32(0x30201000));
  for (int v = 0; v < kBaseVectors; ++v, bytes >>= 16) {
    const auto mask = static_cast<__mmask16>(bytes);
    __m128i x[kBaseQuad];
    for (int j = 0; j < kBaseQuad; ++j) x[j] = _mm_maskz_loadu_epi8(mask, row[j] + 16 * v);
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(x[0]), x[1], 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(x[2]), x[3], 1);
    const Bytes all = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    StoreBytes(out + v, _mm512_xor_si512(_mm512_permutexvar_epi8(from, all), SetByte(128)));
  }
}

void PairCodes(const ScanBaseArgs& a, int n_quads, Bytes* out) {
  const bool nibbles = a.mean_bits == 4;
  const int row_bytes = nibbles ? a.segment_blocks / 2 : a.segment_blocks;
  const int first = nibbles ? a.first / 2 : a.first;
  const int left = row_bytes - first;
  const std::uint64_t bytes = left >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
  for (int quad = 0; quad < n_quads; ++quad, out += kBaseVectors) {
    const std::uint8_t* row[kBaseQuad];
    for (int j = 0; j < kBaseQuad; ++j) {
      const int c = quad * kBaseQuad + j;
      row[j] = a.side + std::int64_t{a.channel[c < a.n_active ? c : 0]} * row_bytes + first;
    }
    if (nibbles) {
      PairNibbles(row, static_cast<__mmask32>(bytes), out);
    } else {
      PairBytes(row, bytes, out);
    }
  }
}

template <int Heads>
void WideBaseHeads(const ScanBaseArgs& a, int head, int n_quads, const Bytes* codes) {
  BaseDigits digits;
  MakeDigits<Heads>(a, head, n_quads, &digits);
  for (int b = 0; b < a.count; b += kLanes, ++codes) {
    I32 sum[Heads][kDigits];
#pragma GCC unroll 12
    for (int i = 0; i < Heads * kDigits; ++i) sum[i / kDigits][i % kDigits] = SetInt(0);
    for (int quad = 0; quad < n_quads; ++quad) {
      const Bytes x = LoadBytes(codes + quad * kBaseVectors);
      const std::int32_t* digit = digits.digit + quad * kDigits * kBaseQuad;
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 3
        for (int d = 0; d < kDigits; ++d) {
          sum[h][d] = _mm512_dpbusd_epi32(sum[h][d], x, SetInt(digit[d * kBaseQuad + h]));
        }
      }
    }
    for (int h = 0; h < Heads; ++h) {
      const I32 high = AddInt(sum[h][1], _mm512_slli_epi32(sum[h][2], 8));
      const I32 all = AddInt(sum[h][0], _mm512_slli_epi32(high, 8));
      StoreFirstInts(a.base + (head + h) * a.stride + b, AddInt(all, SetInt(digits.offset[h])),
                     a.count - b);
    }
  }
}

void WideBase(const ScanBaseArgs* args) {
  Bytes codes[kMaxBaseQuads * kBaseVectors];
  const int n_quads = (args->n_active + kBaseQuad - 1) / kBaseQuad;
  PairCodes(*args, n_quads, codes);
  int head = 0;
  for (; head + 4 <= args->group; head += 4) WideBaseHeads<4>(*args, head, n_quads, codes);
  for (; head + 2 <= args->group; head += 2) WideBaseHeads<2>(*args, head, n_quads, codes);
  for (; head < args->group; ++head) WideBaseHeads<1>(*args, head, n_quads, codes);
}
