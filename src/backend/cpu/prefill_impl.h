// SPDX-License-Identifier: MIT
// Prefill: causal flash attention of a tile of query positions, in f32.
//
// Rows of the tile are (position, head of the group) pairs, so that one key tile of 64 tokens,
// converted from fp16 and packed once, serves up to 256 rows:
//   S = Q K^T;   top' = max(top, S);   P = exp(S - top');   O = exp(top - top') O + P V
// One micro-kernel does both products: kTileRows rows by kTileVectors vectors of C in registers,
// one broadcast of A and one row of the packed B per step. Packed panels are [depth][panel width],
// so B is read in sequence. Q is scaled once; sums are kept per lane and reduced at the end.
// Bound by the FMA units: packing is 1 part in rows of the tile, softmax about a tenth at D = 128.
// Keys in order, one thread per tile: the result does not depend on the number of threads.

constexpr int kKeyTile = 64;
constexpr int kPanel = kTileVectors * kLanes;  // columns of a packed panel
static_assert(kKeyTile % kPanel == 0);

// C = alpha C + A B, or A B when alpha is null. a: [Rows][lda]; b: [depth][kPanel]; alpha:
// [Rows].
template <int Rows, int Vectors>
FATHOM_INLINE void MicroKernel(const float* a, int lda, const float* b, int depth, float* c,
                               int ldc, const float* alpha) {
  F32 sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      sum[i][v] = alpha == nullptr ? Zero() : Mul(Set(alpha[i]), Load(c + i * ldc + v * kLanes));
    }
  }
  for (int k = 0; k < depth; ++k, b += kPanel) {
    F32 row[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) row[v] = Load(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const F32 x = Set(a[i * lda + k]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sum[i][v] = MulAdd(x, row[v], sum[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) Store(c + i * ldc + v * kLanes, sum[i][v]);
  }
}

// All columns: whole panels, then single vectors of the last one. Panels: [depth_capacity][kPanel].
template <int Rows>
void Product(const float* a, int lda, const float* panels, int depth_capacity, int depth, float* c,
             int ldc, int columns, const float* alpha) {
  int j = 0;
  for (; j + kPanel <= columns; j += kPanel) {
    MicroKernel<Rows, kTileVectors>(a, lda, panels + static_cast<std::int64_t>(j) * depth_capacity,
                                    depth, c + j, ldc, alpha);
  }
  const float* last = panels + static_cast<std::int64_t>(j) * depth_capacity;
  for (int v = 0; j + v < columns; v += kLanes) {
    MicroKernel<Rows, 1>(a, lda, last + v, depth, c + j + v, ldc, alpha);
  }
}

struct TileScratch {
  float* q;       // [rows][head_dim], scaled
  float* out;     // [rows][head_dim]
  float* keys;    // packed K^T: [64 / kPanel][head_dim][kPanel]
  float* values;  // packed V: [ceil(head_dim / kPanel)][64][kPanel]
  float* sums;    // [rows][kLanes]
  float* top;     // [rows]
  float* alpha;   // [rows]
};

int PaddedRows(int rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }
int PanelColumns(int n) { return (n + kPanel - 1) / kPanel * kPanel; }
std::int64_t AlignUp(std::int64_t floats) { return (floats + 15) / 16 * 16; }

std::int64_t PrefillScratch(int rows, int head_dim) {
  const std::int64_t padded = PaddedRows(rows);
  return 2 * AlignUp(padded * head_dim) + kKeyTile * (head_dim + PanelColumns(head_dim)) +
         AlignUp(padded * kLanes) + 2 * AlignUp(padded);
}

TileScratch CarveScratch(const PrefillTileArgs& a) {
  const std::int64_t padded = PaddedRows(a.n_positions * a.group);
  TileScratch s;
  s.q = a.scratch;
  s.out = s.q + AlignUp(padded * a.head_dim);
  s.keys = s.out + AlignUp(padded * a.head_dim);
  s.values = s.keys + kKeyTile * a.head_dim;
  s.sums = s.values + kKeyTile * PanelColumns(a.head_dim);
  s.top = s.sums + AlignUp(padded * kLanes);
  s.alpha = s.top + AlignUp(padded);
  return s;
}

void PackKeys(const Half* rows, int n, int head_dim, float* keys) {
  for (int i = 0; i < kKeyTile; i += kLanes) {
    float* panel = keys + i / kPanel * kPanel * head_dim + i % kPanel;
    for (int d = 0; d < head_dim; d += kLanes) {
      F32 x[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        const std::int64_t row = static_cast<std::int64_t>(i + r) * 2 * head_dim;
        x[r] = i + r < n ? LoadHalf(rows + row + d) : Zero();
      }
      Transpose(x);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) Store(panel + (d + r) * kPanel, x[r]);
    }
  }
}

// Returns whether all values are finite.
bool PackValues(const Half* rows, int n, int head_dim, float* values) {
  F32 check = Zero();
  for (int i = 0; i < kKeyTile; ++i) {
    const Half* value = rows + static_cast<std::int64_t>(i) * 2 * head_dim + head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      const F32 x = i < n ? LoadHalf(value + d) : Zero();
      check = MulAdd(x, Zero(), check);  // NaN from the first inf or NaN on
      Store(values + d / kPanel * kPanel * kKeyTile + i * kPanel + d % kPanel, x);
    }
  }
  return ReduceAdd(check) == 0;
}

// One row of scores to weights; visible: keys of the tile the row may see, 1 or more.
FATHOM_INLINE void SoftmaxRow(float* s, int visible, float* top, float* sums, float* alpha) {
  constexpr int kVectors = kKeyTile / kLanes;
  const F32 fill = Set(-__builtin_inff());
  F32 most = Set(*top);
  for (int v = 0; v < kVectors; ++v) {
    F32 x = Load(s + v * kLanes);
    if (visible < kKeyTile) {
      const int left = visible - v * kLanes;
      x = FirstLanes(x, left > 0 ? left : 0, fill);
      Store(s + v * kLanes, x);
    }
    most = MaxOrSecond(x, most);
  }
  const float new_top = ReduceMax(most);
  const F32 shift = Set(new_top == -__builtin_inff() ? 0.0f : new_top);
  const F32 fade = Exp(Sub(Set(*top), shift));
  F32 total = Mul(Load(sums), fade);
  for (int v = 0; v < kVectors; ++v) {
    const F32 p = Exp(Sub(Load(s + v * kLanes), shift));
    Store(s + v * kLanes, p);
    total = Add(total, p);
  }
  Store(sums, total);
  float lanes[kLanes];
  Store(lanes, fade);
  *alpha = lanes[0];
  *top = new_top;
}

void StartTile(const PrefillTileArgs& a, const TileScratch& s) {
  const int rows = a.n_positions * a.group;
  const F32 scale = Set(a.scale);
  for (int r = 0; r < PaddedRows(rows); ++r) {
    const float* q = a.q + r / a.group * a.stride + r % a.group * a.head_dim;
    for (int d = 0; d < a.head_dim; d += kLanes) {
      Store(s.q + r * a.head_dim + d, r < rows ? Mul(Load(q + d), scale) : Zero());
      Store(s.out + r * a.head_dim + d, Zero());
    }
    Store(s.sums + r * kLanes, Zero());
    s.top[r] = -__builtin_inff();
  }
}

void FinishTile(const PrefillTileArgs& a, const TileScratch& s) {
  for (int r = 0; r < a.n_positions * a.group; ++r) {
    const float sum = ReduceAdd(Load(s.sums + r * kLanes));
    const F32 inverse = Set(sum == 0 ? 0.0f : 1.0f / sum);
    float* out = a.out + r / a.group * a.stride + r % a.group * a.head_dim;
    for (int d = 0; d < a.head_dim; d += kLanes) {
      Store(out + d, Mul(Load(s.out + r * a.head_dim + d), inverse));
    }
  }
}

// Keys of the tile at `key` that row r sees; rows beyond the last count as the last.
FATHOM_INLINE std::int64_t Visible(const PrefillTileArgs& a, std::int64_t key, int r) {
  const int position = r / a.group;
  const int last = a.n_positions - 1;
  return a.first + (position < last ? position : last) + 1 - key;
}

// kTileRows rows against the packed tile.
void AttendTile(const PrefillTileArgs& a, const TileScratch& s, std::int64_t key, bool finite,
                int row) {
  const int dim = a.head_dim;
  const std::int64_t most = Visible(a, key, row + kTileRows - 1);
  if (most <= 0) return;
  alignas(64) float p[kTileRows * kKeyTile];
  float* out = s.out + static_cast<std::int64_t>(row) * dim;
  float* alpha = s.alpha + row;
  Product<kTileRows>(s.q + static_cast<std::int64_t>(row) * dim, dim, s.keys, dim, dim, p, kKeyTile,
                     kKeyTile, nullptr);
  for (int i = 0; i < kTileRows; ++i) {
    const std::int64_t seen = Visible(a, key, row + i);
    const int visible = seen >= kKeyTile ? kKeyTile : seen > 0 ? static_cast<int>(seen) : 0;
    SoftmaxRow(p + i * kKeyTile, visible, s.top + row + i, s.sums + (row + i) * kLanes, alpha + i);
  }
  const bool all_seen = Visible(a, key, row) >= kKeyTile;
  if (finite || all_seen) {
    const int depth = most < kKeyTile ? static_cast<int>(most) : kKeyTile;
    Product<kTileRows>(p, kKeyTile, s.values, kKeyTile, depth, out, dim, dim, alpha);
    return;
  }
  // A weight of 0 does not silence an inf or NaN that a later row may see: stop each row in time.
  for (int i = 0; i < kTileRows; ++i) {
    const std::int64_t seen = Visible(a, key, row + i);
    const int depth = seen >= kKeyTile ? kKeyTile : seen > 0 ? static_cast<int>(seen) : 0;
    Product<1>(p + i * kKeyTile, kKeyTile, s.values, kKeyTile, depth, out + i * dim, dim, dim,
               alpha + i);
  }
}

void PrefillTile(const PrefillTileArgs* args) {
  const PrefillTileArgs& a = *args;
  const TileScratch s = CarveScratch(a);
  StartTile(a, s);
  const std::int64_t n_keys = a.first + a.n_positions;
  const int padded = PaddedRows(a.n_positions * a.group);
  for (std::int64_t key = 0; key < n_keys; key += kKeyTile) {
    const std::int64_t left = n_keys - key;
    const int n = left < kKeyTile ? static_cast<int>(left) : kKeyTile;
    const Half* rows = a.rows + key * 2 * a.head_dim;
    PackKeys(rows, n, a.head_dim, s.keys);
    const bool finite = PackValues(rows, n, a.head_dim, s.values);
    for (int row = 0; row < padded; row += kTileRows) AttendTile(a, s, key, finite, row);
  }
  FinishTile(a, s);
}
