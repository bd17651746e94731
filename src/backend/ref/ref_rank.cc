// SPDX-License-Identifier: MIT
// Rank, as its definition says: all scores, the selection from them, and the rest in double.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/ref/ref_backend.h"

namespace fathom {
namespace {

// Out: rest and cut of one query head. winner: of all tokens, those that are no candidates
// included.
void Rest(const RankArgs& a, const std::vector<float>& scores, const std::vector<bool>& winner,
          float* rest, float* cut) {
  *cut = std::numeric_limits<float>::infinity();
  for (std::int64_t i = a.first; i < a.last; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (winner[at] && !(scores[at] >= *cut)) *cut = scores[at];  // a NaN comes through
  }
  const auto n_blocks = static_cast<std::int64_t>(scores.size()) / kBlockTokens;
  for (std::int64_t b = 0; b < n_blocks; ++b) {
    double sum = 0;
    for (std::int64_t i = b * kBlockTokens; i < (b + 1) * kBlockTokens; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (winner[at]) continue;
      sum += std::exp(a.exp_scale * (static_cast<double>(scores[at]) - *cut));
    }
    rest[b] = static_cast<float>(sum);
  }
}

}  // namespace

void RefBackend::Rank(const RankArgs& a) const {
  assert(a.keep >= 1 && a.first >= 0 && a.first + a.keep <= a.last && a.last <= a.n_tokens);
  a.PlanHeads();
  for (const RankHead& head : a.heads) {
    std::int64_t n_index = 0;
    for (const SegmentView& s : head.segments) n_index += s.n_blocks * std::int64_t{kBlockTokens};
    std::vector<float> scores(static_cast<std::size_t>(a.group * n_index));
    const ScanHead scan = {head.segments, head.tables, nullptr, nullptr, scores.data(), n_index};
    Scan({Codec::kMean, a.head_dim, a.group, a.segment_blocks, a.mean_bits, {&scan, 1}});
    std::vector<std::int32_t> winners(static_cast<std::size_t>(a.group * a.keep));
    const SelectHead select = {scores.data(), n_index,   winners.data(),
                               head.tokens,   head.mask, head.n_attended};
    Select({a.group, a.first, a.last, a.n_tokens, a.keep, {&select, 1}});
    if (a.exp_scale == 0) continue;
    for (int h = 0; h < a.group; ++h) {
      std::vector<bool> winner(static_cast<std::size_t>(std::max(a.n_tokens, n_index)), false);
      std::fill(winner.begin() + a.last, winner.end(), true);
      for (std::int64_t i = 0; i < *head.n_attended; ++i) {
        if ((head.mask[i] >> h & 1) != 0) winner[static_cast<std::size_t>(head.tokens[i])] = true;
      }
      const auto begin = scores.begin() + h * n_index;
      Rest(a, {begin, begin + n_index}, winner, head.rest + h * head.rest_stride, head.cut + h);
    }
  }
}

}  // namespace fathom
