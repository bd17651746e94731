// SPDX-License-Identifier: MIT
// The base of every block with AVX-512 VBMI and VNNI.
//
// A weight is three digits of 8 bits, w = d0 + 256 d1 + 65536 d2 with digits in -128 .. 127 (|w| <
// 2^22, since codes up to 7 keep below 2^24), and a code is made a byte >= 0 by adding what it can
// be below 0. Then four channels of a block are a doubleword, and `vpdpbusd` multiplies them by
// four digits: one instruction per digit for 16 blocks, four channels and one head. Sums are exact
// in 32 bits, of which the last addition may use all: modulo 2^32, base is right.
//
// Few weights need the third digit. The plan, made once per table, puts their channels first; it
// also has the digits, so that a call is left with the codes. These are brought into that order
// once, for all heads, into a buffer that stays in the first-level cache. The products bind.

static_assert(kScanChunkBlocks == 64);
constexpr int kDigits = 3;
constexpr int kBaseQuad = 4;     // channels of a doubleword
constexpr int kBaseVectors = 4;  // of 16 blocks; a call has no more than kScanChunkBlocks
constexpr int kMaxBaseQuads = kMaxHeadDim / kBaseQuad;

// What follows it: std::int32_t row[n_quads][kBaseQuad], bytes from the segment's first mean, and
// for every batch of heads (BaseBatch) BaseDigits with std::int32_t digit[n_quads][kDigits][4
// heads].
struct BasePlan {
  std::int32_t n_quads;
  std::int32_t n_large;  // the first quads, whose weights need all digits
  std::int32_t unused[14];
  const std::int32_t* rows() const { return reinterpret_cast<const std::int32_t*>(this + 1); }
};
struct BaseDigits {
  std::int32_t offset[kBaseQuad];  // constant, and what the codes' offset adds, of each head
  const std::int32_t* digits() const { return reinterpret_cast<const std::int32_t*>(this + 1); }
};
static_assert(sizeof(BasePlan) == 64 && sizeof(BaseDigits) == 16);

// Heads that are done together: four, then two, then one.
FATHOM_INLINE int BaseBatch(int heads_left) {
  return heads_left >= 4 ? 4 : heads_left >= 2 ? 2 : 1;
}
FATHOM_INLINE std::int64_t BaseDigitsBytes(int n_quads) {
  return static_cast<std::int64_t>(sizeof(BaseDigits)) + std::int64_t{n_quads} * kDigits * 16;
}

std::int64_t WideBasePlanBytes(int n_active, int group) {
  const int n_quads = (n_active + kBaseQuad - 1) / kBaseQuad;
  std::int64_t bytes = static_cast<std::int64_t>(sizeof(BasePlan)) + n_quads * 16;
  for (int head = 0; head < group; head += BaseBatch(group - head)) {
    bytes += BaseDigitsBytes(n_quads);
  }
  return bytes;
}

// True where two digits, -32896 .. 32639, do not hold a channel's weights.
bool IsLarge(const ScanBasePlanArgs& a, int c) {
  for (int h = 0; h < a.group; ++h) {
    if ((a.mean_weight[c * a.group + h] + 0x8080) >> 16 != 0) return true;
  }
  return false;
}

// Fills `digits` for the heads head .. head + n - 1. order: of the channels, n_quads * 4, with -1
// where there are no more.
void MakeDigits(const ScanBasePlanArgs& a, const std::int16_t* order, int n_quads, int head, int n,
                BaseDigits* out) {
  auto* digit = const_cast<std::int32_t*>(out->digits());
  const int shift = a.mean_bits == 8 ? 128 : 8;
  for (int h = 0; h < kBaseQuad; ++h) {
    std::int32_t total = 0;
    for (int quad = 0; quad < n_quads; ++quad) {
      std::uint32_t packed[kDigits] = {};
      for (int j = 0; j < kBaseQuad; ++j) {
        const int c = order[quad * kBaseQuad + j];
        std::int32_t weight = h < n && c >= 0 ? a.mean_weight[c * a.group + head + h] : 0;
        total += weight;
        for (int d = 0; d < kDigits; ++d) {
          const auto low = static_cast<std::int8_t>(weight);
          packed[d] |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(low)) << (8 * j);
          weight = (weight - low) >> 8;
        }
      }
      for (int d = 0; d < kDigits; ++d) {
        digit[(quad * kDigits + d) * kBaseQuad + h] = static_cast<std::int32_t>(packed[d]);
      }
    }
    out->offset[h] = h < n ? a.constant[head + h] - shift * total : 0;
  }
}

void MakeWideBasePlan(const ScanBasePlanArgs* args) {
  const ScanBasePlanArgs& a = *args;
  auto* plan = static_cast<BasePlan*>(a.out);
  plan->n_quads = (a.n_active + kBaseQuad - 1) / kBaseQuad;
  std::int16_t order[kMaxHeadDim + kBaseQuad];
  int n = 0;
  for (int large = 1; large >= 0; --large) {
    for (int c = 0; c < a.n_active; ++c) {
      if (IsLarge(a, c) == (large != 0)) order[n++] = static_cast<std::int16_t>(c);
    }
    if (large != 0) plan->n_large = (n + kBaseQuad - 1) / kBaseQuad;
  }
  for (; n < plan->n_quads * kBaseQuad; ++n) order[n] = -1;
  auto* row = const_cast<std::int32_t*>(plan->rows());
  const int row_bytes = a.mean_bits == 8 ? a.segment_blocks : a.segment_blocks / 2;
  for (int i = 0; i < n; ++i) row[i] = (order[i] < 0 ? 0 : a.channel[order[i]]) * row_bytes;
  auto* at = reinterpret_cast<unsigned char*>(row + n);
  for (int head = 0; head < a.group; head += BaseBatch(a.group - head)) {
    MakeDigits(a, order, plan->n_quads, head, BaseBatch(a.group - head),
               reinterpret_cast<BaseDigits*>(at));
    at += BaseDigitsBytes(plan->n_quads);
  }
}

// Codes of four channels made non-negative, of up to 64 blocks, in doublewords: vectors 2 v and
// 2 v + 1 hold those of the even and of the odd ones of blocks 32 v .. 32 v + 31. What lies beyond
// the call's blocks is anything.
FATHOM_INLINE void PairNibbles(const std::uint8_t* side, const std::int32_t* row, __mmask32 bytes,
                               Bytes* out) {
  const auto load = [=](int j) { return _mm256_maskz_loadu_epi8(bytes, side + row[j]); };
  const Bytes low = _mm512_inserti64x4(_mm512_castsi256_si512(load(0)), load(1), 1);
  const Bytes high = _mm512_inserti64x4(_mm512_castsi256_si512(load(2)), load(3), 1);
  // Byte j of doubleword i comes from byte i of row j, which holds the codes of two blocks.
  const Bytes lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Bytes from = AddBytes(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)),
                              _mm512_set1_epi32(0x60402000));
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const Bytes codes = _mm512_permutex2var_epi8(low, AddBytes(from, SetByte(16 * v)), high);
    StoreBytes(out + 2 * v, _mm512_and_si512(codes, SetByte(15)));
    StoreBytes(out + 2 * v + 1, _mm512_and_si512(_mm512_srli_epi16(codes, 4), SetByte(15)));
  }
}

// The same for codes of a byte: vector v holds those of blocks 16 v .. 16 v + 15.
FATHOM_INLINE void PairBytes(const std::uint8_t* side, const std::int32_t* row, std::uint64_t bytes,
                             Bytes* out) {
  const Bytes lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Bytes from = AddBytes(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101)),
                              _mm512_set1_epi32(0x30201000));
  for (int v = 0; v < kBaseVectors; ++v, bytes >>= 16) {
    const auto mask = static_cast<__mmask16>(bytes);
    __m128i x[kBaseQuad];
    for (int j = 0; j < kBaseQuad; ++j) x[j] = _mm_maskz_loadu_epi8(mask, side + row[j] + 16 * v);
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(x[0]), x[1], 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(x[2]), x[3], 1);
    const Bytes all = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    StoreBytes(out + v, _mm512_xor_si512(_mm512_permutexvar_epi8(from, all), SetByte(128)));
  }
}

void PairCodes(const ScanBaseArgs& a, const BasePlan& plan, Bytes* out) {
  const bool nibbles = a.mean_bits == 4;
  const int row_bytes = nibbles ? a.segment_blocks / 2 : a.segment_blocks;
  const int first = nibbles ? a.first / 2 : a.first;
  const int left = row_bytes - first;
  const std::uint64_t bytes = left >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
  const std::int32_t* row = plan.rows();
  for (int quad = 0; quad < plan.n_quads; ++quad, out += kBaseVectors, row += kBaseQuad) {
    if (nibbles) {
      PairNibbles(a.side + first, row, static_cast<__mmask32>(bytes), out);
    } else {
      PairBytes(a.side + first, row, bytes, out);
    }
  }
}

// Adds the products of quads begin .. end - 1 to the sums of two vectors of codes.
template <int Heads, int Digits>
FATHOM_INLINE void AddProducts(const Bytes* codes, const std::int32_t* digit, int begin, int end,
                               I32 (&sum)[2][Heads][kDigits]) {
  for (int quad = begin; quad < end; ++quad) {
    const Bytes x[2] = {LoadBytes(codes + quad * kBaseVectors),
                        LoadBytes(codes + quad * kBaseVectors + 1)};
    const std::int32_t* at = digit + quad * kDigits * kBaseQuad;
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 3
      for (int d = 0; d < Digits; ++d) {
        const I32 w = SetInt(at[d * kBaseQuad + h]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[v][h][d] = _mm512_dpbusd_epi32(sum[v][h][d], x[v], w);
      }
    }
  }
}

template <int Heads>
void WideBaseHeads(const ScanBaseArgs& a, const BasePlan& plan, const BaseDigits& digits, int head,
                   const Bytes* codes) {
  const I32 zip_low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  for (int b = 0; b < a.count; b += 2 * kLanes, codes += 2) {
    I32 sum[2][Heads][kDigits];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * Heads * kDigits; ++i) {
      sum[i % 2][i / 2 / kDigits][i / 2 % kDigits] = SetInt(0);
    }
    AddProducts<Heads, kDigits>(codes, digits.digits(), 0, plan.n_large, sum);
    AddProducts<Heads, 2>(codes, digits.digits(), plan.n_large, plan.n_quads, sum);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      I32 base[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const I32 high = AddInt(sum[v][h][1], _mm512_slli_epi32(sum[v][h][2], 8));
        base[v] =
            AddInt(AddInt(sum[v][h][0], _mm512_slli_epi32(high, 8)), SetInt(digits.offset[h]));
      }
      if (a.mean_bits == 4) {  // even and odd blocks
        const I32 low = _mm512_permutex2var_epi32(base[0], zip_low, base[1]);
        base[1] = _mm512_permutex2var_epi32(base[0], AddInt(zip_low, SetInt(8)), base[1]);
        base[0] = low;
      }
      std::int32_t* out = a.base + (head + h) * a.stride + b;
      StoreFirstInts(out, base[0], a.count - b);
      if (a.count - b > kLanes) StoreFirstInts(out + kLanes, base[1], a.count - b - kLanes);
    }
  }
}

void WideBase(const ScanBaseArgs* args) {
  const ScanBaseArgs& a = *args;
  const auto& plan = *static_cast<const BasePlan*>(a.plan);
  Bytes codes[kMaxBaseQuads * kBaseVectors];
  PairCodes(a, plan, codes);
  const auto* at = reinterpret_cast<const unsigned char*>(plan.rows() + plan.n_quads * kBaseQuad);
  for (int head = 0; head < a.group; at += BaseDigitsBytes(plan.n_quads)) {
    const auto& digits = *reinterpret_cast<const BaseDigits*>(at);
    const int heads = BaseBatch(a.group - head);
    if (heads == 4) {
      WideBaseHeads<4>(a, plan, digits, head, codes);
    } else if (heads == 2) {
      WideBaseHeads<2>(a, plan, digits, head, codes);
    } else {
      WideBaseHeads<1>(a, plan, digits, head, codes);
    }
    head += heads;
  }
}
