// SPDX-License-Identifier: MIT
// Scan of the mean codec, the simple way: U of ScanTable by masked adds.
//
// A plane word is a mask of tokens: a broadcast int16 weight is added under it, for up to four
// heads at once so that a mask is made once per group; sums of a part stay in registers over all
// its planes. Bound by the masked adds: heads * planes * 64 / lanes per block. The scan of the
// portable set, which has no byte shuffle, and the yardstick of the others
// (docs/kernels/scan-cpu.md).

constexpr int kMaxScanPlanes = kMaxHeadDim * kPlanes;
constexpr int kMaxParts = 8;
constexpr int kMaskedPieces = kBlockTokens / kLanes16;

struct MaskedPlan {
  std::int32_t n_parts;
  std::int32_t part_end[kMaxParts];
  std::int32_t low[kMaxParts * kMaxGroup];          // [n_parts][group]
  std::int64_t offset[kMaxScanPlanes];              // bytes from the segment's first plane
  std::int16_t weight[kMaxScanPlanes * kMaxGroup];  // [n_planes][group]
};

std::int64_t MaskedPlanBytes(int /*n_planes*/, int /*group*/) { return sizeof(MaskedPlan); }

void MakeMaskedPlan(const ScanPlanArgs* args) {
  const ScanPlanArgs& a = *args;
  auto* plan = static_cast<MaskedPlan*>(a.out);
  plan->n_parts = a.n_parts;
  for (int r = 0; r < a.n_parts; ++r) plan->part_end[r] = a.part_end[r];
  for (int i = 0; i < a.n_parts * a.group; ++i) plan->low[i] = a.low[i];
  for (int p = 0; p < a.n_planes; ++p) {
    plan->offset[p] = static_cast<std::int64_t>(a.plane[p]) * a.row_blocks * 8;
  }
  for (int i = 0; i < a.n_planes * a.group; ++i) plan->weight[i] = a.weight[i];
}

// Pieces times kLanes16 tokens for Heads heads. bits: of their first byte in plane 0.
template <int Heads, int Pieces>
FATHOM_INLINE void MaskedPieces(const MaskedPlan& plan, const unsigned char* bits, int group,
                                int head, std::uint8_t* out, std::int64_t stride) {
  I16 saved[3][Heads][Pieces] = {};
  I16 sum[Heads][Pieces] = {};
  int p = 0;
  for (int r = 0; r < plan.n_parts; ++r) {
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
      for (int v = 0; v < Pieces; ++v) {
        sum[h][v] = SetPair16(plan.low[r * group + head + h] * 0x10001);
      }
    }
    for (; p < plan.part_end[r]; ++p) {
      const std::int16_t* weight = plan.weight + p * group + head;
      Mask16 mask[Pieces];
#pragma GCC unroll 16
      for (int v = 0; v < Pieces; ++v) {
        mask[v] = LoadMask16(bits + plan.offset[p] + v * (kLanes16 / 8));
      }
#pragma GCC unroll 16
      for (int h = 0; h < Heads; ++h) {
        const auto half = static_cast<std::uint16_t>(weight[h]);
        const I16 w = SetPair16(static_cast<std::int32_t>(half * 0x10001u));
#pragma GCC unroll 16
        for (int v = 0; v < Pieces; ++v) sum[h][v] = MaskedAdd16(sum[h][v], mask[v], w);
      }
    }
    // Pairs of parts, then pairs of pairs: as carries of a binary counter.
    int level = 0;
    for (; (r >> level & 1) != 0; ++level) {
      for (int i = 0; i < Heads * Pieces; ++i) {
        I16& x = sum[i / Pieces][i % Pieces];
        x = Average16(saved[level][i / Pieces][i % Pieces], x);
      }
    }
    if (plan.n_parts == 1 || level == 3) continue;
    for (int i = 0; i < Heads * Pieces; ++i) {
      saved[level][i / Pieces][i % Pieces] = sum[i / Pieces][i % Pieces];
    }
  }
  for (int h = 0; h < Heads; ++h) {
    for (int v = 0; v < Pieces; ++v) StoreAsBytes16(out + h * stride + v * kLanes16, sum[h][v]);
  }
}

template <int Heads>
void MaskedHeads(const ScanSumsArgs& a, int head) {
  constexpr int kPieces = kScanAccumulators / Heads;
  constexpr int kRest = kPieces < kMaskedPieces ? kPieces : kMaskedPieces;
  static_assert(kMaskedPieces % kRest == 0);
  const auto& plan = *static_cast<const MaskedPlan*>(a.plan);
  const auto* words = reinterpret_cast<const unsigned char*>(a.planes + a.first);
  std::uint8_t* out = a.sums + head * a.stride;
  const int n = a.count * kMaskedPieces;
  int piece = 0;
  for (; piece + kPieces <= n; piece += kPieces) {
    MaskedPieces<Heads, kPieces>(plan, words + piece * (kLanes16 / 8), a.group, head,
                                 out + piece * kLanes16, a.stride);
  }
  for (; piece < n; piece += kRest) {
    MaskedPieces<Heads, kRest>(plan, words + piece * (kLanes16 / 8), a.group, head,
                               out + piece * kLanes16, a.stride);
  }
}

void MaskedSums(const ScanSumsArgs* args) {
  int head = 0;
  for (; head + 4 <= args->group; head += 4) MaskedHeads<4>(*args, head);
  for (; head + 2 <= args->group; head += 2) MaskedHeads<2>(*args, head);
  for (; head < args->group; ++head) MaskedHeads<1>(*args, head);
}
