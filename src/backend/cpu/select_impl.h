// SPDX-License-Identifier: MIT
// Select: the exact `keep` best of n scores, ascending by index.
//
// Scores become integers of the same order (OrderKey). A fixed sample gives a threshold that a
// little more than `keep` scores should pass; those are compressed to a list of candidates, in
// index order. Where fewer pass, every score is a candidate. The keep-th largest candidate is found
// by bisection of the key's range, counting with vector compares: no data-dependent branches, no
// worst case beyond 32 passes, and ties cost nothing. Winners are the candidates above it, and of
// those equal to it the first in index order, so no sort is needed either.
// Bound by the one pass over the scores and, at small n, by the bisections.

constexpr int kSampleSize = 1024;

// A key that exactly k, or, when keys repeat, at least k of the keys reach, with fewer than k
// above. Requires: at least k keys >= low. keys: [n], with room for kLanes more.
std::int32_t KthKey(std::int32_t* keys, std::int64_t n, std::int64_t k, std::int32_t low) {
  StoreInt(keys + n, SetInt(INT32_MIN));  // complete the last vector; never counted, see below
  I32 top = SetInt(INT32_MIN);
  I32 bottom = SetInt(INT32_MAX);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    top = MaxInt(top, LoadInt(keys + i));
    if (i + kLanes <= n) bottom = MinInt(bottom, LoadInt(keys + i));
  }
  std::int32_t least = ReduceMinInt(bottom);
  for (std::int64_t i = n / kLanes * kLanes; i < n; ++i) least = keys[i] < least ? keys[i] : least;
  std::int64_t reached = low > least ? low : least;
  std::int64_t missed = static_cast<std::int64_t>(ReduceMaxInt(top)) + 1;
  while (missed - reached > 1) {
    const std::int64_t middle = reached + (missed - reached) / 2;  // above INT32_MIN
    const I32 limit = SetInt(static_cast<std::int32_t>(middle));
    I32 even = SetInt(0);
    I32 odd = SetInt(0);
    std::int64_t i = 0;
    for (; i + kLanes < n; i += 2 * kLanes) {
      even = CountAtLeast(even, LoadInt(keys + i), limit);
      odd = CountAtLeast(odd, LoadInt(keys + i + kLanes), limit);
    }
    if (i < n) even = CountAtLeast(even, LoadInt(keys + i), limit);
    const std::int64_t count = ReduceAddInt(AddInt(even, odd));
    if (count >= k) {
      reached = middle;
      if (count == k) break;
    } else {
      missed = middle;
    }
  }
  return static_cast<std::int32_t>(reached);
}

std::int64_t CollectAtLeast(const TopKArgs& a, std::int32_t threshold) {
  const I32 limit = SetInt(threshold);
  std::int64_t count = 0;
  std::int64_t i = 0;
  for (; i + kLanes <= a.n; i += kLanes) {
    count +=
        AppendAtLeast(OrderKey(Load(a.scores + i)), limit, a.first + static_cast<std::int32_t>(i),
                      a.scratch_index + count, a.scratch_key + count);
  }
  for (; i < a.n; ++i) {
    std::int32_t key[kLanes];
    StoreInt(key, OrderKey(Set(a.scores[i])));
    a.scratch_index[count] = a.first + static_cast<std::int32_t>(i);
    a.scratch_key[count] = key[0];
    count += key[0] >= threshold ? 1 : 0;
  }
  return count;
}

// One score from each of kSampleSize equal ranges, at a scattered place so that no period of the
// scores can hide from it.
std::int32_t SampleThreshold(const TopKArgs& a) {
  float sample[kSampleSize];
  std::int32_t keys[kSampleSize + kLanes];
  const std::int64_t range = a.n / kSampleSize;
  for (int i = 0; i < kSampleSize; ++i) {
    const std::uint32_t scatter = (static_cast<std::uint32_t>(i) * 2654435769u) >> 16;
    sample[i] = a.scores[i * range + (scatter * range >> 16)];
  }
  for (int i = 0; i < kSampleSize; i += kLanes) StoreInt(keys + i, OrderKey(Load(sample + i)));
  const float expected = static_cast<float>(a.keep * kSampleSize) / static_cast<float>(a.n);
  const auto rank = static_cast<std::int64_t>(expected + 3 * __builtin_sqrtf(expected)) + 4;
  return KthKey(keys, kSampleSize, rank, INT32_MIN);
}

void TopK(const TopKArgs* args) {
  const TopKArgs& a = *args;
  if (a.keep == 0) return;
  std::int32_t low = INT32_MIN;
  // A sample pays when it leaves most of the scores out.
  if (a.n >= 4 * kSampleSize && a.keep * 8 <= a.n) low = SampleThreshold(a);
  std::int64_t count = CollectAtLeast(a, low);
  if (count < a.keep) {
    low = INT32_MIN;
    count = CollectAtLeast(a, low);
  }
  const std::int32_t last = KthKey(a.scratch_key, count, a.keep, low);
  // limit >= key holds for all but the keys above it, INT32_MIN after the last one included.
  I32 not_above = SetInt(0);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    not_above = CountAtLeast(not_above, SetInt(last), LoadInt(a.scratch_key + i));
  }
  const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::int64_t ties = a.keep - (padded - ReduceAddInt(not_above));
  std::int64_t n = 0;
  for (std::int64_t i = 0; n < a.keep; ++i) {
    const std::int32_t key = a.scratch_key[i];
    const bool tie = key == last && ties > 0;
    ties -= tie ? 1 : 0;
    a.winners[n] = a.scratch_index[i];
    n += (key > last || tie) ? 1 : 0;
  }
}

std::int32_t RankKthKey(std::int32_t* keys, std::int64_t n, std::int64_t rank) {
  return KthKey(keys, n, rank, INT32_MIN);
}
