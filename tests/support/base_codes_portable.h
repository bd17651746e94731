// SPDX-License-Identifier: MIT
// The words of src/backend/cpu/base_codes_vbmi.h over those of simd_portable.h. Included inside the
// anonymous namespace of a test, after simd_portable.h.

inline std::uint8_t CodeByte(const std::uint8_t* row, int i, int left) {
  return i < left ? row[i] : std::uint8_t{0};
}

inline void PairNibbles(const std::uint8_t* side, const std::int32_t* row, int left,
                        unsigned char* out) {
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < 4; ++j) {
      unsigned char* to = out + i / 16 * 128 + i % 16 * 4 + j;
      to[0] = CodeByte(side + row[j], i, left);
      to[64] = to[0] & 0xF0;
    }
  }
}
inline void PairBytes(const std::uint8_t* side, const std::int32_t* row, int left,
                      unsigned char* out) {
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 4; ++j) out[4 * i + j] = CodeByte(side + row[j], i, left) ^ 128;
  }
}

inline I32 Times256(I32 x) { return (I32)((U32)x << 8); }
inline I32 Sixteenth(I32 x) { return x >> 4; }
inline void ZipInts(I32 a, I32 b, I32 (&zip)[2]) {
  zip[0] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  zip[1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
}
