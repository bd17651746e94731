// SPDX-License-Identifier: MIT
// Approximate and exact scores, and the mass of their blocks.
#include <array>
#include <cassert>
#include <cmath>
#include <limits>

#include "backend/ref/ref_backend.h"
#include "base/half.h"
#include "store/layout.h"

namespace fathom {
namespace {

int Bit(const ScanArgs& a, const SegmentView& s, int channel, int plane, int block, int token) {
  const std::int32_t row = RowBlocks(s, a.segment_blocks);
  const std::uint64_t word = s.planes[layout::PlaneWord(channel, plane, block, row)];
  return static_cast<int>(word >> token & 1);
}

int MeanCodeAt(const ScanArgs& a, const SegmentView& s, int channel, int block) {
  const std::uint8_t* row =
      s.side + layout::SideRowBytes(a.codec, a.mean_bits, a.segment_blocks) * channel;
  if (a.mean_bits == 8) return static_cast<std::int8_t>(row[block]);
  return layout::UnpackNibble(row[block / 2], block);
}

// U of ScanTable: the parts averaged in pairs, rounding up.
int Average(std::array<int, 8> part, int n) {
  for (; n > 1; n /= 2) {
    for (int i = 0; i < n / 2; ++i) part[i] = (part[2 * i] + part[2 * i + 1] + 1) / 2;
  }
  return part[0];
}

int MeanSum(const ScanArgs& a, const SegmentView& s, const ScanTable& t, int h, int block,
            int token) {
  std::array<int, 8> part{};
  std::size_t p = 0;
  for (int r = 0; r < t.n_parts; ++r) {
    part[r] = t.low[r * a.group + h];
    for (; p < static_cast<std::size_t>(t.part_end[r]); ++p) {
      const int channel = t.plane[p] / kPlanes;
      part[r] += t.weight[p * a.group + h] * Bit(a, s, channel, t.plane[p] % kPlanes, block, token);
    }
    assert(part[r] >= 0 && part[r] <= 255);
  }
  return Average(part, t.n_parts);
}

std::int64_t MeanBase(const ScanArgs& a, const SegmentView& s, const ScanTable& t, int h,
                      int block) {
  std::int64_t base = t.constant[h];
  for (std::size_t c = 0; c < t.channel.size(); ++c) {
    base += static_cast<std::int64_t>(t.mean_weight[c * a.group + h]) *
            MeanCodeAt(a, s, t.channel[c], block);
  }
  return base;
}

float MeanScore(const ScanArgs& a, const SegmentView& s, const ScanTable& t, int h, int block,
                int token) {
  const std::int64_t total =
      MeanBase(a, s, t, h, block) +
      (static_cast<std::int64_t>(MeanSum(a, s, t, h, block, token)) << t.shift[h]);
  return static_cast<float>(total) * t.scale[h];
}

float PaperScore(const ScanArgs& a, const SegmentView& s, const ScanHead& head, int h, int block,
                 int token) {
  const auto* scales = reinterpret_cast<const Half*>(s.side);
  double score = 0;
  for (int j = 0; j < a.head_dim; ++j) {
    if (head.depth[j] == 0) continue;
    double value = 0;
    for (int p = 0; p < head.depth[j]; ++p) {
      value += std::ldexp(Bit(a, s, j, p, block, token) == 1 ? 1.0 : -1.0, -(p + 1));
    }
    const double range =
        HalfToFloat(scales[static_cast<std::size_t>(j) * a.segment_blocks + block]);
    score += static_cast<double>(head.q[h * a.head_dim + j]) * range * value;
  }
  return static_cast<float>(score);
}

void ScanIntegers(const ScanArgs& a, const ScanHead& head) {
  for (int h = 0; h < a.group; ++h) {
    std::uint8_t* sums = head.sums + h * head.stride;
    std::int32_t* base = head.base + h * head.base_stride;
    for (const SegmentView& s : head.segments) {
      const ScanTable& table = head.tables[s.table];
      for (int block = 0; block < s.n_blocks; ++block) {
        *base++ = static_cast<std::int32_t>(MeanBase(a, s, table, h, block));
        for (int token = 0; token < kBlockTokens; ++token) {
          *sums++ = static_cast<std::uint8_t>(MeanSum(a, s, table, h, block, token));
        }
      }
    }
  }
}

}  // namespace

void RefBackend::Scan(const ScanArgs& a) const {
  for (const ScanHead& head : a.heads) {
    if (head.scores == nullptr) {
      assert(a.codec == Codec::kMean);
      if (head.sums != nullptr) ScanIntegers(a, head);
      continue;
    }
    for (int h = 0; h < a.group; ++h) {
      float* out = head.scores + h * head.stride;
      for (const SegmentView& s : head.segments) {
        for (int i = 0; i < s.n_blocks * kBlockTokens; ++i) {
          const int block = i / kBlockTokens;
          const int token = i % kBlockTokens;
          *out++ = a.codec == Codec::kMean ? MeanScore(a, s, head.tables[s.table], h, block, token)
                                           : PaperScore(a, s, head, h, block, token);
        }
      }
    }
  }
}

void RefBackend::Score(const ScoreArgs& a) const {
  const std::int64_t key_stride = a.key_stride == 0 ? 2 * a.head_dim : a.key_stride;
  assert(key_stride >= a.head_dim);
  for (const ScoreHead& head : a.heads) {
    for (int h = 0; h < a.group; ++h) {
      for (std::int64_t i = 0; i < a.n_tokens; ++i) {
        double dot = 0;
        for (int d = 0; d < a.head_dim; ++d) {
          dot += static_cast<double>(head.q[h * a.head_dim + d]) *
                 HalfToFloat(head.rows[i * key_stride + d]);
        }
        head.scores[h * head.stride + i] = static_cast<float>(dot);
      }
    }
  }
}

void RefBackend::Mass(const MassArgs& a) const {
  constexpr double kMost = 88;
  for (const MassHead& head : a.heads) {
    for (int h = 0; h < a.group; ++h) {
      for (std::int64_t i = 0; i < head.n_listed; ++i) {
        if (head.tokens[i] < a.n_blocks * kBlockTokens && (head.mask[i] >> h & 1) != 0) {
          head.scores[h * head.stride + head.tokens[i]] = -std::numeric_limits<float>::infinity();
        }
      }
      for (std::int64_t b = 0; b < a.n_blocks; ++b) {
        const float* scores = head.scores + h * head.stride + b * kBlockTokens;
        double mass = 0;
        for (int i = 0; i < kBlockTokens; ++i) {
          const double x = static_cast<double>(a.scale) * scores[i] - head.shift[h];
          mass += std::exp(x > kMost ? kMost : x);  // a NaN stays
        }
        head.mass[h * a.n_blocks + b] = static_cast<float>(mass);
      }
    }
  }
}

}  // namespace fathom
