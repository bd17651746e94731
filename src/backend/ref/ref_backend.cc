// SPDX-License-Identifier: MIT
// Packing and selection. Packing is in single precision on purpose: it is the definition.
#include "backend/ref/ref_backend.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <vector>

#include "base/half.h"
#include "store/layout.h"

namespace fathom {
namespace {

// clip(floor(v), -8, 7) + 8; a NaN becomes 0.
int Code(float v) {
  const float cell = std::floor(v);
  if (!(cell >= -8.0f)) return 0;
  return cell > 7.0f ? 15 : static_cast<int>(cell) + 8;
}

int MeanCode(float sum, float step, int limit) {
  const float code = std::rint(sum / 64.0f / step);
  if (!(code >= static_cast<float>(-limit))) return -limit;
  return code > static_cast<float>(limit) ? limit : static_cast<int>(code);
}

void WriteSide(const PackArgs& a, int channel, int code) {
  std::uint8_t* row =
      a.side + layout::SideRowBytes(a.codec, a.mean_bits, a.segment_blocks) * channel;
  if (a.mean_bits == 8) {
    row[a.block] = static_cast<std::uint8_t>(static_cast<std::int8_t>(code));
  } else {
    row[a.block / 2] = layout::PackNibble(row[a.block / 2], a.block, code);
  }
}

void WriteCode(const PackArgs& a, int channel, int token, int code) {
  for (int p = 0; p < kPlanes; ++p) {
    std::uint64_t& word =
        a.planes[layout::PlaneWord(channel, p, a.block, RowBlocks(a, a.segment_blocks))];
    const std::uint64_t bit = std::uint64_t{1} << token;
    word = (code >> (kPlanes - 1 - p)) & 1 ? word | bit : word & ~bit;
  }
}

void PackMeanChannel(const PackArgs& a, int j) {
  float sum = 0;
  for (int i = 0; i < kBlockTokens; ++i) sum += a.x[i * a.head_dim + j];
  const int mean = MeanCode(sum, a.mean_step[j], layout::MeanLimit(a.mean_bits));
  WriteSide(a, j, mean);
  const float offset = static_cast<float>(mean) * a.mean_step[j];
  for (int i = 0; i < kBlockTokens; ++i) {
    const float y = a.x[i * a.head_dim + j] - offset;
    WriteCode(a, j, i, Code(y / (a.range[j] / 8.0f)));
  }
}

void PackPaperChannel(const PackArgs& a, int j) {
  float top = 0;
  for (int i = 0; i < kBlockTokens; ++i) {
    const float x = std::fabs(a.x[i * a.head_dim + j]);
    if (x > top) top = x;
  }
  const Half scale = FloatToHalf(top);
  reinterpret_cast<Half*>(a.side)[static_cast<std::size_t>(j) * a.segment_blocks + a.block] = scale;
  const float range = HalfToFloat(scale);
  for (int i = 0; i < kBlockTokens; ++i) {
    WriteCode(a, j, i, range == 0 ? 8 : Code(a.x[i * a.head_dim + j] / (range / 8.0f)));
  }
}

// Score descending, index ascending; a NaN below everything.
bool Better(const float* scores, std::int32_t a, std::int32_t b) {
  const bool nan_a = std::isnan(scores[a]);
  const bool nan_b = std::isnan(scores[b]);
  if (nan_a != nan_b) return nan_b;
  if (!nan_a && scores[a] != scores[b]) return scores[a] > scores[b];
  return a < b;
}

}  // namespace

void RefBackend::Pack(const PackArgs& a) const {
  assert(a.block >= 0 && a.block < a.segment_blocks && a.segment_blocks % 2 == 0);
  for (int j = 0; j < a.head_dim; ++j) {
    if (a.codec == Codec::kMean) {
      PackMeanChannel(a, j);
    } else {
      PackPaperChannel(a, j);
    }
  }
}

void RefBackend::Select(const SelectArgs& a) const {
  assert(a.keep >= 0 && a.keep <= a.last - a.first);
  std::vector<std::int32_t> order(static_cast<std::size_t>(a.last - a.first));
  std::vector<std::uint16_t> mask;
  const auto everyone = static_cast<std::uint16_t>((1u << a.group) - 1);
  for (const SelectHead& head : a.heads) {
    mask.assign(static_cast<std::size_t>(a.n_tokens), 0);
    for (std::int64_t i = 0; i < a.n_tokens; ++i) {
      if (i < a.first || i >= a.last) mask[i] = everyone;
    }
    for (int h = 0; h < a.group; ++h) {
      const float* scores = head.scores + h * head.stride;
      for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<std::int32_t>(a.first + static_cast<std::int64_t>(i));
      }
      std::sort(order.begin(), order.end(),
                [scores](std::int32_t x, std::int32_t y) { return Better(scores, x, y); });
      std::int32_t* winners = head.winners + h * a.keep;
      std::copy(order.begin(), order.begin() + a.keep, winners);
      std::sort(winners, winners + a.keep);
      for (std::int64_t w = 0; w < a.keep; ++w) {
        mask[winners[w]] = static_cast<std::uint16_t>(mask[winners[w]] | 1u << h);
      }
    }
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < a.n_tokens; ++i) {
      if (mask[i] == 0) continue;
      head.tokens[n] = static_cast<std::int32_t>(i);
      head.mask[n++] = mask[i];
    }
    *head.n_attended = n;
  }
}

std::unique_ptr<Backend> MakeRefBackend(int) { return std::make_unique<RefBackend>(); }

}  // namespace fathom
