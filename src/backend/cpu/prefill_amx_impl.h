// SPDX-License-Identifier: MIT
// Prefill in tiles of bf16: causal flash attention of a tile of query positions, nearly as exact as
// in f32. Written over the words of simd_*.h and tile_amx.h, included after them in kernels_amx.cc.
// docs/kernels/prefill-cpu.md has the reasons and the figures.
//
//   S = Q K^T;   top' = max(top, S);   P = 2^(S - top');   O = 2^(top - top') O + P V
//
// Every operand is split into two bf16, hi + lo, and a product is A B = hi hi + lo hi + hi lo,
// summed in f32. Of a key or value in fp16 nothing is lost; queries and weights keep 16 bits. The
// product left out, lo lo, is below 2^-16 |A||B|. Relative L2 against ref: 6e-6 on normal keys;
// without any one of the six products 1e-3 to 3e-3.
//
// Rows are (position, head of the group) pairs, 32 to a block; a tile of 128 keys is split and
// packed once for all of them. Both products go in steps of 32 products of the sum, 2 x 2 tiles of
// C: 8 tile loads of 1 KiB for 12 tile products. For 256 rows at D = 128 everything takes 450 KiB,
// in second-level cache.
//
// Cycles for a block and a key tile (4,096 scores) at D = 128:
//   S, P V    32 steps of 12 tile products, 16 cycles each: 6,144 of the tile unit
//   softmax   about 21 vector operations for 16 scores, two at a time: 2,900
//   pack      about 10,400 for 128 keys, shared by the blocks: 1,300 with 8
// So 1.5 cycles per score bound by the tile unit, 2.5 when nothing overlaps; the products alone
// take 8 in f32.
//
// An inf or NaN does not survive the split: tiles with such a query, and positions that see such a
// row, are left to the f32 kernel of PlainKernels(). The result of a row depends neither on other
// rows nor on the tiling, and one thread does a tile: the number of threads never shows.

constexpr int kKeyTile = 128;
constexpr int kStep = 32;  // products of a step, and the side of a 2 x 2 block of C
constexpr int kStepWords = 4 * kTileWords;  // an operand of a step: two tiles of hi and two of lo
constexpr int kKeySteps = kKeyTile / kStep;

struct TileScratch {
  float* q;        // [blocks][Steps(D)] steps
  float* out;      // [blocks][Steps(D)][2][2] tiles: rows, channels
  float* keys;     // [kKeySteps][Steps(D)] steps
  float* values;   // [Steps(D)][kKeySteps] steps
  float* scores;   // [kStep][kKeyTile]
  float* weights;  // [kKeySteps] steps
  float* sums;     // [blocks * kStep][kLanes]
  float* top;      // [blocks * kStep]
  float* alpha;    // [kStep]
};

int Steps(int n) { return (n + kStep - 1) / kStep; }

std::int64_t PrefillScratch(int rows, int head_dim) {
  const std::int64_t row_steps = static_cast<std::int64_t>(Steps(rows)) * Steps(head_dim);
  const std::int64_t own = 2 * row_steps * kStepWords +
                           2 * kKeySteps * Steps(head_dim) * kStepWords + kStep * kKeyTile +
                           kKeySteps * kStepWords +
                           static_cast<std::int64_t>(Steps(rows)) * kStep * (kLanes + 1) + kStep;
  const std::int64_t plain = PlainKernels()->prefill_scratch(rows, head_dim);
  return own > plain ? own : plain;
}

TileScratch CarveScratch(const PrefillTileArgs& a) {
  const std::int64_t blocks = Steps(a.n_positions * a.group);
  const std::int64_t steps = Steps(a.head_dim);
  TileScratch s;
  s.q = a.scratch;
  s.out = s.q + blocks * steps * kStepWords;
  s.keys = s.out + blocks * steps * kStepWords;
  s.values = s.keys + kKeySteps * steps * kStepWords;
  s.scores = s.values + kKeySteps * steps * kStepWords;
  s.weights = s.scores + kStep * kKeyTile;
  s.sums = s.weights + kKeySteps * kStepWords;
  s.top = s.sums + blocks * kStep * kLanes;
  s.alpha = s.top + blocks * kStep;
  return s;
}

// 2^x for x <= 0 or NaN, relative error below 2e-7; 0 below -126.
FATHOM_INLINE F32 Exp2(F32 x) {
  const F32 limit = Set(-126.0f);
  const F32 safe = MaxOrSecond(limit, x);
  const F32 n = Round(safe);
  const F32 r = Sub(safe, n);
  F32 p = Set(1.3264727247e-3f);
  p = MulAdd(p, r, Set(9.6715126881e-3f));
  p = MulAdd(p, r, Set(5.5507337436e-2f));
  p = MulAdd(p, r, Set(2.4022242085e-1f));
  p = MulAdd(p, r, Set(6.9314697760e-1f));
  p = MulAdd(p, r, Set(1.0f));
  return ZeroBelow(x, limit, ScaleByPowerOf2(p, n));
}

// The left operand of a step: tiles lo, lo, hi, hi of rows 0-15 and 16-31, a word for two numbers
// of a row. Stores numbers k .. k + 2 kLanes - 1 of row r; k: from the first step on.
FATHOM_INLINE void StoreLeft(float* steps, int r, int k, F32 x0, F32 x1) {
  float* lo = steps + k / kStep * kStepWords + r / 16 * kTileWords + r % 16 * 16 + k % kStep / 2;
  const F32 hi0 = RoundBf16(x0);
  const F32 hi1 = RoundBf16(x1);
  StoreBf16(lo, Sub(x0, hi0), Sub(x1, hi1));
  StoreBf16(lo + 2 * kTileWords, hi0, hi1);
}

// The right operand of a step: tiles hi, hi, lo, lo of columns 0-15 and 16-31, a word for numbers
// 2k and 2k + 1 of a column. Stores kLanes columns; `to` is the place of the hi part.
FATHOM_INLINE void StoreRight(float* to, F32 even, F32 odd) {
  const F32 hi0 = RoundBf16(even);
  const F32 hi1 = RoundBf16(odd);
  Store(to, PairBf16(hi0, hi1));
  Store(to + 2 * kTileWords, PairBf16(Sub(even, hi0), Sub(odd, hi1)));
}

FATHOM_INLINE void DotStep(const float* left, const float* right) {
  const auto dot = []() __attribute__((always_inline)) {
    TileDot<0, 4, 6>();
    TileDot<1, 4, 7>();
    TileDot<2, 5, 6>();
    TileDot<3, 5, 7>();
  };
  TileLoad<4>(left);
  TileLoad<5>(left + kTileWords);
  TileLoad<6>(right);
  TileLoad<7>(right + kTileWords);
  dot();
  TileLoad<4>(left + 2 * kTileWords);
  TileLoad<5>(left + 3 * kTileWords);
  dot();
  TileLoad<6>(right + 2 * kTileWords);
  TileLoad<7>(right + 3 * kTileWords);
  dot();
}

// Channels step * kStep .. of kLanes keys, the first of them number `key` of the tile.
void PackKeys(const Half* rows, int n, int head_dim, int key, int step, float* keys) {
  float* to = keys +
              (static_cast<std::int64_t>(key / kStep) * Steps(head_dim) + step) * kStepWords +
              key % kStep / 16 * kTileWords + key % 16;
  for (int c = 0; c < kStep; c += kLanes) {
    const int d = step * kStep + c;
    F32 x[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      const Half* row = rows + static_cast<std::int64_t>(key + r) * 2 * head_dim;
      x[r] = key + r < n && d < head_dim ? LoadHalf(row + d) : Zero();
    }
    Transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2) StoreRight(to + (c + i) / 2 * 16, x[i], x[i + 1]);
  }
}

// Channels d .. d + 15 of keys step * kStep ...
void PackValues(const Half* rows, int n, int head_dim, int step, int d, float* values) {
  float* to = values + (static_cast<std::int64_t>(d / kStep) * kKeySteps + step) * kStepWords +
              d % kStep / 16 * kTileWords;
  for (int i = 0; i < kStep; i += 2) {
    const int key = step * kStep + i;
    const Half* value = rows + static_cast<std::int64_t>(key) * 2 * head_dim + head_dim + d;
    for (int c = 0; c < 16; c += kLanes) {
      const bool inside = d < head_dim;
      const F32 even = inside && key < n ? LoadHalf(value + c) : Zero();
      const F32 odd = inside && key + 1 < n ? LoadHalf(value + 2 * head_dim + c) : Zero();
      StoreRight(to + i / 2 * 16 + c, even, odd);
    }
  }
}

// The first n keys of a tile; zeros fill up the last step.
void PackTile(const Half* rows, int n, int head_dim, const TileScratch& s) {
  for (int key = 0; key < Steps(n) * kStep; key += kLanes) {
    for (int step = 0; step < Steps(head_dim); ++step) {
      PackKeys(rows, n, head_dim, key, step, s.keys);
    }
  }
  for (int step = 0; step < Steps(n); ++step) {
    for (int d = 0; d < Steps(head_dim) * kStep; d += 16) {
      PackValues(rows, n, head_dim, step, d, s.values);
    }
  }
}

// A row of n scores to weights. n: a multiple of kStep, of which `visible` may be seen; the others
// become 0.
FATHOM_INLINE void SoftmaxRow(const TileScratch& s, int block, int r, int n, int visible) {
  float* scores = s.scores + r * kKeyTile;
  float* top = s.top + block * kStep + r;
  float* sums = s.sums + (block * kStep + r) * kLanes;
  const F32 fill = Set(-__builtin_inff());
  F32 most = Set(*top);
  for (int k = 0; k < n; k += kLanes) {
    F32 x = Load(scores + k);
    if (visible < n) {
      x = FirstLanes(x, visible > k ? visible - k : 0, fill);
      Store(scores + k, x);
    }
    most = MaxOrSecond(x, most);
  }
  const float new_top = ReduceMax(most);
  F32 total = Load(sums);
  s.alpha[r] = 1;
  if (new_top > *top) {  // rare after the first tiles
    float fade[kLanes];
    Store(fade, Exp2(Set(*top - new_top)));
    s.alpha[r] = fade[0];
    total = Mul(total, Set(fade[0]));
    *top = new_top;
  }
  const F32 shift = Set(new_top == -__builtin_inff() ? 0.0f : new_top);
  for (int k = 0; k < n; k += 2 * kLanes) {
    const F32 p0 = Exp2(Sub(Load(scores + k), shift));
    const F32 p1 = Exp2(Sub(Load(scores + k + kLanes), shift));
    StoreLeft(s.weights, r, k, p0, p1);
    total = Add(total, Add(p0, p1));
  }
  Store(sums, total);
}

// Splits the queries and empties the outputs. False if a query is not finite or cannot be split.
bool StartTile(const PrefillTileArgs& a, const TileScratch& s) {
  const int rows = a.n_positions * a.group;
  const int steps = Steps(a.head_dim);
  const F32 scale = Set(a.scale * 1.44269504f);  // scores in powers of 2
  F32 check = Zero();
  for (int r = 0; r < Steps(rows) * kStep; ++r) {
    const float* q = a.q + r / a.group * a.stride + r % a.group * a.head_dim;
    float* left = s.q + static_cast<std::int64_t>(r / kStep) * steps * kStepWords;
    for (int d = 0; d < steps * kStep; d += 2 * kLanes) {
      F32 x[2];
      for (int i = 0; i < 2; ++i) {
        const bool inside = r < rows && d + i * kLanes < a.head_dim;
        x[i] = inside ? Mul(Load(q + d + i * kLanes), scale) : Zero();
        const F32 rest = Sub(x[i], RoundBf16(x[i]));
        check = MulAdd(rest, Zero(), check);  // NaN from the first inf or NaN on
      }
      StoreLeft(left, r % kStep, d, x[0], x[1]);
    }
    Store(s.sums + r * kLanes, Zero());
    s.top[r] = -__builtin_inff();
  }
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(Steps(rows)) * steps * kStepWords;
       i += kLanes) {
    Store(s.out + i, Zero());
  }
  return ReduceAdd(check) == 0;
}

// The first `positions` of the tile.
void FinishTile(const PrefillTileArgs& a, const TileScratch& s, std::int64_t positions) {
  for (int r = 0; r < positions * a.group; ++r) {
    const float sum = ReduceAdd(Load(s.sums + r * kLanes));
    const F32 inverse = Set(sum == 0 ? 0.0f : 1.0f / sum);
    float* out = a.out + r / a.group * a.stride + r % a.group * a.head_dim;
    const float* row = s.out +
                       static_cast<std::int64_t>(r / kStep) * Steps(a.head_dim) * kStepWords +
                       r % kStep / 16 * 2 * kTileWords + r % 16 * 16;
    for (int d = 0; d < a.head_dim; d += 16) {
      const float* tile = row + d / kStep * kStepWords + d % kStep / 16 * kTileWords;
      for (int c = 0; c < 16; c += kLanes) Store(out + d + c, Mul(Load(tile + c), inverse));
    }
  }
}

// Rows whose maximum grew.
void FadeBlock(const TileScratch& s, int steps, float* out) {
  for (int r = 0; r < kStep; ++r) {
    if (s.alpha[r] == 1) continue;
    const F32 alpha = Set(s.alpha[r]);
    for (int tile = 0; tile < 2 * steps; ++tile) {
      float* row = out + tile / 2 * kStepWords + (r / 16 * 2 + tile % 2) * kTileWords + r % 16 * 16;
      for (int c = 0; c < 16; c += kLanes) Store(row + c, Mul(alpha, Load(row + c)));
    }
  }
}

// Keys of the tile at `key` that row r sees, of n; rows beyond the last count as the last.
FATHOM_INLINE int Visible(const PrefillTileArgs& a, std::int64_t key, int n, int r) {
  const int position = r / a.group;
  const int last = a.n_positions - 1;
  const std::int64_t seen = a.first + (position < last ? position : last) + 1 - key;
  return seen >= n ? n : seen > 0 ? static_cast<int>(seen) : 0;
}

// A block of rows against the n packed keys at `key`.
void AttendBlock(const PrefillTileArgs& a, const TileScratch& s, std::int64_t key, int n,
                 int block) {
  const int steps = Steps(a.head_dim);
  const int row = block * kStep;
  const int key_steps = Steps(Visible(a, key, n, row + kStep - 1));
  if (key_steps == 0) return;
  const float* q = s.q + static_cast<std::int64_t>(block) * steps * kStepWords;
  float* out = s.out + static_cast<std::int64_t>(block) * steps * kStepWords;
  for (int panel = 0; panel < key_steps; ++panel) {
    TileZero<0>();
    TileZero<1>();
    TileZero<2>();
    TileZero<3>();
    const float* keys = s.keys + static_cast<std::int64_t>(panel) * steps * kStepWords;
    for (int k = 0; k < steps; ++k) DotStep(q + k * kStepWords, keys + k * kStepWords);
    float* scores = s.scores + panel * kStep;
    TileStore<0>(scores, kKeyTile);
    TileStore<1>(scores + 16, kKeyTile);
    TileStore<2>(scores + 16 * kKeyTile, kKeyTile);
    TileStore<3>(scores + 16 * kKeyTile + 16, kKeyTile);
  }
  for (int r = 0; r < kStep; ++r) {
    SoftmaxRow(s, block, r, key_steps * kStep, Visible(a, key, n, row + r));
  }
  FadeBlock(s, steps, out);
  for (int panel = 0; panel < steps; ++panel, out += kStepWords) {
    TileLoad<0>(out);
    TileLoad<1>(out + kTileWords);
    TileLoad<2>(out + 2 * kTileWords);
    TileLoad<3>(out + 3 * kTileWords);
    const float* values = s.values + static_cast<std::int64_t>(panel) * kKeySteps * kStepWords;
    for (int k = 0; k < key_steps; ++k)
      DotStep(s.weights + k * kStepWords, values + k * kStepWords);
    TileStore<0>(out, 16);
    TileStore<1>(out + kTileWords, 16);
    TileStore<2>(out + 2 * kTileWords, 16);
    TileStore<3>(out + 3 * kTileWords, 16);
  }
}

// All keys before the first one with an inf or NaN in its row; returns how many.
std::int64_t AttendKeys(const PrefillTileArgs& a, const TileScratch& s) {
  std::int64_t n_keys = a.first + a.n_positions;
  for (std::int64_t key = 0; key < n_keys; key += kKeyTile) {
    const std::int64_t left = n_keys - key;
    int n = left < kKeyTile ? static_cast<int>(left) : kKeyTile;
    const Half* rows = a.rows + key * 2 * a.head_dim;
    if (!AllFinite(rows, static_cast<std::int64_t>(n) * 2 * a.head_dim)) {
      n = 0;
      while (AllFinite(rows + static_cast<std::int64_t>(n) * 2 * a.head_dim, 2 * a.head_dim)) ++n;
      n_keys = key + n;
    }
    PackTile(rows, n, a.head_dim, s);
    for (int block = 0; block < Steps(a.n_positions * a.group); ++block)
      AttendBlock(a, s, key, n, block);
  }
  return n_keys;
}

void PrefillTile(const PrefillTileArgs* args) {
  PrefillTileArgs rest = *args;
  const TileScratch s = CarveScratch(rest);
  std::int64_t done = 0;  // positions
  if (StartTile(rest, s)) {
    TileBegin();
    done = AttendKeys(rest, s) - rest.first;
    TileEnd();
    if (done < 0) done = 0;
    FinishTile(rest, s, done);
  }
  if (done == rest.n_positions) return;
  rest.first += done;
  rest.n_positions -= static_cast<std::int32_t>(done);
  rest.q += done * rest.stride;
  rest.out += done * rest.stride;
  PlainKernels()->prefill_tile(&rest);
}
