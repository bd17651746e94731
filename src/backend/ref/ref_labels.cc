// SPDX-License-Identifier: MIT
// Scores from labels. The 8-bit weights are in single precision on purpose: they are the
// definition.
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/half.h"
#include "store/layout.h"

namespace fathom {
namespace {

// What one query head takes from one block.
struct BlockWeights {
  std::vector<int> weight;  // [C]
  float scale = 0;
};

int Channel(const LabelScanHead& head, int c) {
  return head.channels == nullptr ? c : head.channels[c];
}

BlockWeights Weights(const LabelScanArgs& a, const LabelScanHead& head, const LabelView& s, int h,
                     int block) {
  const int n = head.n_channels;
  std::vector<float> p(static_cast<std::size_t>(n));
  float most = 0;
  bool finite = true;
  for (int c = 0; c < n; ++c) {
    const std::size_t row = static_cast<std::size_t>(Channel(head, c)) * a.segment_blocks;
    p[c] = head.q[h * n + c] * HalfToFloat(s.scales[row + block]);
    finite = finite && std::isfinite(p[c]);
    if (std::fabs(p[c]) > most) most = std::fabs(p[c]);
  }
  BlockWeights weights{std::vector<int>(p.size()), NAN};
  if (!finite) return weights;
  weights.scale = most / 127 * std::ldexp(1.0F, 1 - a.planes);
  if (most < 0x1p-100F) return weights;
  const float steps = 127 / most;
  for (int c = 0; c < n; ++c) weights.weight[c] = static_cast<int>(std::rint(p[c] * steps));
  return weights;
}

int Code(const LabelScanArgs& a, const LabelScanHead& head, const LabelView& s, int c, int block,
         int token) {
  const int width = layout::LabelWidth(a.layout, a.planes, head.n_channels);
  const layout::LabelPlace place =
      a.layout == LabelLayout::kTokens
          ? layout::TokenLabel(a.planes, width, c, block, token)
          : layout::ChannelLabel(a.segment_blocks, Channel(head, c), block, token);
  return s.codes[place.byte] >> place.shift & ((1 << layout::LabelBits(a.planes)) - 1);
}

}  // namespace

void RefBackend::ScanLabels(const LabelScanArgs& a) const {
  assert(a.planes >= 1 && a.planes <= kPlanes && a.segment_blocks % 16 == 0);
  assert(a.layout == LabelLayout::kTokens || a.planes > 2);
  for (const LabelScanHead& head : a.heads) {
    for (int h = 0; h < a.group; ++h) {
      float* out = head.scores + h * head.stride;
      for (const LabelView& s : head.segments) {
        for (int block = 0; block < s.n_blocks; ++block) {
          const BlockWeights weights = Weights(a, head, s, h, block);
          for (int i = 0; i < kBlockTokens; ++i) {
            std::int64_t sum = 0, all = 0;
            for (int c = 0; c < head.n_channels; ++c) {
              sum += weights.weight[c] * Code(a, head, s, c, block, i);
              all += weights.weight[c];
            }
            const std::int64_t twice = 2 * sum - ((1 << a.planes) - 1) * all;
            *out++ = static_cast<float>(static_cast<double>(twice) / 2) * weights.scale;
          }
        }
      }
    }
  }
}

}  // namespace fathom
