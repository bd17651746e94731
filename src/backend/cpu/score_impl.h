// SPDX-License-Identifier: MIT
// Score: exact products of the queries of a group with fp16 keys.
//
//   score = q . k
//
// Four rows at a time for kLanes / 4 heads, or as many more rows for fewer heads: kLanes sums stay
// in registers while the channels go by, and one transposing reduction finishes them all. Every
// score is summed in the same order, whichever rows and heads share its registers. Bound by memory
// (256 bytes a key at D = 128), in larger groups by the multiply-adds.

constexpr int kScoreAhead = 16;          // rows that are asked for ahead
constexpr int kScoreHeads = kLanes / 4;  // heads that share a conversion

// Scores of kLanes / Heads rows; out: [Heads][kLanes / Heads].
template <int Heads>
FATHOM_INLINE void DotRows(const Half* const* row, const float* q, int head_dim, float* out) {
  constexpr int kRows = kLanes / Heads;
  F32 sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = Zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    F32 x[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) x[r] = LoadHalf(row[r] + d);
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      const F32 weight = Load(q + h * head_dim + d);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sum[h * kRows + r] = MulAdd(x[r], weight, sum[h * kRows + r]);
    }
  }
  Store(out, ReduceRows(sum));
}

// Scores of kLanes rows, n of which count; out: [Heads][stride].
template <int Heads>
FATHOM_INLINE void ScoreHeads(const Half* const* row, const float* q, int head_dim, int n,
                              float* out, std::int64_t stride) {
  constexpr int kRows = kLanes / Heads;
  float score[Heads * kLanes];  // [row / kRows][head][row % kRows]
#pragma GCC unroll 16
  for (int part = 0; part < Heads; ++part) {
    DotRows<Heads>(row + part * kRows, q, head_dim, score + part * kLanes);
  }
  for (int h = 0; h < Heads; ++h) {
    for (int r = 0; r < n; ++r) {
      out[h * stride + r] = score[(r / kRows * Heads + h) * kRows + r % kRows];
    }
  }
}

void ScoreRows(const ScoreRowsArgs* args) {
  const ScoreRowsArgs& a = *args;
  // What lies between two keys is asked for, too: memory gives runs faster than it skips.
  const std::int64_t run = a.key_stride < 2 * a.head_dim ? a.key_stride : 2 * a.head_dim;
  for (std::int64_t i = 0; i < a.n_rows; i += kLanes) {
    const int n = a.n_rows - i < kLanes ? static_cast<int>(a.n_rows - i) : kLanes;
    const Half* row[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      row[r] = a.rows + (i + (r < n ? r : n - 1)) * a.key_stride;
      const Half* ahead = row[r] + kScoreAhead * a.key_stride;
      for (std::int64_t d = 0; d < run; d += kLineHalves) Prefetch(ahead + d);
    }
    float* out = a.scores + i;
    int h = 0;
    for (; h + kScoreHeads <= a.group; h += kScoreHeads) {
      ScoreHeads<kScoreHeads>(row, a.q + h * a.head_dim, a.head_dim, n, out + h * a.stride,
                              a.stride);
    }
    for (; h + 2 <= a.group; h += 2) {
      ScoreHeads<2>(row, a.q + h * a.head_dim, a.head_dim, n, out + h * a.stride, a.stride);
    }
    for (; h < a.group; ++h) {
      ScoreHeads<1>(row, a.q + h * a.head_dim, a.head_dim, n, out + h * a.stride, a.stride);
    }
  }
}
