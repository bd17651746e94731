// SPDX-License-Identifier: MIT
// Scan of the mean codec: U of ScanTable by table lookups, bytes throughout.
//
// Four planes of a token make a number of 0 .. 15, and a byte shuffle looks up what those four
// planes add for 16 tokens of a 128-bit lane at once: per four planes and head one lookup and one
// add per token, where masked adds need four of twice the width. All sums are modulo 256; what they
// come to is 0 .. 255 by the definition of ScanTable, so nothing is lost and every set finds the
// same bits.
//
// A plane's words of kVectorBlocks blocks are one vector. Bytes of four planes are interleaved
// (unpack by 8, then by 16 bits), so that a 32-bit element holds 4 planes x 8 tokens, and two
// exchanges of bits transpose its two 4x4 halves:
//   vector r, lane L:  r = 0, 1: tokens 0 .. 31 and 32 .. 63 of block 2L;  r = 2, 3: of block 2L +
//   1 element m, byte i: tokens 8m + i in the low nibble, 8m + 4 + i in the high one
// Nibbles are split once for all heads. At the end, interleaving the sums of low and high nibbles
// by 32 bits restores the order of tokens.
//
// Per 64 tokens and four planes, in vectors of 32 bytes: 2 loads, 4 unpacks, 24 for the bits, 6 for
// the nibbles; per head 4 lookups and 4 adds. Bound by those of the heads from four heads on.

constexpr int kParts = 8;
constexpr int kGroupPlanes = 4;
constexpr int kVectorBlocks = kByteLanes / 8;
constexpr int kIndexVectors = 8;  // of a group: 4 vectors, low and high nibbles
constexpr int kMaxGroups = kMaxHeadDim * kPlanes / kGroupPlanes + kParts;

struct NibblePlan {
  std::int32_t n_groups;
  std::int32_t n_parts;
  std::int32_t part_end[kParts];  // in groups
  // Then std::int64_t offset[n_groups][4], bytes from the segment's first plane, and
  // std::uint8_t table[n_groups][group][16].
  const std::int64_t* offsets() const { return reinterpret_cast<const std::int64_t*>(this + 1); }
  std::int64_t* offsets() { return reinterpret_cast<std::int64_t*>(this + 1); }
  const std::uint8_t* tables() const {
    return reinterpret_cast<const std::uint8_t*>(offsets() + n_groups * kGroupPlanes);
  }
};

int MostGroups(int n_planes) { return (n_planes + kGroupPlanes - 1) / kGroupPlanes + kParts; }

std::int64_t NibblePlanBytes(int n_planes, int group) {
  return static_cast<std::int64_t>(sizeof(NibblePlan)) +
         std::int64_t{MostGroups(n_planes)} * (kGroupPlanes * 8 + 16 * group);
}

// The planes of every group; a group that is not full repeats its last plane with weight 0. Returns
// the number of groups.
int ListGroups(const ScanPlanArgs& a, NibblePlan* plan) {
  std::int64_t* offset = plan->offsets();
  int n = 0;
  int p = 0;
  for (int r = 0; r < a.n_parts; ++r) {
    for (; p < a.part_end[r]; p += kGroupPlanes, ++n) {
      for (int i = 0; i < kGroupPlanes; ++i) {
        const int at = p + i < a.part_end[r] ? p + i : a.part_end[r] - 1;
        offset[n * kGroupPlanes + i] = static_cast<std::int64_t>(a.plane[at]) * a.row_blocks * 8;
      }
    }
    p = a.part_end[r];
    plan->part_end[r] = n;
  }
  return n;
}

// What each of the 16 combinations of planes p .. p + n - 1 adds for one head, and `start` once.
void FillNibbleTable(const ScanPlanArgs& a, int head, int p, int n, int start,
                     std::uint8_t* table) {
  table[0] = static_cast<std::uint8_t>(start);
  for (int i = 0; i < kGroupPlanes; ++i) {
    const int weight = i < n ? a.weight[(p + i) * a.group + head] : 0;
    for (int j = 0; j < 1 << i; ++j) {
      table[(1 << i) + j] = static_cast<std::uint8_t>(table[j] + weight);
    }
  }
}

void MakeNibblePlan(const ScanPlanArgs* args) {
  const ScanPlanArgs& a = *args;
  auto* plan = static_cast<NibblePlan*>(a.out);
  plan->n_parts = a.n_parts;
  plan->n_groups = ListGroups(a, plan);
  auto* table = const_cast<std::uint8_t*>(plan->tables());
  int p = 0;
  for (int r = 0; r < a.n_parts; ++r) {
    bool first = true;
    for (; p < a.part_end[r]; p += kGroupPlanes, first = false) {
      const int left = a.part_end[r] - p;
      for (int h = 0; h < a.group; ++h, table += 16) {
        const int start = first ? a.low[r * a.group + h] : 0;
        FillNibbleTable(a, h, p, left < kGroupPlanes ? left : kGroupPlanes, start, table);
      }
    }
    p = a.part_end[r];
  }
}

// kVectorBlocks words; those from n on are not read.
FATHOM_INLINE Bytes LoadWords(const unsigned char* p, int n) {
  if (n >= kVectorBlocks) return LoadBytes(p);
  alignas(64) unsigned char copy[kByteLanes] = {};
  for (int i = 0; i < n; ++i) __builtin_memcpy(copy + 8 * i, p + 8 * i, 8);
  return LoadBytes(copy);
}

// The nibbles of one group of planes, [kIndexVectors].
FATHOM_INLINE void Transpose4(const unsigned char* words, const std::int64_t* offset, int n,
                              Bytes* index) {
  const Bytes a = LoadWords(words + offset[0], n);
  const Bytes b = LoadWords(words + offset[1], n);
  const Bytes c = LoadWords(words + offset[2], n);
  const Bytes d = LoadWords(words + offset[3], n);
  const Bytes low_ab = UnpackLow8(a, b);
  const Bytes high_ab = UnpackHigh8(a, b);
  const Bytes low_cd = UnpackLow8(c, d);
  const Bytes high_cd = UnpackHigh8(c, d);
  const Bytes r[4] = {UnpackLow16(low_ab, low_cd), UnpackHigh16(low_ab, low_cd),
                      UnpackLow16(high_ab, high_cd), UnpackHigh16(high_ab, high_cd)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Bytes x = SwapBits<7>(SwapBits<14>(r[i], 0x0000CCCC), 0x00AA00AA);
    StoreBytes(index + 2 * i, LowNibbles(x));
    StoreBytes(index + 2 * i + 1, HighNibbles(x));
  }
}

// Sums of one vector r of a part for Heads heads: low and high nibbles.
template <int Heads>
FATHOM_INLINE void SumGroups(const Bytes* index, const std::uint8_t* table, int n_groups, int group,
                             Bytes* sum) {
#pragma GCC unroll 16
  for (int h = 0; h < 2 * Heads; ++h) sum[h] = ZeroBytes();
  for (int g = 0; g < n_groups; ++g, index += kIndexVectors, table += 16 * group) {
    const Bytes low = LoadBytes(index);
    const Bytes high = LoadBytes(index + 1);
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      const Bytes t = LoadTable(table + 16 * h);
      sum[2 * h] = AddBytes(sum[2 * h], Lookup(t, low));
      sum[2 * h + 1] = AddBytes(sum[2 * h + 1], Lookup(t, high));
    }
  }
}

// U of one vector r for Heads heads, low and high nibbles. table: of the first head.
template <int Heads>
FATHOM_INLINE void SumParts(const NibblePlan& plan, const Bytes* index, const std::uint8_t* table,
                            int group, Bytes* sum) {
  constexpr int kSums = 2 * Heads;
  SumGroups<Heads>(index, table, plan.part_end[0], group, sum);
  if (plan.n_parts == 1) return;
  Bytes waiting[3][kSums];  // averages that wait for their partner, by level of the tree
  for (int part = 1; part < plan.n_parts; ++part) {
    int level = 0;
    for (; (part - 1) >> level & 1; ++level) {
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) waiting[level][i] = sum[i];
    const int first = plan.part_end[part - 1];
    SumGroups<Heads>(index + first * kIndexVectors, table + std::int64_t{first} * group * 16,
                     plan.part_end[part] - first, group, sum);
    for (level = 0; part >> level & 1; ++level) {
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) sum[i] = AverageBytes(waiting[level][i], sum[i]);
    }
  }
}

// out: of the first head and block.
template <int Heads>
FATHOM_INLINE void SumHeads(const ScanSumsArgs& a, const NibblePlan& plan, const Bytes* index,
                            int head, int n, std::uint8_t* out) {
  const std::uint8_t* table = plan.tables() + 16 * head;
  for (int half = 0; half < 2 && half < n; ++half) {  // blocks 2L, then 2L + 1
    Bytes first[2 * Heads];
    Bytes second[2 * Heads];
    SumParts<Heads>(plan, index + 4 * half, table, a.group, first);
    SumParts<Heads>(plan, index + 4 * half + 2, table, a.group, second);
    std::uint8_t* at = out + head * a.stride + half * kBlockTokens;
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h, at += a.stride) {
      const Bytes quarter[4] = {UnpackLow32(first[2 * h], first[2 * h + 1]),
                                UnpackHigh32(first[2 * h], first[2 * h + 1]),
                                UnpackLow32(second[2 * h], second[2 * h + 1]),
                                UnpackHigh32(second[2 * h], second[2 * h + 1])};
      StoreQuarters(quarter, (n - half + 1) / 2, at);
    }
  }
}

// Blocks block .. block + n - 1 of the call, at most kVectorBlocks.
void SumBlocks(const ScanSumsArgs& a, const NibblePlan& plan, int block, int n) {
  Bytes index[kMaxGroups * kIndexVectors];
  const auto* words = reinterpret_cast<const unsigned char*>(a.planes + a.first + block);
  const bool new_line = block % kLineBlocks == 0;
  const unsigned char* ahead = new_line ? WordsAhead(a, block) : nullptr;
  if (new_line) {
    const SideShare side = ShareOfSide(a, block, kLineBlocks);
    for (std::int64_t i = 0; i < side.n_lines; ++i) PrefetchFar(side.lines + 64 * i);
  }
  const std::int64_t* offset = plan.offsets();
  for (int g = 0; g < plan.n_groups; ++g, offset += kGroupPlanes) {
    Transpose4(words, offset, n, index + g * kIndexVectors);
    if (ahead == nullptr) continue;
    for (int i = 0; i < kGroupPlanes; ++i) PrefetchFar(ahead + offset[i]);
  }
  std::uint8_t* out = a.sums + block * kBlockTokens;
  int head = 0;
  for (; head + 4 <= a.group; head += 4) SumHeads<4>(a, plan, index, head, n, out);
  for (; head + 2 <= a.group; head += 2) SumHeads<2>(a, plan, index, head, n, out);
  for (; head < a.group; ++head) SumHeads<1>(a, plan, index, head, n, out);
}

void NibbleSums(const ScanSumsArgs* args) {
  const auto& plan = *static_cast<const NibblePlan*>(args->plan);
  for (int b = 0; b < args->count; b += kVectorBlocks) {
    const int left = args->count - b;
    SumBlocks(*args, plan, b, left < kVectorBlocks ? left : kVectorBlocks);
  }
}
