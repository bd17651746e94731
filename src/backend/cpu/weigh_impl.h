// SPDX-License-Identifier: MIT
// Weigh: fp16 means of blocks by the masses of a group, for the blocks that matter to some head.
//
// Which blocks are read comes first, kLanes at a time, by the largest excess over the heads. The
// read ones then go through all heads like dense values, in slabs of four heads by kAttendVectors.
// Bound by the conversion of the means, and by memory at first touch. A call covers blocks that the
// driver fixes, and calls are joined in order, so threads do not change results.

// Masses of the blocks that are read, of head h at mass + h * kWeighChunkBlocks.
struct ReadBlocks {
  int n;
  const Half* mean[kWeighChunkBlocks];
  float mass[kMaxGroup * kWeighChunkBlocks];
};

void FindBlocks(const WeighBlocksArgs& a, ReadBlocks* read) {
  float excess[kWeighChunkBlocks + 16];
  F32 other[kMaxGroup];
  for (int h = 0; h < a.group; ++h) other[h] = Zero();
  read->n = 0;
  for (int b = 0; b < a.n_blocks; b += kLanes) {
    const int left = a.n_blocks - b;
    F32 mass[kMaxGroup];
    F32 most = Set(-1.0f);
    for (int h = 0; h < a.group; ++h) {
      const float* at = a.mass + h * a.stride + b;
      float lanes[kLanes];
      for (int i = 0; left < kLanes && i < kLanes; ++i) lanes[i] = i < left ? at[i] : 0.0f;
      mass[h] = Load(left < kLanes ? lanes : at);
      if (a.means != nullptr) most = MaxOrSecond(Sub(mass[h], Set(a.least[h])), most);
    }
    Store(excess + b, most);
    const F32 not_read = Sub(Zero(), most);  // below 0 where the block is read
    for (int h = 0; h < a.group; ++h) {
      other[h] = Add(other[h], ZeroBelow(not_read, Zero(), mass[h]));
    }
  }
  for (int b = 0; b < a.n_blocks; ++b) {
    if (!(excess[b] > 0)) continue;
    read->mean[read->n] = a.means + static_cast<std::int64_t>(b) * a.head_dim;
    for (int h = 0; h < a.group; ++h) {
      read->mass[h * kWeighChunkBlocks + read->n] = a.mass[h * a.stride + b];
    }
    ++read->n;
  }
  for (int h = 0; h < a.group; ++h) a.other[h] = ReduceAdd(other[h]);
}

template <int Heads, int Vectors>
FATHOM_INLINE void SumMeans(const ReadBlocks& read, const float* mass, int at, int head_dim,
                            float* out) {
  F32 sum[Heads][Vectors];
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sum[h][v] = Zero();
  }
  for (int i = 0; i < read.n; ++i) {
    F32 x[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) x[v] = LoadHalf(read.mean[i] + at + v * kLanes);
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      const F32 weight = Set(mass[h * kWeighChunkBlocks + i]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sum[h][v] = MulAdd(weight, x[v], sum[h][v]);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) Store(out + h * head_dim + at + v * kLanes, sum[h][v]);
  }
}

template <int Heads>
void SumMeansOfHeads(const ReadBlocks& read, int first, int head_dim, float* out) {
  const float* mass = read.mass + first * kWeighChunkBlocks;
  int d = 0;
  for (; d + kAttendVectors * kLanes <= head_dim; d += kAttendVectors * kLanes) {
    SumMeans<Heads, kAttendVectors>(read, mass, d, head_dim, out + first * head_dim);
  }
  for (; d < head_dim; d += kLanes) {
    SumMeans<Heads, 1>(read, mass, d, head_dim, out + first * head_dim);
  }
}

void WeighBlocks(const WeighBlocksArgs* args) {
  const WeighBlocksArgs& a = *args;
  ReadBlocks read;
  FindBlocks(a, &read);
  *a.n_read = read.n;
  int h = 0;
  for (; h + 4 <= a.group; h += 4) SumMeansOfHeads<4>(read, h, a.head_dim, a.out);
  for (; h + 2 <= a.group; h += 2) SumMeansOfHeads<2>(read, h, a.head_dim, a.out);
  for (; h < a.group; ++h) SumMeansOfHeads<1>(read, h, a.head_dim, a.out);
}
