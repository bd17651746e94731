// SPDX-License-Identifier: MIT
// Rank: candidates and the mass of all others, straight from the bytes U of a scan.
//
// With F = 2^shift, T = F U + base. In block b a token is a candidate when U >= least_b =
// ceil((threshold - base) / F). Bytes are raised by raise_b = clip(255 - least_b, 0, 255), with
// saturation: x = min(U + raise_b, 255). Then candidates are the bytes 255 (but for blocks out of
// reach, least_b > 255, which have none), and all others have
//   slope (T - origin) = -decay (255 - x) + slope (base - origin) + decay (255 - raise_b),
// decay = slope F: a table of x times a factor of the block. The table is a product of two of 16
// entries, e^(-decay (15 - low nibble)) in 7 bits and e^(-16 decay (15 - high nibble)) in two times
// 7, so that two lookups and two byte dot products do what would be an exp per token. Products are
// exact integers; a weight is right within half a unit of each table. What candidates and tokens
// outside the range add is taken out again, exactly.
// Bound by about 20 byte operations per 64 tokens and head in 512-bit vectors.

constexpr float kLowTop = 128;
constexpr float kHighTop = 16383;  // 127 * 129: two digits of 7 bits

struct DecayTable {
  std::uint8_t low[16];         // 0 .. 128
  std::uint8_t high_digit[16];  // high >> 7
  std::uint8_t low_digit[16];   // high & 127
  float inverse;                // 1 / (low[15] * high[15])
};

FATHOM_INLINE float ExpOne(float x) {
  float lanes[kLanes];
  Store(lanes, Exp(MinOrSecond(Set(88.0f), Set(x))));
  return lanes[0];
}

void MakeDecayTable(float decay, DecayTable* t) {
  for (int i = 0; i < 16; ++i) {
    const float back = static_cast<float>(15 - i);
    // NOLINTBEGIN(bugprone-incorrect-roundings): nothing here is negative
    t->low[i] = static_cast<std::uint8_t>(kLowTop * ExpOne(-decay * back) + 0.5f);
    const int high = static_cast<int>(kHighTop * ExpOne(-16 * decay * back) + 0.5f);
    // NOLINTEND(bugprone-incorrect-roundings)
    t->high_digit[i] = static_cast<std::uint8_t>(high >> 7);
    t->low_digit[i] = static_cast<std::uint8_t>(high & 127);
  }
  t->inverse = 1.0f / (kLowTop * kHighTop);
}

int DecayOf(const DecayTable& t, int x) {
  return t.low[x & 15] * (t.high_digit[x >> 4] * 128 + t.low_digit[x >> 4]);
}

// Blocks b .. b + n - 1: bases, least_b and raise_b.
struct BlockLimits {
  std::int32_t base[kLanes];
  std::int32_t least[kLanes];
  std::int32_t raise[kLanes];
};

FATHOM_INLINE void FindLimits(const RankBlocksArgs& a, std::int64_t b, int n, BlockLimits* limits) {
  for (int i = 0; i < kLanes; ++i) limits->base[i] = i < n ? a.base[b + i] : 0;
  const I32 round_up = SetInt(a.threshold + (1 << a.shift) - 1);
  const I32 least = ShiftRightInt(SubInt(round_up, LoadInt(limits->base)), a.shift);
  const I32 most = SetInt(255);
  StoreInt(limits->least, least);
  StoreInt(limits->raise, MaxInt(SetInt(0), MinInt(most, SubInt(most, least))));
}

// Bits of tokens first .. last - 1 of a block; both may lie outside.
FATHOM_INLINE std::uint64_t TokenRange(std::int64_t first, std::int64_t last) {
  if (first <= 0 && last >= kBlockTokens) return ~std::uint64_t{0};
  if (first >= kBlockTokens || last <= 0 || first >= last) return 0;
  std::uint64_t bits = ~std::uint64_t{0};
  if (last < kBlockTokens) bits &= (std::uint64_t{1} << last) - 1;
  if (first > 0) bits &= ~std::uint64_t{0} << first;
  return bits;
}

// Raised bytes of one block that are 255, and, in the lanes of *mass, what all 64 tokens weigh.
template <bool Weigh>
FATHOM_INLINE std::uint64_t PassBlock(const std::uint8_t* sums, int raise, const DecayTable& table,
                                      I32* mass) {
  constexpr int kVectors = kBlockTokens / kByteLanes;
  const Bytes up = SetByte(raise);
  const Bytes full = SetByte(255);
  std::uint64_t bits = 0;
  I32 high = SetInt(0);
  I32 low = SetInt(0);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Bytes x = AddSaturated(LoadBytes(sums + v * kByteLanes), up);
    bits |= EqualBits(x, full) << (v * kByteLanes % 64);
    if (!Weigh) continue;
    const Bytes weight = Lookup(LoadTable(table.low), LowNibbles(x));
    const Bytes nibble = HighNibbles(x);
    high = DotAdd(high, weight, Lookup(LoadTable(table.high_digit), nibble));
    low = DotAdd(low, weight, Lookup(LoadTable(table.low_digit), nibble));
  }
  if (Weigh) *mass = AddInt(ShiftLeft7(high), low);
  return bits;
}

// What the tokens of `out` weigh, in the table's integers.
float Excluded(const RankBlocksArgs& a, std::int64_t b, int raise, std::uint64_t out,
               const DecayTable& table) {
  std::int64_t sum = 0;
  for (; out != 0; out &= out - 1) {
    const int x = a.sums[b * kBlockTokens + __builtin_ctzll(out)] + raise;
    sum += DecayOf(table, x > 255 ? 255 : x);
  }
  return static_cast<float>(sum);
}

// Marks of blocks b .. b + n - 1; their lanes of mass, and in taken what to take out of it, in the
// table's integers.
template <bool Weigh>
FATHOM_INLINE void MarkBlocks(const RankBlocksArgs& a, const DecayTable& table, std::int64_t b,
                              int n, const BlockLimits& limits, F32* mass, float* taken) {
  const int top = DecayOf(table, 255);
  std::int32_t marked[kLanes] = {};
  for (int i = 0; i < n; ++i) {
    I32 lanes = SetInt(0);
    std::uint64_t bits =
        PassBlock<Weigh>(a.sums + (b + i) * kBlockTokens, limits.raise[i], table, &lanes);
    if (limits.least[i] > 255) bits = 0;
    a.candidates[b + i] = bits;
    if (!Weigh) continue;
    mass[i] = IntToFloat(lanes);
    marked[i] = __builtin_popcountll(bits);
  }
  if (Weigh) Store(taken, Mul(IntToFloat(LoadInt(marked)), Set(static_cast<float>(top))));
  // Blocks at the ends of the range.
  for (int i = 0; i < n; ++i) {
    const std::int64_t at = (b + i) * kBlockTokens;
    if (at >= a.first && at + kBlockTokens <= a.last) continue;
    const std::uint64_t range = TokenRange(a.first - at, a.last - at);
    const std::uint64_t bits = a.candidates[b + i];
    if (Weigh) taken[i] += Excluded(a, b + i, limits.raise[i], ~(range | bits), table);
    a.candidates[b + i] = bits & range;
  }
}

template <bool Weigh>
void PassBlocks(const RankBlocksArgs& a, const DecayTable& table) {
  const float decay = a.slope * static_cast<float>(1 << a.shift);
  const F32 origin = Set(a.slope * -a.origin + decay * 255);
  for (std::int64_t b = 0; b < a.n_blocks; b += kLanes) {
    const std::int64_t left = a.n_blocks - b;
    const int n = left < kLanes ? static_cast<int>(left) : kLanes;
    BlockLimits limits;
    FindLimits(a, b, n, &limits);
    F32 mass[kLanes];
    float taken[kLanes];
    MarkBlocks<Weigh>(a, table, b, n, limits, mass, taken);
    if (!Weigh) continue;
    for (int i = n; i < kLanes; ++i) mass[i] = Zero();
    const F32 base = IntToFloat(LoadInt(limits.base));
    const F32 raise = IntToFloat(LoadInt(limits.raise));
    const F32 x = MulAdd(Set(-decay), raise, MulAdd(Set(a.slope), base, origin));
    const F32 weight = Mul(Exp(MinOrSecond(Set(88.0f), x)), Set(table.inverse));
    const F32 sum = Sub(ReduceRows(mass), Load(taken));
    StoreFirst(a.rest + b, Mul(MaxOrSecond(sum, Zero()), weight), n);
  }
}

void RankBlocks(const RankBlocksArgs* args) {
  DecayTable table;
  if (args->slope == 0) {
    PassBlocks<false>(*args, table);
    return;
  }
  MakeDecayTable(args->slope * static_cast<float>(1 << args->shift), &table);
  PassBlocks<true>(*args, table);
}

constexpr int kMarkBlocks = 64;  // looked through at a time
constexpr int kMarksAtOnce = 4;

FATHOM_INLINE int MarkCount(std::int64_t left) {
  return left < kMarkBlocks ? static_cast<int>(left) : kMarkBlocks;
}

// Marked tokens in order; room for kMarksAtOnce more.
struct MarkedTokens {
  std::int32_t token[kMarkBlocks * kBlockTokens + kMarksAtOnce];
};

// Those of n blocks; returns how many. Hardly a branch depends on the marks: a few tokens are
// written for every block that has any, and the next block writes over those that were none.
FATHOM_INLINE int ListTokens(const std::uint64_t* marks, int n, MarkedTokens* out) {
  std::int32_t block[kMarkBlocks];
  int n_blocks = 0;
  for (int b = 0; b < n; ++b) {
    block[n_blocks] = b;
    n_blocks += marks[b] != 0 ? 1 : 0;
  }
  int count = 0;
  for (int i = 0; i < n_blocks; ++i) {
    std::uint64_t bits = marks[block[i]];
    const std::int32_t first = block[i] * kBlockTokens;
    const int end = count + __builtin_popcountll(bits);
    for (int at = count; at < end; at += kMarksAtOnce) {
#pragma GCC unroll 4
      for (int j = 0; j < kMarksAtOnce; ++j) {
        out->token[at + j] = first + __builtin_ctzll(bits | std::uint64_t{1} << 63);
        bits &= bits - 1;
      }
    }
    count = end;
  }
  return count;
}

#ifndef FATHOM_COMPRESS_BYTES
// The bytes of marked tokens of a block, in order, and anything behind them, 64 + kMarksAtOnce in
// all; returns how many are marked.
FATHOM_INLINE int CompressBytes(std::uint64_t marks, const std::uint8_t* from, std::uint8_t* to) {
  const int n = __builtin_popcountll(marks);
  for (int i = 0; i < n; i += kMarksAtOnce) {
#pragma GCC unroll 4
    for (int j = 0; j < kMarksAtOnce; ++j) {
      to[i + j] = from[__builtin_ctzll(marks | std::uint64_t{1} << 63)];
      marks &= marks - 1;
    }
  }
  return n;
}
#endif

// Keys of kLanes tokens of one block, from their bytes U.
FATHOM_INLINE I32 KeysOf(const std::uint8_t* sums, F32 step, F32 base, F32 scale) {
  return OrderKey(Mul(MulAdd(LoadByte(sums), step, base), scale));
}

// Those of marked tokens, block by block: hardly a branch depends on the marks.
std::int64_t KeysOfMarked(const RankKeysArgs& a) {
  static_assert(kLanes <= kSelectSlack);  // a block without marks writes that many keys behind
  const F32 step = Set(static_cast<float>(1 << a.shift));
  const F32 scale = Set(a.scale);
  std::int64_t n = 0;
  std::uint8_t marked[kBlockTokens + kMarksAtOnce] = {};
  for (std::int64_t b = 0; b < a.n; ++b) {
    const int count = CompressBytes(a.marks[b], a.sums + b * kBlockTokens, marked);
    const F32 base = Set(static_cast<float>(a.base[b]));
    StoreInt(a.keys + n, KeysOf(marked, step, base, scale));
    for (int i = kLanes; i < count; i += kLanes) {
      StoreInt(a.keys + n + i, KeysOf(marked + i, step, base, scale));
    }
    n += count;
  }
  return n;
}

std::int64_t RankKeys(const RankKeysArgs* args) {
  const RankKeysArgs& a = *args;
  if (a.marks != nullptr) return KeysOfMarked(a);
  // First T, then all of it at once to keys.
  for (std::int64_t i = 0; i < a.n; ++i) {
    const std::int32_t token = a.tokens[i];
    a.keys[i] = (a.sums[token] << a.shift) + a.base[token / kBlockTokens];
  }
  const F32 scale = Set(a.scale);
  for (std::int64_t i = 0; i < a.n; i += kLanes) {
    StoreInt(a.keys + i, OrderKey(Mul(IntToFloat(LoadInt(a.keys + i)), scale)));
  }
  return a.n;
}

std::int64_t RankUnion(const RankUnionArgs* args) {
  const RankUnionArgs& a = *args;
  std::int64_t n = 0;
  for (std::int64_t from = a.first; from < a.first + a.count; from += kMarkBlocks) {
    const int n_blocks = MarkCount(a.first + a.count - from);
    std::uint64_t any[kMarkBlocks] = {};
    for (int h = 0; h < a.group; ++h) {
      const std::uint64_t* marks = a.marks + h * a.stride + from;
      for (int b = 0; b < n_blocks; ++b) any[b] |= marks[b];
    }
    if (a.tokens == nullptr) {
      for (int b = 0; b < n_blocks; ++b) n += __builtin_popcountll(any[b]);
      continue;
    }
    MarkedTokens marked;
    const int n_marked = ListTokens(any, n_blocks, &marked);
    const auto first = static_cast<std::int32_t>(from * kBlockTokens);
    for (int i = 0; i < n_marked; ++i, ++n) {
      const std::uint64_t* marks = a.marks + from + marked.token[i] / kBlockTokens;
      const int bit = marked.token[i] % kBlockTokens;
      std::uint64_t heads = 0;
      for (int h = 0; h < a.group; ++h) heads |= (marks[h * a.stride] >> bit & 1) << h;
      a.tokens[n] = first + marked.token[i];
      a.mask[n] = static_cast<std::uint16_t>(heads);
    }
  }
  return n;
}
