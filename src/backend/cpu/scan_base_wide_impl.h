// SPDX-License-Identifier: MIT
// The base of every block with AVX-512 VNNI: `vpdpbusd` multiplies four channels of 16 blocks by
// four digits of one head. The products bind.

// What follows it: std::int32_t row[n_quads][kBaseQuad], and for every batch of heads (BaseBatch)
// BaseDigits with std::int32_t digit[n_quads][kDigits][4 heads].
struct BasePlan {
  std::int32_t n_quads;
  std::int32_t n_large;  // the first quads, whose weights need all digits
  std::int32_t unused[14];
  const std::int32_t* rows() const { return reinterpret_cast<const std::int32_t*>(this + 1); }
};
struct BaseDigits {
  std::int32_t offset[kBaseQuad];  // of each head
  const std::int32_t* digits() const { return reinterpret_cast<const std::int32_t*>(this + 1); }
};
static_assert(sizeof(BasePlan) == 64 && sizeof(BaseDigits) == 16);

// Heads that are done together: four, then two, then one.
FATHOM_INLINE int BaseBatch(int heads_left) {
  return heads_left >= 4 ? 4 : heads_left >= 2 ? 2 : 1;
}
FATHOM_INLINE std::int64_t BaseDigitsBytes(int n_quads) {
  return static_cast<std::int64_t>(sizeof(BaseDigits)) + std::int64_t{n_quads} * kDigits * 16;
}

std::int64_t WideBasePlanBytes(int n_active, int group) {
  const int n_quads = BaseQuads(n_active);
  std::int64_t bytes = static_cast<std::int64_t>(sizeof(BasePlan)) + n_quads * 16;
  for (int head = 0; head < group; head += BaseBatch(group - head)) {
    bytes += BaseDigitsBytes(n_quads);
  }
  return bytes;
}

// Fills `out` for the heads head .. head + n - 1.
void MakeDigits(const ScanBasePlanArgs& a, const WeightDigits& digits, const BaseOrder& order,
                int head, int n, BaseDigits* out) {
  static_assert(kBaseHeads == kBaseQuad);
  auto* to = const_cast<std::int32_t*>(out->digits());
  for (int quad = 0; quad < order.n_quads; ++quad) {
    for (const auto& digit : digits.digit) {
      QuadDigits(digit, a.group, order, quad, head, to);
      to += kBaseQuad;
    }
  }
  for (int h = 0; h < kBaseQuad; ++h) out->offset[h] = h < n ? BaseOffset(a, head + h) : 0;
}

void MakeWideBasePlan(const ScanBasePlanArgs* args) {
  const ScanBasePlanArgs& a = *args;
  auto* plan = static_cast<BasePlan*>(a.out);
  auto* row = const_cast<std::int32_t*>(plan->rows());
  WeightDigits digits;
  SplitWeights(a, &digits);
  BaseOrder order;
  OrderChannels(a, digits, &order, row);
  plan->n_quads = order.n_quads;
  plan->n_large = order.n_large;
  auto* at = reinterpret_cast<unsigned char*>(row + order.n_quads * kBaseQuad);
  for (int head = 0; head < a.group; head += BaseBatch(a.group - head)) {
    MakeDigits(a, digits, order, head, BaseBatch(a.group - head),
               reinterpret_cast<BaseDigits*>(at));
    at += BaseDigitsBytes(order.n_quads);
  }
}

// The means of the next segment, fetched evenly over the products: these read nothing that is far,
// and while planes are summed their words take all the places for outstanding misses.
struct MeansAhead {
  const std::uint8_t* line;  // or null
  const std::uint8_t* end;
  int lines_a_quad;

  FATHOM_INLINE void Fetch() {
    for (int i = 0; i < lines_a_quad && line < end; ++i, line += 64) PrefetchFar(line);
  }
};

FATHOM_INLINE MeansAhead AheadOfBase(const ScanBaseArgs& a, int n_quads) {
  if (a.ahead == nullptr || n_quads == 0) return {nullptr, nullptr, 0};
  const int steps = (a.count + 2 * kLanes - 1) / (2 * kLanes) * n_quads;
  const auto lines = static_cast<int>((a.ahead_bytes + 63) / 64);
  return {a.ahead, a.ahead + a.ahead_bytes, (lines + steps - 1) / steps};
}

// Adds the products of quads begin .. end - 1 to the sums of two vectors of codes.
template <int Heads, int Digits>
FATHOM_INLINE void AddProducts(const unsigned char* codes, const std::int32_t* digit, int begin,
                               int end, MeansAhead* ahead, I32 (&sum)[2][Heads][kDigits]) {
  for (int quad = begin; quad < end; ++quad) {
    ahead->Fetch();
    const unsigned char* pair = codes + quad * kBaseQuadBytes;
    const Bytes x[2] = {LoadBytes(pair), LoadBytes(pair + kBaseVectorBytes)};
    const std::int32_t* at = digit + quad * kDigits * kBaseQuad;
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
#pragma GCC unroll 3
      for (int d = 0; d < Digits; ++d) {
        const I32 w = SetInt(at[d * kBaseQuad + h]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[v][h][d] = _mm512_dpbusd_epi32(sum[v][h][d], x[v], w);
      }
    }
  }
}

template <int Heads>
void WideBaseHeads(const ScanBaseArgs& a, const BasePlan& plan, const BaseDigits& digits, int head,
                   const unsigned char* codes, MeansAhead* ahead) {
  for (int b = 0; b < a.count; b += 2 * kLanes, codes += 2 * kBaseVectorBytes) {
    I32 sum[2][Heads][kDigits];
#pragma GCC unroll 24
    for (int i = 0; i < 2 * Heads * kDigits; ++i) {
      sum[i % 2][i / 2 / kDigits][i / 2 % kDigits] = SetInt(0);
    }
    AddProducts<Heads, kDigits>(codes, digits.digits(), 0, plan.n_large, ahead, sum);
    AddProducts<Heads, 2>(codes, digits.digits(), plan.n_large, plan.n_quads, ahead, sum);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      I32 base[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        base[v] = AddInt(sum[v][h][0], Times256(AddInt(sum[v][h][1], Times256(sum[v][h][2]))));
      }
      if (a.mean_bits == 4) {
        StoreBases<true>(a, head + h, b, SetInt(digits.offset[h]), base);
      } else {
        StoreBases<false>(a, head + h, b, SetInt(digits.offset[h]), base);
      }
    }
  }
}

void WideBase(const ScanBaseArgs* args) {
  const ScanBaseArgs& a = *args;
  const auto& plan = *static_cast<const BasePlan*>(a.plan);
  alignas(64) unsigned char codes[kMaxBaseQuads * kBaseQuadBytes];
  PairCodes(a, plan.n_quads, plan.rows(), codes);
  const auto* at = reinterpret_cast<const unsigned char*>(plan.rows() + plan.n_quads * kBaseQuad);
  MeansAhead ahead = AheadOfBase(a, plan.n_quads);
  for (int head = 0; head < a.group; at += BaseDigitsBytes(plan.n_quads)) {
    const auto& digits = *reinterpret_cast<const BaseDigits*>(at);
    const int heads = BaseBatch(a.group - head);
    if (heads == 4) {
      WideBaseHeads<4>(a, plan, digits, head, codes, &ahead);
    } else if (heads == 2) {
      WideBaseHeads<2>(a, plan, digits, head, codes, &ahead);
    } else {
      WideBaseHeads<1>(a, plan, digits, head, codes, &ahead);
    }
    head += heads;
  }
}
