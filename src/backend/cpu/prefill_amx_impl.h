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
// C: 8 tile loads of 1 KiB for 12 tile products. For 256 rows at D = 128 everything takes 580 KiB,
// in second-level cache.
//
// Cycles for a block and a key tile (4,096 scores) at D = 128:
//   S, P V    32 steps of 12 tile products, 16 cycles each: 6,144 of the tile unit
//   softmax   about 21 vector operations for 16 scores, two at a time: 2,900
//   pack      about 10,400 for 128 keys, shared by the blocks: 1,300 with 8
// Vector and tile units work side by side when the instructions of both are near each other, so the
// softmax of a block goes between the steps of the next block's S, and packing the next key tile
// between the steps of P V. So 1.5 cycles per score bound by the tile unit, 2.5 if nothing
// overlapped; the products alone take 8 in f32.
//
// An inf or NaN does not survive the split: tiles with such a query, and positions that see such a
// row, are left to the f32 kernel of PlainKernels(). The result of a row depends neither on other
// rows nor on the tiling, and one thread does a tile: the number of threads never shows.

constexpr int kKeyTile = 128;
constexpr int kStep = 32;  // products of a step, and the side of a 2 x 2 block of C
constexpr int kStepWords = 4 * kTileWords;  // an operand of a step: two tiles of hi and two of lo
constexpr int kKeySteps = kKeyTile / kStep;

struct TileScratch {
  float* q;       // [blocks][Steps(D)] steps
  float* out;     // [blocks][Steps(D)][2][2] tiles: rows, channels
  float* keys;    // [kKeySteps][Steps(D)] steps
  float* values;  // [Steps(D)][kKeySteps] steps
  float* next_keys;
  float* next_values;
  float* scores;   // [2][kStep][kKeyTile]
  float* weights;  // [kKeySteps] steps
  float* sums;     // [blocks * kStep][kLanes]
  float* top;      // [blocks * kStep]
  float* alpha;    // [kStep]
};

int Steps(int n) { return (n + kStep - 1) / kStep; }

std::int64_t PrefillScratch(int rows, int head_dim) {
  const std::int64_t row_steps = static_cast<std::int64_t>(Steps(rows)) * Steps(head_dim);
  const std::int64_t key_steps = static_cast<std::int64_t>(kKeySteps) * Steps(head_dim);
  const std::int64_t own = (2 * row_steps + 4 * key_steps + kKeySteps) * kStepWords +
                           2 * kStep * kKeyTile +
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
  s.next_keys = s.values + kKeySteps * steps * kStepWords;
  s.next_values = s.next_keys + kKeySteps * steps * kStepWords;
  s.scores = s.next_values + kKeySteps * steps * kStepWords;
  s.weights = s.scores + 2 * kStep * kKeyTile;
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

// Channels step * kStep .. of kLanes keys, the first of them number `key` of the tile. check: NaN
// from the first inf or NaN on.
FATHOM_INLINE void PackKeys(const Half* rows, int n, int head_dim, int key, int step, float* keys,
                            F32* check) {
  float* to = keys + (key / kStep * Steps(head_dim) + step) * kStepWords +
              key % kStep / 16 * kTileWords + key % 16;
  F32 seen = *check;
  for (int c = 0; c < kStep; c += kLanes) {
    const int d = step * kStep + c;
    F32 x[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      const Half* row = rows + static_cast<std::int64_t>(key + r) * 2 * head_dim;
      x[r] = key + r < n && d < head_dim ? LoadHalf(row + d) : Zero();
      seen = MulAdd(x[r], Zero(), seen);
    }
    Transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2) StoreRight(to + (c + i) / 2 * 16, x[i], x[i + 1]);
  }
  *check = seen;
}

// Channels d .. d + 15 of keys step * kStep ..
FATHOM_INLINE void PackValues(const Half* rows, int n, int head_dim, int step, int d, float* values,
                              F32* check) {
  float* to = values + (d / kStep * kKeySteps + step) * kStepWords + d % kStep / 16 * kTileWords;
  const bool inside = d < head_dim;
  F32 seen = *check;
  for (int i = 0; i < kStep; i += 2) {
    const int key = step * kStep + i;
    const Half* value = rows + static_cast<std::int64_t>(key) * 2 * head_dim + head_dim + d;
    for (int c = 0; c < 16; c += kLanes) {
      const F32 even = inside && key < n ? LoadHalf(value + c) : Zero();
      const F32 odd = inside && key + 1 < n ? LoadHalf(value + 2 * head_dim + c) : Zero();
      seen = MulAdd(odd, Zero(), MulAdd(even, Zero(), seen));
      StoreRight(to + i / 2 * 16 + c, even, odd);
    }
  }
  *check = seen;
}

// Packs n keys and values in `units` pieces; zeros fill up the last step.
struct PackWork {
  const Half* rows;
  float* keys;
  float* values;
  std::int64_t ahead;  // halfs of the rows that may be fetched from memory
  int n;
  int head_dim;
  int units;
  int done;
  F32 check;

  FATHOM_INLINE void Next() {
    const int steps = Steps(head_dim);
    const int key_units = Steps(n) * (kStep / kLanes) * steps;
    if (done < key_units) {
      PackKeys(rows, n, head_dim, done / steps * kLanes, done % steps, keys, &check);
    } else {
      const int value = done - key_units;
      const int d = value % (2 * steps) * 16;
      PackValues(rows, n, head_dim, value / (2 * steps), d, values, &check);
    }
    // The tile after this one, for its packing: 1 KiB per unit is all of it.
    constexpr int kHalves = 512, kLine = 32;
    const std::int64_t at = static_cast<std::int64_t>(kKeyTile) * 2 * head_dim + done * kHalves;
    if (at + kHalves <= ahead) {
      for (int i = 0; i < kHalves; i += kLine) PrefetchFar(rows + at + i);
    }
    ++done;
  }
};

// Vector work between the steps of a product, so that both units of the processor are busy: all
// units of the work in `steps` steps.
template <typename Work>
struct Weave {
  Work* work;
  int steps;
  int credit;

  FATHOM_INLINE void Step() {
    for (credit += work->units; credit >= steps && work->done < work->units; credit -= steps) {
      work->Next();
    }
  }
};

// Keys of the tile at `key` that row r sees, of n; rows beyond the last count as the last.
FATHOM_INLINE int Visible(const PrefillTileArgs& a, std::int64_t key, int n, int r) {
  const int position = r / a.group;
  const int last = a.n_positions - 1;
  const std::int64_t seen = a.first + (position < last ? position : last) + 1 - key;
  return seen >= n ? n : seen > 0 ? static_cast<int>(seen) : 0;
}

// Scores of a block to weights, a row per unit.
struct SoftmaxWork {
  const PrefillTileArgs* args;
  const TileScratch* scratch;
  float* scores;  // [kStep][kKeyTile]
  std::int64_t key;
  int n;  // keys of the tile
  int block;
  int key_steps;
  int units;
  int done;

  FATHOM_INLINE void Next() {
    const int r = done++;
    const int row = block * kStep + r;
    const int columns = key_steps * kStep;
    float* x = scores + r * kKeyTile;
    float* top = scratch->top + row;
    float* sums = scratch->sums + row * kLanes;
    const int visible = Visible(*args, key, n, row);
    if (visible < columns) Mask(x, visible, columns);
    F32 most = Set(*top);
    for (int k = 0; k < columns; k += kLanes) most = MaxOrSecond(Load(x + k), most);
    const float new_top = ReduceMax(most);
    F32 total = Load(sums);
    scratch->alpha[r] = 1;
    if (new_top > *top) {  // rare after the first tiles
      float fade[kLanes];
      Store(fade, Exp2(Set(*top - new_top)));
      total = Mul(total, Set(fade[0]));
      scratch->alpha[r] = fade[0];
      *top = new_top;
    }
    const F32 shift = Set(new_top == -__builtin_inff() ? 0.0f : new_top);
    for (int k = 0; k < columns; k += 2 * kLanes) {
      const F32 p0 = Exp2(Sub(Load(x + k), shift));
      const F32 p1 = Exp2(Sub(Load(x + k + kLanes), shift));
      StoreLeft(scratch->weights, r, k, p0, p1);
      total = Add(total, Add(p0, p1));
    }
    Store(sums, total);
  }

  static void Mask(float* x, int visible, int columns) {
    for (int k = visible / kLanes * kLanes; k < columns; k += kLanes) {
      const int left = visible > k ? visible - k : 0;
      Store(x + k, FirstLanes(Load(x + k), left, Set(-__builtin_inff())));
    }
  }
};

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

// S of a block against the first key_steps * kStep packed keys.
void Scores(const TileScratch& s, int block, int steps, int key_steps, float* scores,
            Weave<SoftmaxWork> weave) {
  const float* q = s.q + static_cast<std::int64_t>(block) * steps * kStepWords;
  const float* keys = s.keys;
  for (int panel = 0; panel < key_steps; ++panel, scores += kStep) {
    TileZero<0>();
    TileZero<1>();
    TileZero<2>();
    TileZero<3>();
    for (int k = 0; k < steps; ++k, keys += kStepWords) {
      DotStep(q + k * kStepWords, keys);
      weave.Step();
    }
    TileStore<0>(scores, kKeyTile);
    TileStore<1>(scores + 16, kKeyTile);
    TileStore<2>(scores + 16 * kKeyTile, kKeyTile);
    TileStore<3>(scores + 16 * kKeyTile + 16, kKeyTile);
  }
}

// O += P V of a block.
void Outputs(const TileScratch& s, int block, int steps, int key_steps, Weave<PackWork>* weave) {
  float* out = s.out + static_cast<std::int64_t>(block) * steps * kStepWords;
  FadeBlock(s, steps, out);
  for (int panel = 0; panel < steps; ++panel, out += kStepWords) {
    TileLoad<0>(out);
    TileLoad<1>(out + kTileWords);
    TileLoad<2>(out + 2 * kTileWords);
    TileLoad<3>(out + 3 * kTileWords);
    const float* values = s.values + panel * kKeySteps * kStepWords;
    for (int k = 0; k < key_steps; ++k) {
      DotStep(s.weights + k * kStepWords, values + k * kStepWords);
      weave->Step();
    }
    TileStore<0>(out, 16);
    TileStore<1>(out + kTileWords, 16);
    TileStore<2>(out + 2 * kTileWords, 16);
    TileStore<3>(out + 3 * kTileWords, 16);
  }
}

// All blocks against the n packed keys at `key`; packs the next tile on the way. The softmax of a
// block runs beside the scores of the next one.
void AttendTile(const PrefillTileArgs& a, const TileScratch& s, std::int64_t key, int n,
                PackWork* next) {
  const int steps = Steps(a.head_dim);
  const int blocks = Steps(a.n_positions * a.group);
  Weave<PackWork> packing = {next, blocks * steps * kKeySteps, 0};
  SoftmaxWork softmax = {&a, &s, nullptr, key, n, 0, 0, 0, 0};  // of the block before: none
  for (int block = 0; block <= blocks; ++block) {
    float* scores = s.scores + block % 2 * kStep * kKeyTile;
    int key_steps = 0;
    if (block < blocks) {
      key_steps = Steps(Visible(a, key, n, block * kStep + kStep - 1));
      Scores(s, block, steps, key_steps, scores, {&softmax, steps * key_steps, 0});
    }
    while (softmax.done < softmax.units) softmax.Next();
    if (softmax.units > 0) Outputs(s, softmax.block, steps, softmax.key_steps, &packing);
    const int rows = key_steps > 0 ? kStep : 0;
    softmax = {&a, &s, scores, key, n, block, key_steps, rows, 0};
  }
}

int PackUnits(int n, int head_dim) { return Steps(n) * Steps(head_dim) * (kStep / kLanes + 2); }

// The tile of keys `key` .., of n_keys > key, into the buffers of s.
PackWork MakePackWork(const PrefillTileArgs& a, const TileScratch& s, std::int64_t key,
                      std::int64_t n_keys) {
  const std::int64_t left = n_keys - key;
  const int n = left < kKeyTile ? static_cast<int>(left) : kKeyTile;
  return {a.rows + key * 2 * a.head_dim, s.keys, s.values, left * 2 * a.head_dim, n, a.head_dim,
          PackUnits(n, a.head_dim),      0,      Zero()};
}

// Finishes packing; only the keys before the first with an inf or NaN in its row.
void FinishPacking(PackWork* work) {
  while (work->done < work->units) work->Next();
  if (ReduceAdd(work->check) == 0) return;
  const std::int64_t row = 2 * work->head_dim;
  work->n = 0;
  while (AllFinite(work->rows + work->n * row, row)) ++work->n;
  work->done = 0;
  work->units = PackUnits(work->n, work->head_dim);
  while (work->done < work->units) work->Next();
}

// All keys before the first one with an inf or NaN in its row; returns how many.
std::int64_t AttendKeys(const PrefillTileArgs& a, TileScratch s) {
  const std::int64_t n_keys = a.first + a.n_positions;
  PackWork work = MakePackWork(a, s, 0, n_keys);
  FinishPacking(&work);
  for (std::int64_t key = 0;; key += kKeyTile) {
    const int n = work.n;
    TileScratch other = s;
    other.keys = s.next_keys;
    other.values = s.next_values;
    other.next_keys = s.keys;
    other.next_values = s.values;
    const bool last = n < kKeyTile || key + kKeyTile >= n_keys;
    work = last ? PackWork{} : MakePackWork(a, other, key + kKeyTile, n_keys);
    AttendTile(a, s, key, n, &work);
    if (last) return key + n;
    FinishPacking(&work);
    s = other;
  }
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
