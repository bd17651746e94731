// SPDX-License-Identifier: MIT
// Scan of the mean codec, what is not in the planes: the base of every block, and scores from U.
//
// base is a product of small integers, evaluated in floats: every partial sum is an integer below
// 2^24, hence exact in any order, and so are the conversions.

// Words that will be read soon: kAheadBlocks on, in this segment or from the start of the next;
// null when there are none.
FATHOM_INLINE const unsigned char* WordsAhead(const ScanSumsArgs& a, int block) {
  constexpr int kAheadBlocks = 24;
  const int at = block + kAheadBlocks;
  if (at < a.count) return reinterpret_cast<const unsigned char*>(a.planes + a.first + at);
  if (a.prefetch == nullptr) return nullptr;
  return reinterpret_cast<const unsigned char*>(a.prefetch + (at - a.count));
}

// Blocks whose words share a cache line.
constexpr int kLineBlocks = 8;

// The means of a segment are fetched while its planes are summed, evenly: the share of blocks
// block .. block + n - 1 of the call, in cache lines.
struct SideShare {
  const std::uint8_t* lines;
  std::int64_t n_lines;
};
FATHOM_INLINE SideShare ShareOfSide(const ScanSumsArgs& a, int block, int n) {
  if (a.side == nullptr) return {nullptr, 0};
  const std::int64_t total = (a.side_bytes + 63) / 64;
  const std::int64_t begin = total * block / a.count;
  const std::int64_t end = block + n < a.count ? total * (block + n) / a.count : total;
  return {a.side + 64 * begin, end - begin};
}

// Mean codes of blocks block .. of one channel; beyond the segment, whatever the buffer holds.
FATHOM_INLINE F32 LoadMeans(const ScanBaseArgs& a, int channel, int block) {
  const bool bytes = a.mean_bits == 8;
  const int row_bytes = bytes ? a.segment_blocks : a.segment_blocks / 2;
  const int at = bytes ? block : block / 2;
  const std::uint8_t* p = a.side + static_cast<std::int64_t>(channel) * row_bytes + at;
  std::uint8_t copy[kLanes] = {};
  if (block + kLanes > a.segment_blocks) {
    __builtin_memcpy(copy, p, static_cast<unsigned>(row_bytes - at));
    p = copy;
  }
  return bytes ? LoadInt8(p) : LoadNibbles(p);
}

// The parity of a.first + block must be even where codes are nibbles.
template <int Heads>
void BaseHeads(const ScanBaseArgs& a, int head) {
  float weight[kMaxHeadDim * Heads];
  for (int c = 0; c < a.n_active; ++c) {
    for (int h = 0; h < Heads; ++h) {
      weight[c * Heads + h] = static_cast<float>(a.mean_weight[c * a.group + head + h]);
    }
  }
  for (int b = 0; b < a.count; b += kLanes) {
    F32 sum[Heads];
    for (int h = 0; h < Heads; ++h) sum[h] = Set(static_cast<float>(a.constant[head + h]));
    for (int c = 0; c < a.n_active; ++c) {
      const F32 codes = LoadMeans(a, a.channel[c], a.first + b);
      for (int h = 0; h < Heads; ++h) {
        sum[h] = MulAdd(Set(weight[c * Heads + h]), codes, sum[h]);
      }
    }
    for (int h = 0; h < Heads; ++h) {
      StoreFirstInts(a.base + (head + h) * a.stride + b, FloorToInt(sum[h]), a.count - b);
    }
  }
}

void ScanBase(const ScanBaseArgs* args) {
  int head = 0;
  for (; head + 4 <= args->group; head += 4) BaseHeads<4>(*args, head);
  for (; head + 2 <= args->group; head += 2) BaseHeads<2>(*args, head);
  for (; head < args->group; ++head) BaseHeads<1>(*args, head);
}

void ScanScores(const ScanScoresArgs* args) {
  const ScanScoresArgs& a = *args;
  const F32 step = Set(static_cast<float>(1 << a.shift));
  const F32 scale = Set(a.scale);
  for (std::int64_t b = 0; b < a.n_blocks; ++b) {
    const F32 base = Set(static_cast<float>(a.base[b]));
    for (int i = 0; i < kBlockTokens; i += kLanes) {
      const std::int64_t at = b * kBlockTokens + i;
      Store(a.scores + at, Mul(MulAdd(LoadByte(a.sums + at), step, base), scale));
    }
  }
}
