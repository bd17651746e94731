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

// Which planes and channels are read; the same for all heads of the group. What a query reads is no
// pattern, so that branches on it would be guessed wrongly.
void ListReads(const ScanTableInput& in, ScanTable* table) {
  const auto dim = static_cast<std::size_t>(in.head_dim);
  table->channel.resize(dim);
  std::array<std::int32_t, kMaxHeadDim + 1> deep;  // those with planes, as numbers of `channel`
  std::size_t n = 0, n_deep = 0, n_planes = 0;
  for (std::size_t j = 0; j < dim; ++j) {
    assert(in.level[j] < kLevels);
    table->channel[n] = static_cast<std::int32_t>(j);
    deep[n_deep] = static_cast<std::int32_t>(n);
    n += in.level[j] > 0 ? 1 : 0;
    n_deep += in.level[j] > 1 ? 1 : 0;
    n_planes += static_cast<std::size_t>(DepthOf(in.level[j]));
  }
  table->channel.resize(n);
  table->n_parts = PartsFor(n_planes);
  table->plane.resize(n_planes + 1);
  table->part_end.clear();
  std::size_t at = 0;
  for (int part = 0; part < table->n_parts; ++part) {
    for (std::size_t i = 0; i < n_deep; ++i) {
      const std::int32_t j = table->channel[static_cast<std::size_t>(deep[i])];
      for (int p = 0; p < DepthOf(in.level[j]); ++p) {
        table->plane[at] = j * kPlanes + p;
        at += ((deep[i] + p) & (table->n_parts - 1)) == part ? 1 : 0;  // parts: a power of two
      }
    }
    table->part_end.push_back(static_cast<std::int32_t>(at));
  }
  table->plane.resize(n_planes);
}

// Heads go through most of the work together: a sum of one head waits for every addition.
constexpr std::size_t kHeads = 4;
using Doubles = std::array<double, kHeads>;

// The weights of kHeads heads before rounding, and what they and the means add up to.
struct HeadWeights {
  Doubles plane[static_cast<std::size_t>(kMaxHeadDim) * kPlanes];  // [n_planes]
  Doubles mean[kMaxHeadDim];                                       // [n_active]
  Doubles most;   // sum of magnitudes in the largest part
  Doubles means;  // M
};

// Heads first .. first + kHeads - 1; beyond the group, its last head again.
void Measure(const ScanTableInput& in, const ScanTable& table, int first, HeadWeights* w) {
  const float* q[kHeads];
  for (std::size_t h = 0; h < kHeads; ++h) {
    const int head = std::min(first + static_cast<int>(h), in.group - 1);
    q[h] = in.q + static_cast<std::size_t>(head) * static_cast<std::size_t>(in.head_dim);
  }
  w->most = w->means = Doubles{};
  std::size_t i = 0;
  for (const std::int32_t end : table.part_end) {
    Doubles sum{};
    for (; i < static_cast<std::size_t>(end); ++i) {
      const int channel = table.plane[i] / kPlanes;
      const float* decoder = Decoder(in, channel, DepthOf(in.level[channel]));
      const double weight = decoder[table.plane[i] % kPlanes];
      for (std::size_t h = 0; h < kHeads; ++h) {
        w->plane[i][h] = static_cast<double>(q[h][channel]) * weight;
        sum[h] += std::fabs(w->plane[i][h]);
      }
    }
    for (std::size_t h = 0; h < kHeads; ++h) {
      if (!(sum[h] <= w->most[h])) w->most[h] = sum[h];  // a NaN stays
    }
  }
  for (std::size_t c = 0; c < table.channel.size(); ++c) {
    const int j = table.channel[c];
    for (std::size_t h = 0; h < kHeads; ++h) {
      w->mean[c][h] = static_cast<double>(q[h][j]) * in.mean_step[j];
      w->means[h] += std::fabs(w->mean[c][h]);
    }
  }
  for (double& means : w->means) means *= layout::MeanLimit(in.mean_bits);
}

// Rounds the weights of a lane at scale s, of head `at` of the group; false when a part exceeds a
// byte.
bool Round(const HeadWeights& w, double s, std::size_t lane, std::size_t at, std::size_t group,
           ScanTable* table) {
  std::size_t i = 0;
  for (std::size_t r = 0; r < table->part_end.size(); ++r) {
    std::int64_t magnitude = 0, low = 0;
    for (; i < static_cast<std::size_t>(table->part_end[r]); ++i) {
      const std::int64_t rounded = Rounded(w.plane[i][lane] * s);
      table->weight[i * group + at] = static_cast<std::int16_t>(rounded);
      magnitude += std::abs(rounded);
      low -= std::min<std::int64_t>(rounded, 0);
    }
    table->low[r * group + at] = static_cast<std::int32_t>(low);
    if (magnitude > kByte) return false;
  }
  return true;
}

// What one step of U is worth, with the weights written; see the header.
double FillWeights(const HeadWeights& w, std::size_t lane, std::size_t at, std::size_t group,
                   ScanTable* table) {
  const double most = w.most[lane], means = w.means[lane];
  const double floor = means / (0x1p24 - 0x1p16);
  const double parts = table->n_parts;
  if (most < kNothing) return means > 0 ? std::max(means / 128, floor) : 1;
  double s = std::min(kByte / most, floor > 0 ? 2 * parts / floor : kByte / most);
  constexpr double kStep = 1 - 0x1p-9;  // half a unit of the byte
  while (!Round(w, s, lane, at, group, table)) s *= kStep;
  return 2 * parts / s;
}

// Writes what is not of the means; returns what one step of T is worth.
double FillHead(const HeadWeights& w, std::size_t lane, std::size_t at, std::size_t group,
                ScanTable* table) {
  const double u = FillWeights(w, lane, at, group, table);
  int shift = kMostShift;
  while (shift > 0 && std::ldexp(kHalfRange + w.means[lane] / u, shift) > kMostTotal) --shift;
  const double scale = std::ldexp(u, -shift);
  std::int64_t magnitude = 0;
  for (std::size_t i = 0; i < table->plane.size(); ++i) {
    magnitude += std::abs(table->weight[i * group + at]);
  }
  const double middle = static_cast<double>(magnitude) / (2.0 * table->n_parts) +
                        std::log2(static_cast<double>(table->n_parts)) / 4;
  table->constant[at] = static_cast<std::int32_t>(-Rounded(std::ldexp(middle, shift)));
  table->shift[at] = shift;
  table->scale[at] = static_cast<float>(scale);
  return scale;
}

// Writes all of heads first .. first + kHeads - 1 of the group; those that are not `finite`, and
// those with something that is not a number, are left as they are.
void FillHeads(const ScanTableInput& in, int first, const bool* finite, ScanTable* table) {
  HeadWeights w;
  Measure(in, *table, first, &w);
  const auto group = static_cast<std::size_t>(in.group);
  const auto n = std::min<std::size_t>(kHeads, group - static_cast<std::size_t>(first));
  Doubles scale = {1, 1, 1, 1};
  bool filled[kHeads] = {};
  for (std::size_t h = 0; h < n; ++h) {
    filled[h] = finite[h] && std::isfinite(w.most[h]) && std::isfinite(w.means[h]);
    const std::size_t at = static_cast<std::size_t>(first) + h;
    if (filled[h]) scale[h] = FillHead(w, h, at, group, table);
  }
  for (std::size_t h = 0; h < kHeads; ++h) {
    for (std::size_t c = 0; !filled[h] && c < table->channel.size(); ++c) w.mean[c][h] = 0;
  }
  std::array<std::int64_t, kHeads> total{};
  for (std::size_t c = 0; c < table->channel.size(); ++c) {
    std::array<std::int32_t, kHeads> rounded;
    for (std::size_t h = 0; h < kHeads; ++h) {
      const double exact = w.mean[c][h] / scale[h];
      rounded[h] = static_cast<std::int32_t>(exact + std::copysign(0.5, exact));
      total[h] += std::abs(rounded[h]) * layout::MeanLimit(in.mean_bits);
    }
    std::int32_t* out = &table->mean_weight[c * group + static_cast<std::size_t>(first)];
    for (std::size_t h = 0; h < n; ++h) {
      if (filled[h]) out[h] = rounded[h];
    }
  }
  for (std::size_t h = 0; h < n; ++h) {
    assert(!filled[h] ||
           total[h] + std::abs(table->constant[static_cast<std::size_t>(first) + h]) < (1 << 24));
  }
  (void)total;
}

bool AllFinite(const float* v, int n) {
  int others = 0;
  for (int i = 0; i < n; ++i) others += std::isfinite(v[i]) ? 0 : 1;
  return others == 0;
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
  for (int first = 0; first < input.group; first += static_cast<int>(kHeads)) {
    bool finite[kHeads] = {};
    for (int h = 0; h < static_cast<int>(kHeads) && first + h < input.group; ++h) {
      const float* q =
          input.q + static_cast<std::size_t>(first + h) * static_cast<std::size_t>(input.head_dim);
      finite[h] = AllFinite(q, input.head_dim);
    }
    FillHeads(input, first, finite, table);
  }
}

}  // namespace fathom
