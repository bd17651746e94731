// SPDX-License-Identifier: MIT
// The tile vocabulary of prefill_amx_impl.h in AMX-BF16 and AVX-512 BF16, beside the vector words
// of simd_avx512.h. Included once, inside the anonymous namespace of kernels_amx.cc.
// tests/support/tile_emulation.h is the same in portable code.
//
// A tile is 16 rows of 16 words, 1 KiB in sequence. A word is a float, or a pair of bf16 with the
// first in its low half. The processor has eight tiles, numbered in the template arguments.

constexpr int kTileWords = 256;

// Eight tiles of full size, from here to TileEnd.
FATHOM_INLINE void TileBegin() {
  const struct {
    std::uint8_t palette = 1;
    std::uint8_t zeros[15] = {};
    std::uint16_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint16_t more_zeros[8] = {};
    std::uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    std::uint8_t last_zeros[8] = {};
  } config;
  static_assert(sizeof config == 64);
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
FATHOM_INLINE void TileEnd() { __asm__ volatile("tilerelease"); }

// In assembly: the intrinsics of GCC 12 do not say that they read and write memory.
template <int Tile>
FATHOM_INLINE void TileZero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
FATHOM_INLINE void TileLoad(const float* p) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(64L), "i"(Tile) : "memory");
}
// Rows `stride` floats apart.
template <int Tile>
FATHOM_INLINE void TileStore(float* p, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(p), "r"(4 * stride), "i"(Tile)
                   : "memory");
}
// C += A B over 32 products: C[i][j] += sum over words k, halves h of A[i][k].h * B[k][j].h. Takes
// and gives 0 for subnormals; sums are in f32.
template <int C, int A, int B>
FATHOM_INLINE void TileDot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// The nearest bf16, as a float; away from 0 between two. For |x| < 2^127.
FATHOM_INLINE F32 RoundBf16(F32 x) {
  const I32 up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(-0x10000)));
}
// Words of two bf16, given as floats.
FATHOM_INLINE F32 PairBf16(F32 low, F32 high) {
  const I32 shifted = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(shifted, _mm512_castps_si512(high)));
}
// 2 kLanes floats to bf16, in sequence.
FATHOM_INLINE void StoreBf16(float* p, F32 first, F32 second) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}
// n a multiple of 32.
FATHOM_INLINE bool AllFinite(const Half* p, std::int64_t n) {
  const I16 magnitude = _mm512_set1_epi16(0x7FFF);
  I16 most = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < n; i += 32) {
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(p + i), magnitude));
  }
  return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7C00)) == 0;
}
