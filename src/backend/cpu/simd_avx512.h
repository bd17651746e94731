// SPDX-License-Identifier: MIT
// The SIMD vocabulary of kernels_impl.h in AVX-512 F, BW, DQ, VL. See simd_portable.h for what each
// word means. Included once, inside the anonymous namespace of kernels_avx512.cc.

constexpr int kLanes = 16;
constexpr int kLanes16 = 32;
constexpr int kScanAccumulators = 16;
constexpr int kByteLanes = 64;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
constexpr int kAttendVectors = 4;

using F32 = __m512;
using I32 = __m512i;
using I16 = __m512i;
using Bytes = __m512i;
using Mask16 = __mmask32;
using Mask32 = __mmask16;

FATHOM_INLINE F32 Zero() { return _mm512_setzero_ps(); }
FATHOM_INLINE F32 Set(float x) { return _mm512_set1_ps(x); }
FATHOM_INLINE F32 Load(const float* p) { return _mm512_loadu_ps(p); }
FATHOM_INLINE void Store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
FATHOM_INLINE F32 Add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
FATHOM_INLINE F32 Sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
FATHOM_INLINE F32 Mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
FATHOM_INLINE F32 Div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
FATHOM_INLINE F32 MulAdd(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
FATHOM_INLINE F32 FusedMulAdd(F32 a, F32 b, F32 c) { return MulAdd(a, b, c); }
FATHOM_INLINE F32 Abs(F32 x) { return _mm512_abs_ps(x); }
FATHOM_INLINE F32 MaxOrSecond(F32 a, F32 b) { return _mm512_max_ps(a, b); }
FATHOM_INLINE F32 MinOrSecond(F32 a, F32 b) { return _mm512_min_ps(a, b); }
FATHOM_INLINE F32 Round(F32 x) { return _mm512_roundscale_ps(x, 0x08); }
FATHOM_INLINE I32 FloorToInt(F32 x) { return _mm512_cvttps_epi32(_mm512_roundscale_ps(x, 0x09)); }
FATHOM_INLINE F32 ZeroUnlessNonZero(F32 condition, F32 x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(condition, Zero(), _CMP_NEQ_UQ), x);
}
FATHOM_INLINE F32 ZeroBelow(F32 condition, F32 limit, F32 x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(condition, limit, _CMP_NLT_UQ), x);
}
FATHOM_INLINE F32 ScaleByPowerOf2(F32 x, F32 exponent) { return _mm512_scalef_ps(x, exponent); }
FATHOM_INLINE F32 FirstLanes(F32 x, int n, F32 fill) {
  const unsigned lanes = n >= kLanes ? 0xFFFFu : (1u << n) - 1;
  return _mm512_mask_mov_ps(fill, static_cast<Mask32>(lanes), x);
}
FATHOM_INLINE F32 LoadHalf(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

FATHOM_INLINE float ReduceAdd(F32 x) { return _mm512_reduce_add_ps(x); }
FATHOM_INLINE float ReduceMax(F32 x) { return _mm512_reduce_max_ps(x); }

FATHOM_INLINE F32 ReduceRows(const F32* v) {
  F32 h[8];
  F32 t[4];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const F32 a = v[8 * j + i];
      const F32 b = v[8 * j + i + 4];
      h[4 * j + i] = Add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
  }
  for (int i = 0; i < 4; ++i) {
    t[i] =
        Add(_mm512_shuffle_f32x4(h[i], h[i + 4], 0x88), _mm512_shuffle_f32x4(h[i], h[i + 4], 0xDD));
  }
  const F32 u0 = Add(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
  const F32 u1 = Add(_mm512_unpacklo_ps(t[2], t[3]), _mm512_unpackhi_ps(t[2], t[3]));
  const __m512d d0 = _mm512_castps_pd(u0);
  const __m512d d1 = _mm512_castps_pd(u1);
  return Add(_mm512_castpd_ps(_mm512_unpacklo_pd(d0, d1)),
             _mm512_castpd_ps(_mm512_unpackhi_pd(d0, d1)));
}

FATHOM_INLINE void Transpose(F32* v) {
  F32 t[16];
  for (int i = 0; i < 4; ++i) {  // 4x4 in each 128-bit lane
    const F32* r = v + 4 * i;
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
    t[4 * i + 0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    t[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    t[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    t[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  }
  for (int j = 0; j < 4; ++j) {  // then the 128-bit lanes; lane l of t[4i + j] is column 4l + j
    const F32 a = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x44);
    const F32 b = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x44);
    const F32 c = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xEE);
    const F32 d = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xEE);
    v[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(a, b, 0xDD);
    v[8 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    v[12 + j] = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
}

FATHOM_INLINE I32 SetInt(std::int32_t x) { return _mm512_set1_epi32(x); }
FATHOM_INLINE I32 LoadInt(const std::int32_t* p) { return _mm512_loadu_si512(p); }
FATHOM_INLINE void StoreInt(std::int32_t* p, I32 x) { _mm512_storeu_si512(p, x); }
FATHOM_INLINE I32 AddInt(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
template <int Plane>
FATHOM_INLINE I32 BitOf(I32 code) {
  return _mm512_and_si512(_mm512_srli_epi32(code, Plane), _mm512_set1_epi32(1));
}
FATHOM_INLINE I32 CountAtLeast(I32 count, I32 x, I32 limit) {
  return _mm512_mask_add_epi32(count, _mm512_cmpge_epi32_mask(x, limit), count,
                               _mm512_set1_epi32(1));
}
FATHOM_INLINE I32 MaxInt(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
FATHOM_INLINE std::int32_t ReduceAddInt(I32 x) { return _mm512_reduce_add_epi32(x); }
FATHOM_INLINE std::int32_t ReduceMaxInt(I32 x) { return _mm512_reduce_max_epi32(x); }
FATHOM_INLINE I32 OrderKey(F32 x) {
  const I32 bits = _mm512_castps_si512(Add(x, Zero()));
  const I32 flip = _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7FFFFFFF));
  const Mask32 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  return _mm512_mask_xor_epi32(_mm512_set1_epi32(INT32_MIN), number, bits, flip);
}
// The compress instruction with a memory operand is microcoded on Zen 4: compress in registers.
FATHOM_INLINE int AppendAtLeast(I32 key, I32 limit, std::int32_t index, std::int32_t* indices,
                                std::int32_t* keys) {
  const Mask32 take = _mm512_cmpge_epi32_mask(key, limit);
  const I32 lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const I32 here = _mm512_add_epi32(_mm512_set1_epi32(index), lane);
  _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(take, here));
  _mm512_storeu_si512(keys, _mm512_maskz_compress_epi32(take, key));
  return __builtin_popcount(take);
}

FATHOM_INLINE I16 Zero16() { return _mm512_setzero_si512(); }
FATHOM_INLINE I16 SetPair16(std::int32_t pair) { return _mm512_set1_epi32(pair); }
FATHOM_INLINE Mask16 LoadMask16(const unsigned char* bits) {
  std::uint32_t word;
  __builtin_memcpy(&word, bits, sizeof word);
  return word;
}
// Masked adds in assembly: GCC 12 copies the sum before and after the intrinsic, which doubles the
// time of a scan.
FATHOM_INLINE I16 MaskedAdd16(I16 sum, Mask16 mask, I16 x) {
  __asm__("vpaddw %2, %0, %0 %{%1%}" : "+v"(sum) : "Yk"(mask), "v"(x));
  return sum;
}
FATHOM_INLINE I16 Average16(I16 a, I16 b) { return _mm512_avg_epu16(a, b); }
FATHOM_INLINE void StoreAsBytes16(std::uint8_t* p, I16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(x));
}
FATHOM_INLINE Mask32 LoadMask32(const unsigned char* word, int piece) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, word + 2 * piece, sizeof bits);
  return bits;
}
FATHOM_INLINE F32 MaskedAdd(F32 sum, Mask32 mask, F32 x) {
  __asm__("vaddps %2, %0, %0 %{%1%}" : "+v"(sum) : "Yk"(mask), "v"(x));
  return sum;
}
FATHOM_INLINE F32 LoadInt8(const std::uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
FATHOM_INLINE F32 LoadNibbles(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  const I32 codes = _mm512_cvtepi8_epi32(_mm_unpacklo_epi8(low, high));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(8)));
}
FATHOM_INLINE F32 LoadByte(const std::uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

FATHOM_INLINE I32 SubInt(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
FATHOM_INLINE I32 ShiftRightInt(I32 x, int n) { return _mm512_sra_epi32(x, _mm_cvtsi32_si128(n)); }
FATHOM_INLINE I32 ShiftLeft7(I32 x) { return _mm512_slli_epi32(x, 7); }
FATHOM_INLINE I32 MinInt(I32 a, I32 b) { return _mm512_min_epi32(a, b); }
FATHOM_INLINE std::int32_t ReduceMinInt(I32 x) { return _mm512_reduce_min_epi32(x); }
FATHOM_INLINE F32 IntToFloat(I32 x) { return _mm512_cvtepi32_ps(x); }
FATHOM_INLINE void StoreFirstInts(std::int32_t* p, I32 x, int n) {
  const unsigned lanes = n >= kLanes ? 0xFFFFu : (1u << n) - 1;
  _mm512_mask_storeu_epi32(p, static_cast<__mmask16>(lanes), x);
}

FATHOM_INLINE Bytes LoadBytes(const void* p) { return _mm512_loadu_si512(p); }
FATHOM_INLINE void StoreBytes(void* p, Bytes x) { _mm512_storeu_si512(p, x); }
FATHOM_INLINE Bytes ZeroBytes() { return _mm512_setzero_si512(); }
FATHOM_INLINE Bytes SetByte(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
FATHOM_INLINE Bytes LoadTable(const std::uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FATHOM_INLINE Bytes Lookup(Bytes table, Bytes index) { return _mm512_shuffle_epi8(table, index); }
FATHOM_INLINE Bytes LowNibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
FATHOM_INLINE Bytes HighNibbles(Bytes x) { return LowNibbles(_mm512_srli_epi16(x, 4)); }
FATHOM_INLINE Bytes AddBytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
FATHOM_INLINE Bytes AddSaturated(Bytes a, Bytes b) { return _mm512_adds_epu8(a, b); }
FATHOM_INLINE Bytes AverageBytes(Bytes a, Bytes b) { return _mm512_avg_epu8(a, b); }
FATHOM_INLINE std::uint64_t EqualBits(Bytes a, Bytes b) { return _mm512_cmpeq_epi8_mask(a, b); }
#ifdef __AVX512VBMI2__
#define FATHOM_COMPRESS_BYTES
FATHOM_INLINE int CompressBytes(std::uint64_t marks, const std::uint8_t* from, std::uint8_t* to) {
  StoreBytes(to, _mm512_maskz_compress_epi8(marks, LoadBytes(from)));
  return __builtin_popcountll(marks);
}
#endif
FATHOM_INLINE I32 DotAdd(I32 acc, Bytes a, Bytes b) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(acc, a, b);
#else
  const __m512i pairs = _mm512_maddubs_epi16(a, b);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
FATHOM_INLINE Bytes UnpackLow8(Bytes a, Bytes b) { return _mm512_unpacklo_epi8(a, b); }
FATHOM_INLINE Bytes UnpackHigh8(Bytes a, Bytes b) { return _mm512_unpackhi_epi8(a, b); }
FATHOM_INLINE Bytes UnpackLow16(Bytes a, Bytes b) { return _mm512_unpacklo_epi16(a, b); }
FATHOM_INLINE Bytes UnpackHigh16(Bytes a, Bytes b) { return _mm512_unpackhi_epi16(a, b); }
FATHOM_INLINE Bytes UnpackLow32(Bytes a, Bytes b) { return _mm512_unpacklo_epi32(a, b); }
FATHOM_INLINE Bytes UnpackHigh32(Bytes a, Bytes b) { return _mm512_unpackhi_epi32(a, b); }
template <int Distance>
FATHOM_INLINE Bytes SwapBits(Bytes x, int mask) {
  // 0x28: (a ^ b) & c;  0x96: a ^ b ^ c
  const Bytes change =
      _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, Distance), _mm512_set1_epi32(mask), 0x28);
  return _mm512_ternarylogic_epi32(x, change, _mm512_slli_epi32(change, Distance), 0x96);
}
FATHOM_INLINE void StoreQuarters(const Bytes* quarter, int n, std::uint8_t* out) {
  // A 4x4 transpose of lanes gives whole blocks.
  const Bytes a = _mm512_shuffle_i32x4(quarter[0], quarter[1], 0x44);
  const Bytes b = _mm512_shuffle_i32x4(quarter[2], quarter[3], 0x44);
  const Bytes c = _mm512_shuffle_i32x4(quarter[0], quarter[1], 0xEE);
  const Bytes d = _mm512_shuffle_i32x4(quarter[2], quarter[3], 0xEE);
  if (n > 0) StoreBytes(out, _mm512_shuffle_i32x4(a, b, 0x88));
  if (n > 1) StoreBytes(out + 128, _mm512_shuffle_i32x4(a, b, 0xDD));
  if (n > 2) StoreBytes(out + 256, _mm512_shuffle_i32x4(c, d, 0x88));
  if (n > 3) StoreBytes(out + 384, _mm512_shuffle_i32x4(c, d, 0xDD));
}
FATHOM_INLINE void PrefetchFar(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
FATHOM_INLINE void Prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

FATHOM_INLINE I32 LoadCodes(const void* p) { return _mm512_loadu_si512(p); }
template <int Bits>
FATHOM_INLINE I32 ShiftBits(I32 x) {
  return _mm512_srli_epi32(x, Bits);
}
template <int Bits>
FATHOM_INLINE I32 LowBits(I32 x) {
  return _mm512_and_si512(x, _mm512_set1_epi8((1 << Bits) - 1));
}
FATHOM_INLINE F32 MaxBits(F32 a, F32 b) {
  return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
FATHOM_INLINE I32 RoundToInt(F32 x) { return _mm512_cvtps_epi32(x); }
FATHOM_INLINE I32 PackBytes(const I32* v) {
  const I32 by_operand =
      _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  const I32 by_lane =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_shuffle_epi8(by_operand, by_lane);
}
// Sums are tied to their registers: GCC would otherwise move them to and fro.
#ifdef __AVX512VNNI__
using Dot = I32;
template <int Most>
constexpr int kDotAdds = INT32_MAX / (4 * 127 * Most);
FATHOM_INLINE Dot ZeroDot() { return _mm512_setzero_si512(); }
FATHOM_INLINE Dot AddToDot(Dot sum, I32 codes, I32 weights) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(weights));
  return sum;
}
FATHOM_INLINE I32 DotTotal(Dot sum) { return sum; }
#else
using Dot = I16;
template <int Most>
constexpr int kDotAdds = 32767 / (2 * 127 * Most);
FATHOM_INLINE Dot ZeroDot() { return Zero16(); }
FATHOM_INLINE Dot AddToDot(Dot sum, I32 codes, I32 weights) {
  sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, weights));
  __asm__("" : "+v"(sum));
  return sum;
}
FATHOM_INLINE I32 DotTotal(Dot sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
#endif
FATHOM_INLINE I32 Join(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
FATHOM_INLINE void InterleaveRows(const unsigned char* const* row, std::int64_t at,
                                  std::int32_t* out) {
  __m256i x[4];
  for (int k = 0; k < 4; ++k)
    x[k] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[k] + at));
  const __m256i a = _mm256_unpacklo_epi8(x[0], x[1]);
  const __m256i b = _mm256_unpackhi_epi8(x[0], x[1]);
  const __m256i c = _mm256_unpacklo_epi8(x[2], x[3]);
  const __m256i d = _mm256_unpackhi_epi8(x[2], x[3]);
  StoreInt(out, Join(_mm256_unpacklo_epi16(a, c), _mm256_unpackhi_epi16(a, c)));
  StoreInt(out + 16, Join(_mm256_unpacklo_epi16(b, d), _mm256_unpackhi_epi16(b, d)));
}
