// SPDX-License-Identifier: MIT
#include "fathom/scan_table.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "store/layout.h"

namespace fathom {
namespace {

constexpr int kMostParts = 8;
constexpr int kByte = 255;  // the sum of a part
constexpr int kMostShift = 15;
constexpr double kHalfRange = 129;              // of U around its middle, rounding included
constexpr double kNothing = 1e-290;             // smaller weights are as good as none
constexpr double kMostTotal = 0x1p24 - 0x1p15;  // of T; the rest is for rounded mean weights

int DepthOf(std::uint8_t level) { return level > 0 ? level - 1 : 0; }

const float* Decoder(const ScanTableInput& in, int channel, int depth) {
  return in.weight + (static_cast<std::size_t>(channel) * kPlanes + (depth - 1)) * kPlanes;
}

// Half away from zero; |x| below 2^31.
std::int64_t Rounded(double x) { return static_cast<std::int64_t>(x + std::copysign(0.5, x)); }

int PartsFor(std::size_t n_planes) {
  if (n_planes <= 12) return 1;
  if (n_planes <= 48) return 2;
  return n_planes <= 128 ? 4 : kMostParts;
}

// Which planes and channels are read; the same for all heads of the group.
void ListReads(const ScanTableInput& in, ScanTable* table) {
  table->plane.clear();
  table->channel.clear();
  table->part_end.clear();
  std::size_t n_planes = 0;
  for (int j = 0; j < in.head_dim; ++j) {
    assert(in.level[j] < kLevels);
    if (in.level[j] == 0) continue;
    table->channel.push_back(j);
    n_planes += static_cast<std::size_t>(DepthOf(in.level[j]));
  }
  table->n_parts = PartsFor(n_planes);
  for (int part = 0; part < table->n_parts; ++part) {
    for (std::size_t c = 0; c < table->channel.size(); ++c) {
      const int j = table->channel[c];
      for (int p = 0; p < DepthOf(in.level[j]); ++p) {
        if (static_cast<int>(c + static_cast<std::size_t>(p)) % table->n_parts == part) {
          table->plane.push_back(j * kPlanes + p);
        }
      }
    }
    table->part_end.push_back(static_cast<std::int32_t>(table->plane.size()));
  }
}

// The weights of one head before rounding, [n_planes], and what they and the means add up to.
struct HeadWeights {
  std::array<double, static_cast<std::size_t>(kMaxHeadDim) * kPlanes> exact{};
  double most = 0;   // sum of magnitudes in the largest part
  double means = 0;  // M
};

void Measure(const ScanTableInput& in, const ScanTable& table, const float* q, HeadWeights* w) {
  w->most = 0;
  w->means = 0;
  std::size_t i = 0;
  for (const std::int32_t end : table.part_end) {
    double sum = 0;
    for (; i < static_cast<std::size_t>(end); ++i) {
      const int channel = table.plane[i] / kPlanes;
      const float* decoder = Decoder(in, channel, DepthOf(in.level[channel]));
      w->exact[i] = static_cast<double>(q[channel]) * decoder[table.plane[i] % kPlanes];
      sum += std::fabs(w->exact[i]);
    }
    if (!(sum <= w->most)) w->most = sum;  // a NaN stays
  }
  for (const std::int32_t j : table.channel) {
    w->means += std::fabs(static_cast<double>(q[j]) * in.mean_step[j]);
  }
  w->means *= layout::MeanLimit(in.mean_bits);
}

// Rounds the weights of a head at scale s; false when a part exceeds a byte.
bool Round(const HeadWeights& w, double s, int head, std::size_t group, ScanTable* table) {
  std::size_t i = 0;
  for (std::size_t r = 0; r < table->part_end.size(); ++r) {
    std::int64_t magnitude = 0, low = 0;
    for (; i < static_cast<std::size_t>(table->part_end[r]); ++i) {
      const std::int64_t rounded = Rounded(w.exact[i] * s);
      table->weight[i * group + static_cast<std::size_t>(head)] =
          static_cast<std::int16_t>(rounded);
      magnitude += std::abs(rounded);
      low -= std::min<std::int64_t>(rounded, 0);
    }
    table->low[r * group + static_cast<std::size_t>(head)] = static_cast<std::int32_t>(low);
    if (magnitude > kByte) return false;
  }
  return true;
}

// What one step of U is worth, with the weights written; see the header.
double FillWeights(const HeadWeights& w, int head, std::size_t group, ScanTable* table) {
  const double floor = w.means / (0x1p24 - 0x1p16);
  const double parts = table->n_parts;
  if (w.most < kNothing) return w.means > 0 ? std::max(w.means / 128, floor) : 1;
  double s = std::min(kByte / w.most, floor > 0 ? 2 * parts / floor : kByte / w.most);
  constexpr double kStep = 1 - 0x1p-9;  // half a unit of the byte
  while (!Round(w, s, head, group, table)) s *= kStep;
  return 2 * parts / s;
}

// Writes all of one head; leaves it as it is when something is not a number.
void FillHead(const ScanTableInput& in, int head, ScanTable* table) {
  const float* q = in.q + static_cast<std::size_t>(head) * in.head_dim;
  HeadWeights w;
  Measure(in, *table, q, &w);
  if (!std::isfinite(w.most) || !std::isfinite(w.means)) return;
  const auto group = static_cast<std::size_t>(in.group);
  const auto at = static_cast<std::size_t>(head);
  const double u = FillWeights(w, head, group, table);
  int shift = kMostShift;
  while (shift > 0 && std::ldexp(kHalfRange + w.means / u, shift) > kMostTotal) --shift;
  const double scale = std::ldexp(u, -shift);
  std::int64_t magnitude = 0;
  for (std::size_t i = 0; i < table->plane.size(); ++i) {
    magnitude += std::abs(table->weight[i * group + at]);
  }
  const double middle = static_cast<double>(magnitude) / (2.0 * table->n_parts) +
                        std::log2(static_cast<double>(table->n_parts)) / 4;
  std::int64_t total = Rounded(std::ldexp(middle, shift));
  table->constant[at] = static_cast<std::int32_t>(-total);
  for (std::size_t c = 0; c < table->channel.size(); ++c) {
    const int j = table->channel[c];
    const std::int64_t rounded = Rounded(static_cast<double>(q[j]) * in.mean_step[j] / scale);
    table->mean_weight[c * group + at] = static_cast<std::int32_t>(rounded);
    total += std::abs(rounded) * layout::MeanLimit(in.mean_bits);
  }
  assert(total < (1 << 24));
  (void)total;
  table->shift[at] = shift;
  table->scale[at] = static_cast<float>(scale);
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
  table->low.assign(static_cast<std::size_t>(table->n_parts) * group, 0);
  table->mean_weight.assign(table->channel.size() * group, 0);
  table->constant.assign(group, 0);
  table->shift.assign(group, 0);
  table->scale.assign(group, std::numeric_limits<float>::quiet_NaN());
  for (int h = 0; h < input.group; ++h) {
    const float* q = input.q + static_cast<std::size_t>(h) * input.head_dim;
    if (AllFinite(q, input.head_dim)) FillHead(input, h, table);
  }
}

}  // namespace fathom
