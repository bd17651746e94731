// SPDX-License-Identifier: MIT
// The words of scan_base_plan_impl.h and scan_base_wide_impl.h in AVX-512 VBMI, beside those of
// simd_avx512.h: codes of block means four channels to a doubleword, and what their sums need.
// Included once, inside the anonymous namespace of a kernel set.
//
// row: where the codes of four channels begin, bytes from `side`; left: bytes of these rows that
// may be read.

// 32 bytes of two rows; those that may not be read are 0.
FATHOM_INLINE Bytes LoadCodeRows(const std::uint8_t* p, const std::uint8_t* q, int left) {
  if (left >= 32) {
    return Join(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
  }
  const __mmask32 bytes = left > 0 ? (1u << left) - 1 : 0;
  return Join(_mm256_maskz_loadu_epi8(bytes, p), _mm256_maskz_loadu_epi8(bytes, q));
}

// Bytes 0 .. 15 and 16 .. 31 of four rows, byte j of doubleword i from row j.
FATHOM_INLINE void PairRows(const std::uint8_t* side, const std::int32_t* row, int left,
                            Bytes (&out)[2]) {
  const Bytes low = LoadCodeRows(side + row[0], side + row[1], left);
  const Bytes high = LoadCodeRows(side + row[2], side + row[3], left);
  // Bytes i of two rows as a word: in lane l those of i = 4 l .. 4 l + 3, then of 16 + 4 l ..
  const Bytes words = _mm512_set_epi64(0x3F1F3E1E3D1D3C1C, 0x2F0F2E0E2D0D2C0C, 0x3B1B3A1A39193818,
                                       0x2B0B2A0A29092808, 0x3717361635153414, 0x2707260625052404,
                                       0x3313321231113010, 0x2303220221012000);
  const Bytes a = _mm512_permutexvar_epi8(words, low);
  const Bytes b = _mm512_permutexvar_epi8(words, high);
  out[0] = UnpackLow16(a, b);
  out[1] = UnpackHigh16(a, b);
}

// Codes of four channels of up to 64 blocks. A byte has those of two blocks and is stored twice,
// which takes one instruction for both where parting them would take three: vector 2 v holds the
// bytes of blocks 32 v .. 32 v + 31, even block + 16 odd block, vector 2 v + 1 only 16 odd block.
FATHOM_INLINE void PairNibbles(const std::uint8_t* side, const std::int32_t* row, int left,
                               unsigned char* out) {
  Bytes x[2];
  PairRows(side, row, left, x);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    StoreBytes(out + 128 * v, x[v]);
    StoreBytes(out + 128 * v + 64, _mm512_and_si512(x[v], SetByte(0xF0)));
  }
}

// The same for codes of a byte: vector v holds those of blocks 16 v .. 16 v + 15.
FATHOM_INLINE void PairBytes(const std::uint8_t* side, const std::int32_t* row, int left,
                             unsigned char* out) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; v += 2) {
    Bytes x[2];
    PairRows(side + 16 * v, row, left - 16 * v, x);
    StoreBytes(out + 64 * v, _mm512_xor_si512(x[0], SetByte(128)));
    StoreBytes(out + 64 * v + 64, _mm512_xor_si512(x[1], SetByte(128)));
  }
}

FATHOM_INLINE I32 Times256(I32 x) { return _mm512_slli_epi32(x, 8); }
FATHOM_INLINE I32 Sixteenth(I32 x) { return _mm512_srai_epi32(x, 4); }
// Lanes of a and b in turn.
FATHOM_INLINE void ZipInts(I32 a, I32 b, I32 (&zip)[2]) {
  const I32 low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  zip[0] = _mm512_permutex2var_epi32(a, low, b);
  zip[1] = _mm512_permutex2var_epi32(a, AddInt(low, SetInt(8)), b);
}
