// SPDX-License-Identifier: MIT
// The words of src/backend/cpu/tile_amx.h over those of simd_portable.h, for machines without AMX:
// the same arithmetic, down to the order of the sums and to subnormals, which count 0. Included
// inside the anonymous namespace of a test, after simd_portable.h.

constexpr int kTileWords = 256;

struct Tile {
  std::uint32_t word[16][16];
};

inline thread_local Tile tile_registers[8];

// What a product is worth: those left out, bits 0-2 of S (lo hi, hi hi, hi lo) and 3-5 of O. A step
// has four tile products of each; scores begin with a TileZero<0>, outputs with a TileLoad<0>.
inline int left_out = 0;
inline thread_local int first_product = 0;  // 0 in scores, 3 in outputs
inline thread_local int tile_products = 0;  // since then

// What a tile holds outside TileBegin and TileEnd spoils every result.
inline void FillTiles(std::uint32_t word) {
  for (Tile& t : tile_registers) {
    for (auto& row : t.word) {
      for (std::uint32_t& w : row) w = word;
    }
  }
}
inline void TileBegin() { FillTiles(0); }
inline void TileEnd() { FillTiles(0x7FC00000u); }

template <int Tile>
void TileZero() {
  tile_registers[Tile] = {};
  if (Tile == 0) first_product = tile_products = 0;
}
template <int Tile>
void TileLoad(const float* p) {
  __builtin_memcpy(&tile_registers[Tile], p, sizeof tile_registers[Tile]);
  if (Tile != 0) return;
  first_product = 3;
  tile_products = 0;
}
template <int Tile>
void TileStore(float* p, std::int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memcpy(p + r * stride, tile_registers[Tile].word[r], 16 * sizeof(float));
  }
}

inline float FlushSubnormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0.0f : x; }
inline float FloatOf(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Even and odd products are summed apart, then together, then into C. A product of two bf16 is
// exact in f32, so that a product and a sum round as one fused operation does.
template <int C, int A, int B>
void TileDot() {
  const int product = first_product + tile_products++ / 4 % 3;
  if ((left_out >> product & 1) != 0) return;
  const Tile& a = tile_registers[A];
  const Tile& b = tile_registers[B];
  for (int i = 0; i < 16; ++i) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k) {
      const float a0 = FlushSubnormal(FloatOf(a.word[i][k] << 16));
      const float a1 = FlushSubnormal(FloatOf(a.word[i][k] & 0xFFFF0000u));
      for (int j = 0; j < 16; ++j) {
        const float b0 = FlushSubnormal(FloatOf(b.word[k][j] << 16));
        const float b1 = FlushSubnormal(FloatOf(b.word[k][j] & 0xFFFF0000u));
        even[j] = FlushSubnormal(even[j] + a0 * b0);
        odd[j] = FlushSubnormal(odd[j] + a1 * b1);
      }
    }
    for (int j = 0; j < 16; ++j) {
      const float c = FlushSubnormal(FloatOf(tile_registers[C].word[i][j]));
      const float sum = FlushSubnormal(c + FlushSubnormal(even[j] + odd[j]));
      tile_registers[C].word[i][j] = __builtin_bit_cast(std::uint32_t, sum);
    }
  }
}

inline F32 RoundBf16(F32 x) { return (F32)(((U32)x + 0x8000u) & 0xFFFF0000u); }
inline F32 PairBf16(F32 low, F32 high) { return (F32)(((U32)low >> 16) | (U32)high); }
// To nearest, ties to even, subnormals to 0.
inline void StoreBf16(float* p, F32 first, F32 second) {
  std::uint16_t bf16[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) {
    const float x = i < kLanes ? first[i] : second[i - kLanes];
    const auto bits = __builtin_bit_cast(std::uint32_t, FlushSubnormal(x));
    bf16[i] = static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  __builtin_memcpy(p, bf16, sizeof bf16);
}
inline bool AllFinite(const Half* p, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if ((p[i] & 0x7C00) == 0x7C00) return false;
  }
  return true;
}
