// SPDX-License-Identifier: MIT
// The SIMD vocabulary of kernels_impl.h in AVX2, FMA and F16C. See simd_portable.h for what each
// word means. Included once, inside the anonymous namespace of kernels_avx2.cc.

constexpr int kLanes = 8;
constexpr int kLanes16 = 16;
constexpr int kScanAccumulators = 8;
constexpr int kByteLanes = 32;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
constexpr int kAttendVectors = 2;

using F32 = __m256;
using I32 = __m256i;
using I16 = __m256i;
using Bytes = __m256i;
using Mask16 = __m256i;
using Mask32 = __m256;

FATHOM_INLINE F32 Zero() { return _mm256_setzero_ps(); }
FATHOM_INLINE F32 Set(float x) { return _mm256_set1_ps(x); }
FATHOM_INLINE F32 Load(const float* p) { return _mm256_loadu_ps(p); }
FATHOM_INLINE void Store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
FATHOM_INLINE F32 Add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
FATHOM_INLINE F32 Sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
FATHOM_INLINE F32 Mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
FATHOM_INLINE F32 Div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
FATHOM_INLINE F32 MulAdd(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
FATHOM_INLINE F32 FusedMulAdd(F32 a, F32 b, F32 c) { return MulAdd(a, b, c); }
FATHOM_INLINE F32 Abs(F32 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
FATHOM_INLINE F32 MaxOrSecond(F32 a, F32 b) { return _mm256_max_ps(a, b); }
FATHOM_INLINE F32 MinOrSecond(F32 a, F32 b) { return _mm256_min_ps(a, b); }
FATHOM_INLINE F32 Round(F32 x) { return _mm256_round_ps(x, 0x08); }
FATHOM_INLINE I32 FloorToInt(F32 x) { return _mm256_cvttps_epi32(_mm256_floor_ps(x)); }
FATHOM_INLINE F32 ZeroUnlessNonZero(F32 condition, F32 x) {
  return _mm256_and_ps(_mm256_cmp_ps(condition, Zero(), _CMP_NEQ_UQ), x);
}
FATHOM_INLINE F32 ZeroBelow(F32 condition, F32 limit, F32 x) {
  return _mm256_and_ps(_mm256_cmp_ps(condition, limit, _CMP_NLT_UQ), x);
}
FATHOM_INLINE F32 ScaleByPowerOf2(F32 x, F32 exponent) {
  const I32 shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(exponent), 23);
  return Mul(x, _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(127 << 23))));
}
FATHOM_INLINE F32 FirstLanes(F32 x, int n, F32 fill) {
  const I32 lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const I32 take = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(take));
}
FATHOM_INLINE F32 LoadHalf(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

FATHOM_INLINE float ReduceAdd(F32 x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FATHOM_INLINE float ReduceMax(F32 x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

FATHOM_INLINE F32 ReduceRows(const F32* v) {
  F32 t[4];
  for (int i = 0; i < 4; ++i) {
    t[i] = Add(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
               _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
  }
  const F32 u0 = Add(_mm256_unpacklo_ps(t[0], t[1]), _mm256_unpackhi_ps(t[0], t[1]));
  const F32 u1 = Add(_mm256_unpacklo_ps(t[2], t[3]), _mm256_unpackhi_ps(t[2], t[3]));
  const __m256d d0 = _mm256_castps_pd(u0);
  const __m256d d1 = _mm256_castps_pd(u1);
  return Add(_mm256_castpd_ps(_mm256_unpacklo_pd(d0, d1)),
             _mm256_castpd_ps(_mm256_unpackhi_pd(d0, d1)));
}

FATHOM_INLINE void Transpose(F32* v) {
  F32 t[8];
  for (int i = 0; i < 2; ++i) {  // 4x4 in each 128-bit lane
    const F32* r = v + 4 * i;
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3]));
    const __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
    t[4 * i + 0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
    t[4 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    t[4 * i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(c, d));
    t[4 * i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
  }
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x20);
    v[4 + j] = _mm256_permute2f128_ps(t[j], t[4 + j], 0x31);
  }
}

FATHOM_INLINE I32 SetInt(std::int32_t x) { return _mm256_set1_epi32(x); }
FATHOM_INLINE I32 LoadInt(const std::int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
FATHOM_INLINE void StoreInt(std::int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
FATHOM_INLINE I32 AddInt(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
template <int Plane>
FATHOM_INLINE I32 BitOf(I32 code) {
  return _mm256_and_si256(_mm256_srli_epi32(code, Plane), _mm256_set1_epi32(1));
}
FATHOM_INLINE I32 CountAtLeast(I32 count, I32 x, I32 limit) {
  const I32 less = _mm256_cmpgt_epi32(limit, x);
  return _mm256_add_epi32(count, _mm256_add_epi32(less, _mm256_set1_epi32(1)));
}
FATHOM_INLINE I32 MaxInt(I32 a, I32 b) { return _mm256_max_epi32(a, b); }
FATHOM_INLINE std::int32_t ReduceAddInt(I32 x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
FATHOM_INLINE std::int32_t ReduceMaxInt(I32 x) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
FATHOM_INLINE I32 OrderKey(F32 x) {
  const I32 bits = _mm256_castps_si256(Add(x, Zero()));
  const I32 flip = _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1);
  const F32 key = _mm256_castsi256_ps(_mm256_xor_si256(bits, flip));
  const F32 lowest = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
  return _mm256_castps_si256(_mm256_blendv_ps(lowest, key, _mm256_cmp_ps(x, x, _CMP_ORD_Q)));
}
FATHOM_INLINE int AppendAtLeast(I32 key, I32 limit, std::int32_t index, std::int32_t* indices,
                                std::int32_t* keys) {
  const I32 less = _mm256_cmpgt_epi32(limit, key);
  unsigned take = ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(less))) & 0xFFu;
  if (take == 0) return 0;
  alignas(32) std::int32_t all[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(all), key);
  int n = 0;
  for (; take != 0; take &= take - 1) {
    const int lane = __builtin_ctz(take);
    indices[n] = index + lane;
    keys[n++] = all[lane];
  }
  return n;
}

FATHOM_INLINE I16 Zero16() { return _mm256_setzero_si256(); }
FATHOM_INLINE I16 SetPair16(std::int32_t pair) { return _mm256_set1_epi32(pair); }
FATHOM_INLINE Mask16 LoadMask16(const unsigned char* bits) {
  std::int16_t word;
  __builtin_memcpy(&word, bits, sizeof word);
  const __m256i lane = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                         8192, 16384, INT16_MIN);
  return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(word), lane), lane);
}
FATHOM_INLINE I16 MaskedAdd16(I16 sum, Mask16 mask, I16 x) {
  return _mm256_add_epi16(sum, _mm256_and_si256(mask, x));
}
FATHOM_INLINE I16 Average16(I16 a, I16 b) { return _mm256_avg_epu16(a, b); }
FATHOM_INLINE void StoreAsBytes16(std::uint8_t* p, I16 x) {
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
FATHOM_INLINE Mask32 LoadMask32(const unsigned char* word, int piece) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(word[piece]), lane);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, lane));
}
FATHOM_INLINE F32 MaskedAdd(F32 sum, Mask32 mask, F32 x) {
  return Add(sum, _mm256_and_ps(mask, x));
}
FATHOM_INLINE F32 LoadInt8(const std::uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
FATHOM_INLINE F32 LoadNibbles(const std::uint8_t* p) {
  std::int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  const __m128i bytes = _mm_cvtsi32_si128(word);
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  const I32 codes = _mm256_cvtepi8_epi32(_mm_unpacklo_epi8(low, high));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
}
FATHOM_INLINE F32 LoadByte(const std::uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

FATHOM_INLINE I32 SubInt(I32 a, I32 b) { return _mm256_sub_epi32(a, b); }
FATHOM_INLINE I32 ShiftRightInt(I32 x, int n) { return _mm256_sra_epi32(x, _mm_cvtsi32_si128(n)); }
FATHOM_INLINE I32 ShiftLeft7(I32 x) { return _mm256_slli_epi32(x, 7); }
FATHOM_INLINE I32 MinInt(I32 a, I32 b) { return _mm256_min_epi32(a, b); }
FATHOM_INLINE std::int32_t ReduceMinInt(I32 x) {
  __m128i s = _mm_min_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_min_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_min_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
FATHOM_INLINE F32 IntToFloat(I32 x) { return _mm256_cvtepi32_ps(x); }
FATHOM_INLINE void StoreFirstInts(std::int32_t* p, I32 x, int n) {
  const I32 lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  _mm256_maskstore_epi32(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), x);
}

FATHOM_INLINE Bytes LoadBytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
FATHOM_INLINE void StoreBytes(void* p, Bytes x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x);
}
FATHOM_INLINE Bytes ZeroBytes() { return _mm256_setzero_si256(); }
FATHOM_INLINE Bytes SetByte(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
FATHOM_INLINE Bytes LoadTable(const std::uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FATHOM_INLINE Bytes Lookup(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
FATHOM_INLINE Bytes LowNibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
FATHOM_INLINE Bytes HighNibbles(Bytes x) { return LowNibbles(_mm256_srli_epi16(x, 4)); }
FATHOM_INLINE Bytes AddBytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
FATHOM_INLINE Bytes AddSaturated(Bytes a, Bytes b) { return _mm256_adds_epu8(a, b); }
FATHOM_INLINE Bytes AverageBytes(Bytes a, Bytes b) { return _mm256_avg_epu8(a, b); }
FATHOM_INLINE std::uint64_t EqualBits(Bytes a, Bytes b) {
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)));
}
FATHOM_INLINE I32 DotAdd(I32 acc, Bytes a, Bytes b) {
  const __m256i pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
FATHOM_INLINE Bytes UnpackLow8(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
FATHOM_INLINE Bytes UnpackHigh8(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
FATHOM_INLINE Bytes UnpackLow16(Bytes a, Bytes b) { return _mm256_unpacklo_epi16(a, b); }
FATHOM_INLINE Bytes UnpackHigh16(Bytes a, Bytes b) { return _mm256_unpackhi_epi16(a, b); }
FATHOM_INLINE Bytes UnpackLow32(Bytes a, Bytes b) { return _mm256_unpacklo_epi32(a, b); }
FATHOM_INLINE Bytes UnpackHigh32(Bytes a, Bytes b) { return _mm256_unpackhi_epi32(a, b); }
// In every 32-bit element: exchanges the bits of `mask` with those `Distance` above them.
template <int Distance>
FATHOM_INLINE Bytes SwapBits(Bytes x, int mask) {
  const Bytes change = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(x, Distance), x),
                                        _mm256_set1_epi32(mask));
  return _mm256_xor_si256(_mm256_xor_si256(x, change), _mm256_slli_epi32(change, Distance));
}
// Lane L of quarter[i] is bytes 16i .. 16i + 15 of the block at out + L * 128; n blocks are stored.
FATHOM_INLINE void StoreQuarters(const Bytes* quarter, int n, std::uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    auto* p = reinterpret_cast<__m128i*>(out + 16 * i);
    if (n > 0) _mm_storeu_si128(p, _mm256_castsi256_si128(quarter[i]));
    if (n > 1) _mm_storeu_si128(p + 8, _mm256_extracti128_si256(quarter[i], 1));
  }
}
FATHOM_INLINE void PrefetchFar(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
FATHOM_INLINE void Prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

FATHOM_INLINE I32 LoadCodes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
template <int Bits>
FATHOM_INLINE I32 ShiftBits(I32 x) {
  return _mm256_srli_epi32(x, Bits);
}
template <int Bits>
FATHOM_INLINE I32 LowBits(I32 x) {
  return _mm256_and_si256(x, _mm256_set1_epi8((1 << Bits) - 1));
}
FATHOM_INLINE F32 MaxBits(F32 a, F32 b) {
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
FATHOM_INLINE I32 RoundToInt(F32 x) { return _mm256_cvtps_epi32(x); }
FATHOM_INLINE I32 PackBytes(const I32* v) {
  const I32 by_operand =
      _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  const I32 by_lane = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm256_shuffle_epi8(by_operand, by_lane);
}
using Dot = I16;
template <int Most>
constexpr int kDotAdds = 32767 / (2 * 127 * Most);
FATHOM_INLINE Dot ZeroDot() { return Zero16(); }
// The empty statement keeps GCC from adding products to each other first, for which there are not
// enough registers.
FATHOM_INLINE Dot AddToDot(Dot sum, I32 codes, I32 weights) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, weights));
  __asm__("" : "+x"(sum));
  return sum;
}
FATHOM_INLINE I32 DotTotal(Dot sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
FATHOM_INLINE void InterleaveRows(const unsigned char* const* row, std::int64_t at,
                                  std::int32_t* out) {
  I32 x[4];
  for (int k = 0; k < 4; ++k) x[k] = LoadCodes(row[k] + at);
  const I32 a = _mm256_unpacklo_epi8(x[0], x[1]);
  const I32 b = _mm256_unpackhi_epi8(x[0], x[1]);
  const I32 c = _mm256_unpacklo_epi8(x[2], x[3]);
  const I32 d = _mm256_unpackhi_epi8(x[2], x[3]);
  StoreInt(out, _mm256_unpacklo_epi16(a, c));
  StoreInt(out + 8, _mm256_unpackhi_epi16(a, c));
  StoreInt(out + 16, _mm256_unpacklo_epi16(b, d));
  StoreInt(out + 24, _mm256_unpackhi_epi16(b, d));
}
