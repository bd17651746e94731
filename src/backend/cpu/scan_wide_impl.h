// SPDX-License-Identifier: MIT
// Scan of the mean codec: U of ScanTable by table lookups, with AVX-512 VBMI and GFNI.
//
// The idea of scan_nibble_impl.h with six planes a lookup: `vpermb` takes 64 bytes as a table and
// looks at the low six bits of an index only. The words of eight planes for one block, one per
// 64-bit element, become one index per token in two instructions: a byte permutation, after which
// element b holds byte b of every plane, an 8x8 bit matrix of planes x tokens; and
// `vgf2p8affineqb` with these matrices and the identity as its vector, which transposes them. That
// turns row r into bit 7 - r, so plane i of a group is row 7 - i, and rows 0 and 1 may hold
// anything.
//
// Six planes' words of two blocks are lanes of two vectors, of four planes and of two. Lanes come
// from memory: to merge one with a vector takes no shuffle. The byte permutation of a block is one
// of each vector. Indices are made once for all heads.
//
// Per 64 tokens and six planes: 3 loads, 2 merges, 2 shuffles and 1 affine for the index, 1 store;
// per head one lookup and one add, indices shared by four heads and tables by two blocks. Shuffles:
// 6 at four heads, on processors with one port for them; words that are transposed by shuffles of
// 64-bit elements take 1.25 more.

constexpr int kWidePlanes = 6;
constexpr int kWideBlocks = 8;
constexpr int kParts = 8;
constexpr int kMaxGroups = kMaxHeadDim * kPlanes / kWidePlanes + kParts + 1;

struct WidePlan {
  std::int32_t n_groups;
  std::int32_t n_parts;
  std::int32_t part_end[kParts];  // in groups
  std::int32_t unused[6];         // tables start at a cache line
  // Then std::uint8_t table[n_groups][group][64], and std::int64_t offset[n_groups][6], bytes from
  // the segment's first plane.
  const std::uint8_t* tables() const { return reinterpret_cast<const std::uint8_t*>(this + 1); }
  const std::int64_t* offsets(int group) const {
    return reinterpret_cast<const std::int64_t*>(tables() + std::int64_t{n_groups} * group * 64);
  }
};
static_assert(sizeof(WidePlan) == 64);

std::int64_t WidePlanBytes(int n_planes, int group) {
  const std::int64_t groups = (n_planes + kWidePlanes - 1) / kWidePlanes + kParts;
  return static_cast<std::int64_t>(sizeof(WidePlan)) + groups * (64 * group + kWidePlanes * 8);
}

// What each of the 64 combinations of planes p .. p + n - 1 adds for one head, and `start` once.
void FillWideTable(const ScanPlanArgs& a, int head, int p, int n, int start, std::uint8_t* table) {
  constexpr __mmask64 kHas[kWidePlanes] = {0xAAAAAAAAAAAAAAAA, 0xCCCCCCCCCCCCCCCC,
                                           0xF0F0F0F0F0F0F0F0, 0xFF00FF00FF00FF00,
                                           0xFFFF0000FFFF0000, 0xFFFFFFFF00000000};
  Bytes sum = SetByte(start);
  for (int i = 0; i < n; ++i) {
    sum = _mm512_mask_add_epi8(sum, kHas[i], sum, SetByte(a.weight[(p + i) * a.group + head]));
  }
  StoreBytes(table, sum);
}

// A group that is not full repeats its last plane with weight 0.
void MakeWidePlan(const ScanPlanArgs* args) {
  const ScanPlanArgs& a = *args;
  auto* plan = static_cast<WidePlan*>(a.out);
  plan->n_parts = a.n_parts;
  plan->n_groups = 0;
  for (int r = 0, p = 0; r < a.n_parts; p = a.part_end[r++]) {
    plan->n_groups += (a.part_end[r] - p + kWidePlanes - 1) / kWidePlanes;
    plan->part_end[r] = plan->n_groups;
  }
  auto* table = const_cast<std::uint8_t*>(plan->tables());
  auto* offset = const_cast<std::int64_t*>(plan->offsets(a.group));
  int p = 0;
  for (int r = 0; r < a.n_parts; ++r) {
    bool first = true;
    for (; p < a.part_end[r]; p += kWidePlanes, first = false) {
      const int left = a.part_end[r] - p;
      const int n = left < kWidePlanes ? left : kWidePlanes;
      for (int h = 0; h < a.group; ++h, table += 64) {
        FillWideTable(a, h, p, n, first ? a.low[r * a.group + h] : 0, table);
      }
      for (int i = 0; i < kWidePlanes; ++i) {
        const std::int64_t plane = a.plane[p + (i < n ? i : n - 1)];
        *offset++ = plane * a.row_blocks * 8;
      }
    }
    p = a.part_end[r];
  }
}

// 16 bytes.
FATHOM_INLINE __m128i LoadLane(const unsigned char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Indices of eight blocks for one group of planes, of pairs of blocks that begin before the n-th.
// The first one's number in the segment is even, as is the number of blocks that its buffer has, so
// that both of a pair can be read.
FATHOM_INLINE void WideIndices(const unsigned char* words, const std::int64_t* offset, int n,
                               Bytes* index) {
  // Byte 8 b + 7 - i of the first block comes from byte b of lane i; lanes 4 and 5 are those of the
  // second vector.
  const Bytes first = _mm512_set_epi64(0x0717273707170000, 0x0616263606160000, 0x0515253505150000,
                                       0x0414243404140000, 0x0313233303130000, 0x0212223202120000,
                                       0x0111213101110000, 0x0010203000100000);
  const Bytes second = AddBytes(first, SetByte(8));
  const __mmask64 of_last = 0x0C0C0C0C0C0C0C0C;
  const Bytes identity = _mm512_set1_epi64(static_cast<long long>(0x8040201008040201u));
  for (int k = 0; k < n; k += 2, words += 16) {
    Bytes a = _mm512_castsi128_si512(LoadLane(words + offset[0]));
    a = _mm512_mask_broadcast_i64x2(a, 0x0C, LoadLane(words + offset[1]));
    a = _mm512_mask_broadcast_i64x2(a, 0x30, LoadLane(words + offset[2]));
    a = _mm512_mask_broadcast_i64x2(a, 0xC0, LoadLane(words + offset[3]));
    const __m256i last = _mm256_inserti128_si256(
        _mm256_castsi128_si256(LoadLane(words + offset[4])), LoadLane(words + offset[5]), 1);
    const Bytes b = _mm512_castsi256_si512(last);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Bytes from = j == 0 ? first : second;
      const Bytes matrix =
          _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(from, a), of_last, from, b);
      StoreBytes(index + k + j, _mm512_gf2p8affine_epi64_epi8(identity, matrix, 0));
    }
  }
}

// Four heads of two blocks: sums of a part, those of finished parts, indices and tables stay in
// registers.
constexpr int kTileBlocks = 2;

// The compiler would load a value that is used twice as an operand of both, and loads are what
// binds then.
FATHOM_INLINE Bytes InRegister(Bytes x) {
  asm("" : "+v"(x));
  return x;
}

// Planes' words that will be read some blocks on, fetched evenly: with every group of planes a tile
// fetches one or two of its own planes, so that those of eight blocks take the tiles of eight
// blocks. In one go they would take all the places for outstanding misses, which loads from the
// second-level cache need as well. Fewer than eight blocks, the last of a segment, fetch only some
// of the next ones' words.
struct TileAhead {
  static constexpr int kTiles = kWideBlocks / kTileBlocks;
  static_assert(kTiles < kWidePlanes && kWidePlanes <= 2 * kTiles);
  const unsigned char* words;  // or null
  const std::int64_t* offset;  // of planes
  int tile;

  FATHOM_INLINE void Fetch(int group) const {
    if (words == nullptr) return;
    const std::int64_t* at = offset + group * kWidePlanes + tile;
    PrefetchFar(words + at[0]);
    if (tile + kTiles < kWidePlanes) PrefetchFar(words + at[kTiles]);
  }
};

// What one group of planes adds to two blocks of Heads heads, or starts their sums with.
template <int Heads, bool First>
FATHOM_INLINE void AddWideGroup(const Bytes* index, const std::uint8_t* table, Bytes* sum) {
  const Bytes at[kTileBlocks] = {LoadBytes(index), LoadBytes(index + 1)};
#pragma GCC unroll 4
  for (int h = 0; h < Heads; ++h) {
    const Bytes t = InRegister(LoadBytes(table + 64 * h));
#pragma GCC unroll 2
    for (int k = 0; k < kTileBlocks; ++k) {
      const Bytes x = _mm512_permutexvar_epi8(at[k], t);
      Bytes& to = sum[kTileBlocks * h + k];
      to = First ? x : AddBytes(to, x);
    }
  }
}

// Sums of the part of groups first .. end - 1: sum[h * kTileBlocks + block]. index, table: of group
// 0; eight indices a group.
template <int Heads>
FATHOM_INLINE void SumWideGroups(const TileAhead& ahead, const Bytes* index,
                                 const std::uint8_t* table, int first, int end, int group,
                                 Bytes* sum) {
  if (first == end) {  // of a query that reads means alone
#pragma GCC unroll 8
    for (int i = 0; i < kTileBlocks * Heads; ++i) sum[i] = ZeroBytes();
    return;
  }
  index += first * kWideBlocks;
  table += std::int64_t{first} * group * 64;
  ahead.Fetch(first);
  AddWideGroup<Heads, true>(index, table, sum);
  for (int g = first + 1; g < end; ++g) {
    index += kWideBlocks;
    table += 64 * group;
    ahead.Fetch(g);
    AddWideGroup<Heads, false>(index, table, sum);
  }
}

// U of two blocks for Heads heads: sum[h * kTileBlocks + block]. table: of the first head.
template <int Heads>
FATHOM_INLINE void SumWideParts(const WidePlan& plan, const TileAhead& ahead, const Bytes* index,
                                const std::uint8_t* table, int group, Bytes* sum) {
  constexpr int kSums = kTileBlocks * Heads;
  SumWideGroups<Heads>(ahead, index, table, 0, plan.part_end[0], group, sum);
  if (plan.n_parts == 1) return;
  if (plan.n_parts == 2) {
    Bytes other[kSums];
    SumWideGroups<Heads>(ahead, index, table, plan.part_end[0], plan.part_end[1], group, other);
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sum[i] = AverageBytes(sum[i], other[i]);
    return;
  }
  Bytes waiting[3][kSums];  // averages that wait for their partner, by level of the tree
  for (int part = 1; part < plan.n_parts; ++part) {
    int level = 0;
    for (; (part - 1) >> level & 1; ++level) {
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) waiting[level][i] = sum[i];
    SumWideGroups<Heads>(ahead, index, table, plan.part_end[part - 1], plan.part_end[part], group,
                         sum);
    for (level = 0; part >> level & 1; ++level) {
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) sum[i] = AverageBytes(waiting[level][i], sum[i]);
    }
  }
}

// What eight blocks fetch for later: words of planes, and lines of means.
struct WideAhead {
  const unsigned char* words;  // or null
  const std::int64_t* offset;
  SideShare side;
  std::int64_t lines_a_tile;

  // Of a tile; fetches its lines of means.
  FATHOM_INLINE TileAhead Tile(int tile) const {
    const std::int64_t begin = tile * lines_a_tile;
    const std::int64_t end =
        begin + lines_a_tile < side.n_lines ? begin + lines_a_tile : side.n_lines;
    for (std::int64_t i = begin; i < end; ++i) PrefetchFar(side.lines + 64 * i);
    return {words, offset, tile};
  }
};

// Of blocks block .. block + n - 1 of the call.
FATHOM_INLINE WideAhead AheadOf(const ScanSumsArgs& a, const WidePlan& plan, int block, int n) {
  const int tiles = (n + kTileBlocks - 1) / kTileBlocks;
  const SideShare side = ShareOfSide(a, block, n);
  return {WordsAhead(a, block), plan.offsets(a.group), side, (side.n_lines + tiles - 1) / tiles};
}

template <int Heads>
FATHOM_INLINE void SumWideHeads(const ScanSumsArgs& a, const WidePlan& plan, const Bytes* index,
                                int head, int n, std::uint8_t* out, const WideAhead& ahead) {
  for (int k = 0; k < n; k += kTileBlocks) {
    const TileAhead tile = head == 0 ? ahead.Tile(k / kTileBlocks) : TileAhead{nullptr, nullptr, 0};
    Bytes sum[kTileBlocks * Heads];
    SumWideParts<Heads>(plan, tile, index + k, plan.tables() + 64 * head, a.group, sum);
    std::uint8_t* at = out + head * a.stride + k * kBlockTokens;
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h, at += a.stride) {
      StoreBytes(at, sum[kTileBlocks * h]);
      if (k + 1 < n) StoreBytes(at + kBlockTokens, sum[kTileBlocks * h + 1]);
    }
  }
}

// Blocks block .. block + n - 1 of the call, at most kWideBlocks.
void SumWideBlocks(const ScanSumsArgs& a, const WidePlan& plan, int block, int n) {
  Bytes index[kMaxGroups * kWideBlocks];
  const auto* words = reinterpret_cast<const unsigned char*>(a.planes + a.first + block);
  const std::int64_t* offset = plan.offsets(a.group);
  const WideAhead ahead = AheadOf(a, plan, block, n);
  for (int g = 0; g < plan.n_groups; ++g, offset += kWidePlanes) {
    WideIndices(words, offset, n, index + g * kWideBlocks);
  }
  std::uint8_t* out = a.sums + block * kBlockTokens;
  int head = 0;
  for (; head + 4 <= a.group; head += 4) SumWideHeads<4>(a, plan, index, head, n, out, ahead);
  for (; head + 2 <= a.group; head += 2) SumWideHeads<2>(a, plan, index, head, n, out, ahead);
  for (; head < a.group; ++head) SumWideHeads<1>(a, plan, index, head, n, out, ahead);
}

void WideSums(const ScanSumsArgs* args) {
  const auto& plan = *static_cast<const WidePlan*>(args->plan);
  for (int b = 0; b < args->count; b += kWideBlocks) {
    const int left = args->count - b;
    SumWideBlocks(*args, plan, b, left < kWideBlocks ? left : kWideBlocks);
  }
}
