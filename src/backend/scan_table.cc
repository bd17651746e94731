// SPDX-License-Identifier: MIT
#include "fathom/scan_table.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "store/layout.h"

namespace fathom {
namespace {

constexpr double kWeightSum = 32000;  // below 2^15 by more than what rounding 1024 weights adds
constexpr double kMeanSum = 0x1p23;   // leaves half of 2^24 to the planes, which need 1/16
constexpr double kMeanFraction = 16;  // mean weights carry four more bits than plane weights

struct Magnitudes {
  double planes = 0;  // A
  double means = 0;   // M
};

int DepthOf(std::uint8_t level) { return level > 0 ? level - 1 : 0; }

const float* Decoder(const ScanTableInput& in, int channel, int depth) {
  return in.weight + (static_cast<std::size_t>(channel) * kPlanes + (depth - 1)) * kPlanes;
}

Magnitudes Measure(const ScanTableInput& in, const float* q) {
  Magnitudes m;
  for (int j = 0; j < in.head_dim; ++j) {
    if (in.level[j] == 0) continue;
    m.means += std::fabs(static_cast<double>(q[j]) * in.mean_step[j]);
    const int depth = DepthOf(in.level[j]);
    if (depth == 0) continue;
    const float* w = Decoder(in, j, depth);
    for (int p = 0; p < depth; ++p) m.planes += std::fabs(static_cast<double>(q[j]) * w[p]);
  }
  m.means *= layout::MeanLimit(in.mean_bits);
  return m;
}

double Scale(const Magnitudes& m) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  const double by_planes = m.planes > 0 ? kWeightSum / m.planes : kNone;
  const double by_means = m.means > 0 ? kMeanSum / (kMeanFraction * m.means) : kNone;
  const double s = std::min(by_planes, by_means);
  return s == kNone ? 1 : s;
}

// Which planes and channels are read; the same for all heads of the group.
void ListReads(const ScanTableInput& in, ScanTable* table) {
  table->plane.clear();
  table->channel.clear();
  for (int j = 0; j < in.head_dim; ++j) {
    assert(in.level[j] < kLevels);
    if (in.level[j] == 0) continue;
    table->channel.push_back(j);
    for (int p = 0; p < DepthOf(in.level[j]); ++p) table->plane.push_back(j * kPlanes + p);
  }
}

// Writes the weights and the scale of one head; leaves it as it is when they are not numbers.
void FillHead(const ScanTableInput& in, int head, ScanTable* table) {
  const float* q = in.q + static_cast<std::size_t>(head) * in.head_dim;
  const Magnitudes m = Measure(in, q);
  const double s = Scale(m);
  const float scale = static_cast<float>(1 / (kMeanFraction * s));
  if (!std::isfinite(m.planes) || !std::isfinite(m.means) || !std::isfinite(s)) return;
  const auto group = static_cast<std::size_t>(in.group);
  std::int64_t sum = 0;
  std::int64_t magnitude = 0;
  for (std::size_t i = 0; i < table->plane.size(); ++i) {
    const int channel = table->plane[i] / kPlanes;
    const float* w = Decoder(in, channel, DepthOf(in.level[channel]));
    const double exact = static_cast<double>(q[channel]) * w[table->plane[i] % kPlanes] * s;
    const long rounded = std::lround(exact);
    table->weight[i * group + head] = static_cast<std::int16_t>(rounded);
    sum += rounded;
    magnitude += std::labs(rounded);
  }
  assert(magnitude <= std::numeric_limits<std::int16_t>::max());
  std::int64_t total = 16 * magnitude;
  for (std::size_t i = 0; i < table->channel.size(); ++i) {
    const int channel = table->channel[i];
    const long rounded =
        std::lround(kMeanFraction * s * static_cast<double>(q[channel]) * in.mean_step[channel]);
    table->mean_weight[i * group + head] = static_cast<std::int32_t>(rounded);
    total += std::labs(rounded) * layout::MeanLimit(in.mean_bits);
  }
  assert(total < (1 << 24));
  (void)total;
  table->weight_sum[head] = static_cast<std::int32_t>(sum);
  table->scale[head] = scale;
}

bool AllFinite(const float* v, int n) {
  return std::all_of(v, v + n, [](float x) { return std::isfinite(x); });
}

}  // namespace

void BuildScanTable(const ScanTableInput& input, ScanTable* table) {
  assert(input.head_dim > 0 && input.head_dim <= kMaxHeadDim);
  assert(input.group > 0 && input.group <= kMaxGroup);
  assert(input.mean_bits == 4 || input.mean_bits == 8);
  ListReads(input, table);
  const auto group = static_cast<std::size_t>(input.group);
  table->weight.assign(table->plane.size() * group, 0);
  table->mean_weight.assign(table->channel.size() * group, 0);
  table->weight_sum.assign(group, 0);
  table->scale.assign(group, std::numeric_limits<float>::quiet_NaN());
  for (int h = 0; h < input.group; ++h) {
    const float* q = input.q + static_cast<std::size_t>(h) * input.head_dim;
    if (AllFinite(q, input.head_dim)) FillHead(input, h, table);
  }
}

}  // namespace fathom
