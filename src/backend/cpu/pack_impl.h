// SPDX-License-Identifier: MIT
// Pack: 64 keys into bit planes; lanes are channels.
//
//   sum_j = x_0j + x_1j + ... in token order;  code = clip(floor((x - offset_j) / cell_j), -8, 7) +
//   8
//
// Every operation is the IEEE single-precision one of the definition in backend.h, with no fused
// multiply-add, so planes and means equal the reference bit for bit. Clipping comes before floor:
// the limits are integers, so the order does not matter, and the value then fits an integer.
// Bits are gathered by doubling: word = 2 * word + bit from the last token to the first, which
// needs only fixed shifts. Bound by the division, one per key element.

void PackSums(const float* x, int head_dim, float* sums) {
  for (int j = 0; j < head_dim; j += kLanes) {
    F32 sum = Zero();
    for (int i = 0; i < kBlockTokens; ++i) sum = Add(sum, Load(x + i * head_dim + j));
    Store(sums + j, sum);
  }
}

void PackMaxima(const float* x, int head_dim, float* maxima) {
  for (int j = 0; j < head_dim; j += kLanes) {
    F32 top = Zero();
    for (int i = 0; i < kBlockTokens; ++i) {
      top = MaxOrSecond(Abs(Load(x + i * head_dim + j)), top);
    }
    Store(maxima + j, top);
  }
}

FATHOM_INLINE I32 PackCode(F32 x, F32 offset, F32 cell) {
  const F32 v = Div(Sub(x, offset), cell);
  const F32 clipped = MinOrSecond(MaxOrSecond(v, Set(-8.0f)), Set(7.0f));  // NaN becomes -8
  return AddInt(FloorToInt(ZeroUnlessNonZero(cell, clipped)), SetInt(8));
}

void PackCodes(const PackCodesArgs* args) {
  const PackCodesArgs& a = *args;
  constexpr int kHalf = 32;
  for (int j = 0; j < a.head_dim; j += kLanes) {
    const F32 offset = Load(a.offset + j);
    const F32 cell = Load(a.cell + j);
    std::int32_t words[2][kPlanes][kLanes];
    for (int half = 0; half < 2; ++half) {
      I32 word[kPlanes] = {SetInt(0), SetInt(0), SetInt(0), SetInt(0)};
      for (int i = kHalf - 1; i >= 0; --i) {
        const float* x = a.x + (half * kHalf + i) * a.head_dim + j;
        const I32 code = PackCode(Load(x), offset, cell);
        word[0] = AddInt(AddInt(word[0], word[0]), BitOf<3>(code));
        word[1] = AddInt(AddInt(word[1], word[1]), BitOf<2>(code));
        word[2] = AddInt(AddInt(word[2], word[2]), BitOf<1>(code));
        word[3] = AddInt(AddInt(word[3], word[3]), BitOf<0>(code));
      }
      for (int p = 0; p < kPlanes; ++p) StoreInt(words[half][p], word[p]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int p = 0; p < kPlanes; ++p) {
        const auto low = static_cast<std::uint32_t>(words[0][p][lane]);
        const auto high = static_cast<std::uint32_t>(words[1][p][lane]);
        const std::int64_t plane = static_cast<std::int64_t>(j + lane) * kPlanes + p;
        a.planes[plane * a.row_blocks + a.block] = static_cast<std::uint64_t>(high) << 32 | low;
      }
    }
  }
}
