// SPDX-License-Identifier: MIT
// The base of every block in AMX tiles of bytes. Written over the words of simd_*.h, tile_amx.h and
// base_codes_*.h, included after them and scan_base_plan_impl.h in kernels_amx.cc.
//
// A product of tiles is 16 rows of A, each with four digits for 16 quads, times the codes of 16
// quads and 16 blocks: as many as 64 `vpdpbusd`. A row is a digit of a head. The rows of all heads'
// lowest digits come first, then those of the middle ones, then the highest: a set of 16 rows that
// has the highest alone needs the quads with large weights only, or is not there. One set is enough
// for 5 heads, or 8 without third digits. The buffer of codes is B as it is, rows 256 bytes apart.
//
// At four heads of D = 128 that is 10 tile loads, 8 products and 4 stores for 64 blocks; what is
// left to the vector units is to bring codes into order and to join digits.

constexpr int kTileQuads = 16;  // of a product
constexpr int kSetRows = 16;
constexpr int kSetInts = kSetRows * kScanChunkBlocks;  // sums of a set for a call
constexpr int kMostSets = (kDigits * kMaxGroup + kSetRows - 1) / kSetRows;

constexpr int BaseSteps(int quads) { return (quads + kTileQuads - 1) / kTileQuads; }

// What follows it: the tiles of A, std::int32_t [sets][steps of the set][kTileWords].
struct BaseTilePlan {
  std::int32_t n_quads;
  std::int32_t n_digits;  // two if no weight needs the third
  std::int32_t n_sets;
  std::int32_t steps[kMostSets];  // of every set
  std::int32_t unused[13 - kMostSets];
  std::int32_t offset[kMaxGroup];
  std::int32_t row[kMaxHeadDim];  // bytes from the segment's first mean, [n_quads][kBaseQuad]
  const std::int32_t* tiles() const { return reinterpret_cast<const std::int32_t*>(this + 1); }
};
static_assert(sizeof(BaseTilePlan) % 64 == 0 && kMaxHeadDim % kBaseQuad == 0);

std::int64_t TileBasePlanBytes(int n_active, int group) {
  const int sets = (kDigits * group + kSetRows - 1) / kSetRows;
  const std::int64_t tiles = std::int64_t{sets} * BaseSteps(BaseQuads(n_active));
  return static_cast<std::int64_t>(sizeof(BaseTilePlan)) + tiles * kTileWords * 4;
}

// Fills the rows of A for digit d of n <= kBaseHeads heads.
void PlaceDigits(const std::int8_t* digit, int group, const BaseOrder& order, int d, int head,
                 int n, BaseTilePlan* plan) {
  std::int32_t* to[kBaseHeads];  // rows of the first tile
  int steps[kBaseHeads];
  for (int h = 0; h < n; ++h) {
    const int row = d * group + head + h, set = row / kSetRows;
    to[h] = const_cast<std::int32_t*>(plan->tiles()) + row % kSetRows * kTileQuads;
    for (int s = 0; s < set; ++s) to[h] += plan->steps[s] * kTileWords;
    steps[h] = plan->steps[set];
  }
  for (int quad = 0; quad < order.n_quads; ++quad) {
    std::int32_t of_head[kBaseHeads];
    QuadDigits(digit, group, order, quad, head, of_head);
    const int step = quad / kTileQuads;
    for (int h = 0; h < n; ++h) {
      if (step >= steps[h]) continue;  // a third digit, 0
      to[h][step * kTileWords + quad % kTileQuads] = of_head[h];
    }
  }
}

void MakeTileBasePlan(const ScanBasePlanArgs* args) {
  const ScanBasePlanArgs& a = *args;
  auto* plan = static_cast<BaseTilePlan*>(a.out);
  WeightDigits digits;
  SplitWeights(a, &digits);
  BaseOrder order;
  OrderChannels(a, digits, &order, plan->row);
  plan->n_quads = order.n_quads;
  plan->n_digits = order.n_large > 0 ? kDigits : kDigits - 1;
  plan->n_sets = (plan->n_digits * a.group + kSetRows - 1) / kSetRows;
  int n_tiles = 0;
  for (int s = 0; s < plan->n_sets; ++s) {
    const bool highest = s * kSetRows >= (kDigits - 1) * a.group;
    plan->steps[s] = BaseSteps(highest ? order.n_large : order.n_quads);
    n_tiles += plan->steps[s];
  }
  // Rows of no digit and quads beyond the last: what lies in the buffer of codes there counts 0.
  __builtin_memset(plan + 1, 0, static_cast<unsigned>(n_tiles * kTileWords) * 4);
  for (int head = 0; head < a.group; head += kBaseHeads) {
    const int left = a.group - head;
    for (int d = 0; d < plan->n_digits; ++d) {
      PlaceDigits(digits.digit[d], a.group, order, d, head, left < kBaseHeads ? left : kBaseHeads,
                  plan);
    }
  }
  for (int head = 0; head < a.group; ++head) plan->offset[head] = BaseOffset(a, head);
}

// Sums of a set of rows: [kSetRows][kScanChunkBlocks]. tile: of A, for every step.
void MultiplySet(const std::int32_t* tile, int steps, const unsigned char* codes,
                 std::int32_t* sums) {
  TileZero<0>();
  TileZero<1>();
  TileZero<2>();
  TileZero<3>();
  for (int step = 0; step < steps; ++step) {
    TileLoadBytes<4>(tile, 64);
    TileLoadBytes<5>(codes, kBaseQuadBytes);
    TileDotBytes<0, 4, 5>();
    TileLoadBytes<6>(codes + kBaseVectorBytes, kBaseQuadBytes);
    TileDotBytes<1, 4, 6>();
    TileLoadBytes<7>(codes + 2 * kBaseVectorBytes, kBaseQuadBytes);
    TileDotBytes<2, 4, 7>();
    TileLoadBytes<5>(codes + 3 * kBaseVectorBytes, kBaseQuadBytes);
    TileDotBytes<3, 4, 5>();
    tile += kTileWords;
    codes += kTileQuads * kBaseQuadBytes;
  }
  TileStoreInts<0>(sums, kScanChunkBlocks);
  TileStoreInts<1>(sums + 16, kScanChunkBlocks);
  TileStoreInts<2>(sums + 32, kScanChunkBlocks);
  TileStoreInts<3>(sums + 48, kScanChunkBlocks);
}

// d0 + 256 d1 + 65536 d2 of kLanes blocks, from the sums of d0 on.
FATHOM_INLINE I32 JoinDigits(const std::int32_t* sums, int group, int n_digits) {
  const std::int32_t* middle = sums + group * kScanChunkBlocks;
  I32 high = LoadInt(middle);
  if (n_digits == kDigits) {
    high = AddInt(high, Times256(LoadInt(middle + group * kScanChunkBlocks)));
  }
  return AddInt(LoadInt(sums), Times256(high));
}

// Joins the sums of all heads.
template <bool Nibbles>
FATHOM_INLINE void JoinSums(const ScanBaseArgs& a, const BaseTilePlan& plan,
                            const std::int32_t* sums) {
  const int n_digits = plan.n_digits;
  for (int h = 0; h < a.group; ++h, sums += kScanChunkBlocks) {
    const I32 offset = SetInt(plan.offset[h]);
    for (int b = 0; b < a.count; b += 2 * kLanes) {
      // A byte of two blocks has a sum in two vectors, those of blocks 32 i .. from sum 32 i on.
      const std::int32_t* at = Nibbles ? sums + b / 32 * 32 + b % 32 / 2 : sums + b;
      I32 x[2] = {JoinDigits(at, a.group, n_digits),
                  JoinDigits(at + (Nibbles ? 16 : kLanes), a.group, n_digits)};
      StoreBases<Nibbles>(a, h, b, offset, x);
    }
  }
}

void TileBase(const ScanBaseArgs* args) {
  static_assert(16 % kLanes == 0);
  const ScanBaseArgs a = *args;  // bases could overwrite *args, for all that the compiler knows
  const auto& plan = *static_cast<const BaseTilePlan*>(a.plan);
  alignas(64) unsigned char codes[kMaxBaseQuads * kBaseQuadBytes];
  alignas(64) std::int32_t sums[kMostSets * kSetInts];
  PairCodes(a, plan.n_quads, plan.row, codes);
  TileBegin();
  const std::int32_t* tile = plan.tiles();
  for (int s = 0; s < plan.n_sets; ++s) {
    MultiplySet(tile, plan.steps[s], codes, sums + s * kSetInts);
    tile += plan.steps[s] * kTileWords;
  }
  TileEnd();
  if (a.mean_bits == 4) {
    JoinSums<true>(a, plan, sums);
  } else {
    JoinSums<false>(a, plan, sums);
  }
}
