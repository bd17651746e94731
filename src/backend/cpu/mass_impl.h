// SPDX-License-Identifier: MIT
// Mass: sums of exp of scores, block by block, for one query head.
//
//   mass(b) = sum over the 64 tokens of block b of exp(min(scale * score - shift, 88))
//
// A block is 64 / kLanes vectors, whose exps are independent of each other; their lanes are summed
// first, and a transposing reduction turns kLanes such sums into kLanes masses. The scaled scores
// may be large and cancel against the shift, hence one rounding for the argument. The last vector
// of masses is filled up with zero sums, so that a block's mass is the same wherever it lies.
// Bound by the arithmetic of Exp: one read per score and a write per 64.

static_assert(kBlockTokens % kLanes == 0);

// The sum over tokens, still one part per lane.
FATHOM_INLINE F32 SumExpOfBlock(const float* scores, F32 scale, F32 minus_shift) {
  constexpr int kVectors = kBlockTokens / kLanes;
  F32 p[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const F32 x = FusedMulAdd(Load(scores + v * kLanes), scale, minus_shift);
    p[v] = Exp(MinOrSecond(Set(88.0f), x));  // a NaN stays
  }
#pragma GCC unroll 16
  for (int half = kVectors / 2; half > 0; half /= 2) {
    for (int v = 0; v < half; ++v) p[v] = Add(p[v], p[v + half]);
  }
  return p[0];
}

void MassBlocks(const MassBlocksArgs* args) {
  const MassBlocksArgs& a = *args;
  const F32 scale = Set(a.scale);
  const F32 minus_shift = Set(-a.shift);
  for (std::int64_t b = 0; b < a.n_blocks; b += kLanes) {
    const std::int64_t left = a.n_blocks - b;
    const int n = left < kLanes ? static_cast<int>(left) : kLanes;
    F32 sum[kLanes];
    for (int r = 0; r < n; ++r) {
      sum[r] = SumExpOfBlock(a.scores + (b + r) * kBlockTokens, scale, minus_shift);
    }
    for (int r = n; r < kLanes; ++r) sum[r] = Zero();
    StoreFirst(a.mass + b, ReduceRows(sum), n);
  }
}
