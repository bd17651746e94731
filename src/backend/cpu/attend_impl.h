// SPDX-License-Identifier: MIT
// Attend: one query position of a group against fp16 rows [K | V].
//
//   s = q . k;   p = exp(scale * s - top);   out = sum p v, sum = sum p
//
// A key is converted once for the whole group; kLanes rows are dotted at a time, one accumulator
// each, and a transposing reduction leaves one score per lane. Dense rows go through all heads,
// values in slabs of four heads by kAttendVectors. Bound by memory (512 bytes a row at D = 128),
// which the hardware prefetches. A chunk is one softmax; the driver joins chunks in order, so
// threads do not change results. Listed rows are in attend_list_impl.h.

// exp(x) for x <= 88 or NaN, relative error below 2e-7; 0 below -87.3. The range ends where the
// power of two would leave that of ScaleByPowerOf2, 2^127.
FATHOM_INLINE F32 Exp(F32 x) {
  const F32 limit = Set(-87.3f);
  const F32 safe = MaxOrSecond(limit, x);
  const F32 n = Round(Mul(safe, Set(1.44269504f)));
  F32 r = MulAdd(n, Set(-0.693359375f), safe);  // ln 2 in two parts, the first short
  r = MulAdd(n, Set(2.12194440e-4f), r);
  F32 p = Set(1.9875691500e-4f);
  p = MulAdd(p, r, Set(1.3981999507e-3f));
  p = MulAdd(p, r, Set(8.3334519073e-3f));
  p = MulAdd(p, r, Set(4.1665795894e-2f));
  p = MulAdd(p, r, Set(1.6666665459e-1f));
  p = MulAdd(p, r, Set(5.0000001201e-1f));
  p = Add(MulAdd(p, Mul(r, r), r), Set(1.0f));
  return ZeroBelow(x, limit, ScaleByPowerOf2(p, n));
}

// kLanes keys as floats, [kLanes][head_dim]; zeros for rows beyond n.
FATHOM_INLINE void LoadKeys(const Half* rows, std::int64_t key_stride, std::int64_t n, int head_dim,
                            float* keys) {
  for (int r = 0; r < kLanes; ++r) {
    const Half* row = rows + r * key_stride;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(keys + r * head_dim + d, r < n ? LoadHalf(row + d) : Zero());
    }
  }
}

FATHOM_INLINE F32 DotKeys(const float* keys, const float* q, int head_dim) {
  F32 sum[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) sum[r] = Zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    const F32 x = Load(q + d);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) sum[r] = MulAdd(Load(keys + r * head_dim + d), x, sum[r]);
  }
  return ReduceRows(sum);
}

FATHOM_INLINE void StoreFirst(float* p, F32 x, int n) {
  if (n >= kLanes) {
    Store(p, x);
    return;
  }
  float lanes[kLanes];
  Store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// Scores to weights in place; n a multiple of kLanes, filled up with -inf. NaN is left out of the
// maximum: its exp spoils the sum by itself. All -inf: weights 0 and top -inf.
void SoftmaxChunk(float* s, int n, float scale, float* top, float* sum) {
  F32 most = Set(-__builtin_inff());
  for (int i = 0; i < n; i += kLanes) {
    const F32 x = Mul(Load(s + i), Set(scale));
    Store(s + i, x);
    most = MaxOrSecond(x, most);
  }
  *top = ReduceMax(most);
  const F32 shift = Set(*top == -__builtin_inff() ? 0.0f : *top);
  F32 total = Zero();
  for (int i = 0; i < n; i += kLanes) {
    const F32 p = Exp(Sub(Load(s + i), shift));
    Store(s + i, p);
    total = Add(total, p);
  }
  *sum = ReduceAdd(total);
}

// Rows are contiguous; weight of head h, row i: p[h * kAttendDenseRows + i].
template <int Heads, int Vectors>
FATHOM_INLINE void SumDense(const AttendDenseArgs& a, const float* p, int at, float* out) {
  F32 sum[Heads][Vectors];
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sum[h][v] = Zero();
  }
  const Half* value = a.rows + a.head_dim + at;
  for (int i = 0; i < a.n_rows; ++i, value += 2 * a.head_dim) {
    F32 x[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) x[v] = LoadHalf(value + v * kLanes);
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      const F32 weight = Set(p[h * kAttendDenseRows + i]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sum[h][v] = MulAdd(weight, x[v], sum[h][v]);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) Store(out + h * a.head_dim + v * kLanes, sum[h][v]);
  }
}

template <int Heads>
void SumDenseHeads(const AttendDenseArgs& a, const float* p, float* out) {
  int d = 0;
  for (; d + kAttendVectors * kLanes <= a.head_dim; d += kAttendVectors * kLanes) {
    SumDense<Heads, kAttendVectors>(a, p, d, out + d);
  }
  for (; d < a.head_dim; d += kLanes) SumDense<Heads, 1>(a, p, d, out + d);
}

void AttendDense(const AttendDenseArgs* args) {
  const AttendDenseArgs& a = *args;
  alignas(64) float keys[kLanes * kMaxHeadDim];
  alignas(64) float p[kMaxGroup * kAttendDenseRows];
  const F32 fill = Set(-__builtin_inff());
  const std::int64_t stride = 2 * a.head_dim;
  for (int i = 0; i < a.n_rows; i += kLanes) {
    const int left = a.n_rows - i;
    LoadKeys(a.rows + i * stride, stride, left, a.head_dim, keys);
    for (int h = 0; h < a.group; ++h) {
      const F32 dot = DotKeys(keys, a.q + h * a.head_dim, a.head_dim);
      Store(p + h * kAttendDenseRows + i, FirstLanes(dot, left, fill));
    }
  }
  const int padded = (a.n_rows + kLanes - 1) / kLanes * kLanes;
  for (int h = 0; h < a.group; ++h) {
    SoftmaxChunk(p + h * kAttendDenseRows, padded, a.scale, a.top + h, a.sum + h);
  }
  int h = 0;
  for (; h + 4 <= a.group; h += 4) {
    SumDenseHeads<4>(a, p + h * kAttendDenseRows, a.out + h * a.head_dim);
  }
  for (; h + 2 <= a.group; h += 2) {
    SumDenseHeads<2>(a, p + h * kAttendDenseRows, a.out + h * a.head_dim);
  }
  for (; h < a.group; ++h) SumDenseHeads<1>(a, p + h * kAttendDenseRows, a.out + h * a.head_dim);
}
