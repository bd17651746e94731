// SPDX-License-Identifier: MIT
// What the residual adds to the attention of a head, and Backend::RankAttend in single calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fathom/backend.h"

namespace fathom {

// What the rest of Rank is multiplied by to be a mass in units of what the head attended.
inline float RestScale(float exp_scale, float cut, float offset, float noise, float lse) {
  constexpr double kMost = 88;  // e^88 is a float
  const double s = exp_scale;
  const double top = s * (static_cast<double>(cut) + offset) + s * s * noise / 2;
  return static_cast<float>(std::exp(std::min(top - lse, kMost)));
}

// False where an estimate of the rest, its mass or its weighed values [dim], holds NaN or inf: it
// is left out then, so that it cannot spoil what was attended exactly.
inline bool IsUsableRest(double mass, std::span<const float> rest) {
  return std::isfinite(mass) && std::ranges::all_of(rest, [](float x) { return std::isfinite(x); });
}

// Adds the rest of a head, values `rest` of a total mass, to its output. out, rest: [dim]. Nothing
// where the rest is not usable, and where the mass times the factor leaves the output no weight.
inline void AddRest(float* out, const float* rest, float mass, float factor, std::int32_t dim) {
  const float weight = 1.0F / (1.0F + factor * mass);
  if (factor == 0.0F || !(weight > 0.0F)) return;
  if (!IsUsableRest(mass, {rest, static_cast<std::size_t>(dim)})) return;
  const float share = factor * weight;
  for (std::int32_t d = 0; d < dim; ++d) out[d] = out[d] * weight + share * rest[d];
}

// RankAttend by Rank, Attend and Weigh.
inline void RankThenAttend(const Backend& backend, const RankAttendArgs& a) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  backend.Rank(a.rank);
  for (std::size_t kv = 0; kv < a.attend.size(); ++kv) {
    a.attend[kv].n_attended = *a.rank.heads[kv].n_attended;
  }
  const std::int32_t group = a.rank.group;
  const std::int32_t dim = a.rank.head_dim;
  backend.Attend({dim, group, a.scale, a.attend, a.least_weight});
  if (a.rank.exp_scale == 0) return;
  const std::int64_t n_blocks = a.n_blocks();
  std::vector<float> mass(a.rest.size() * size(group * n_blocks));
  std::vector<float> least(a.rest.size() * size(group));
  std::vector<WeighHead> weigh;
  for (std::size_t kv = 0; kv < a.rest.size(); ++kv) {
    const RankHead& ranked = a.rank.heads[kv];
    const RestHead& head = a.rest[kv];
    for (std::int32_t h = 0; h < group; ++h) {
      const float scale = RestScale(a.rank.exp_scale, ranked.cut[h], head.offset[h], head.noise[h],
                                    a.attend[kv].lse[h]);
      const float* rest = ranked.rest + h * ranked.rest_stride;
      const std::size_t at = kv * size(group) + size(h);
      double sum = 0;
      for (std::int64_t b = 0; b < n_blocks; ++b) {
        const float x = rest[b] * scale;
        mass[at * size(n_blocks) + size(b)] = x;
        sum += x;
      }
      head.mass[h] = static_cast<float>(sum);
      least[at] = a.least_share * (1 + head.mass[h]);
    }
    const std::size_t first = kv * size(group);
    weigh.push_back({head.means, head.mean, mass.data() + first * size(n_blocks),
                     least.data() + first, head.rest, head.n_read});
  }
  backend.Weigh({dim, group, n_blocks, weigh});
  for (std::size_t kv = 0; kv < a.rest.size(); ++kv) {
    const RestHead& head = a.rest[kv];
    for (std::int64_t h = 0; h < group; ++h) {
      AddRest(a.attend[kv].out + h * dim, head.rest + h * dim, head.mass[h], head.factor[h], dim);
    }
  }
}

}  // namespace fathom
