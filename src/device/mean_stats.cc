// SPDX-License-Identifier: MIT
#include "device/mean_stats.h"

#include <cstddef>
#include <span>

namespace fathom::cuda {
namespace {

template <typename To, typename From>
void Append(To* to, const From& from) {
  to->insert(to->end(), from.begin(), from.end());
}

template <typename T>
DeviceBuffer<T> ToDevice(const std::vector<T>& host) {
  return DeviceBuffer<T>(std::span<const T>(host));
}

}  // namespace

void MeanStats::Add(const HeadIndex& index) {
  const auto d = static_cast<std::size_t>(index.shape().head_dim);
  const std::vector<double> of_head = index.Distortions();
  const DistortionHull& hull = hulls.emplace_back(of_head, index.shape().mean_bits);
  const MeanCodec& codec = index.codecs().front();
  Append(&variance, hull.variance());
  Append(&slope, hull.step_slopes());
  Append(&distortion, of_head);
  Append(&center, index.basis().center);
  Append(&mean_step, codec.mean_step);
  Append(&weight, codec.weight);
  Append(&range, codec.range);
  std::vector<std::uint8_t> levels(d * (kLevels - 1), 0);
  for (std::size_t j = 0; j < d; ++j) {
    const auto steps = hull.steps(static_cast<std::int32_t>(j));
    for (std::size_t s = 0; s < steps.size(); ++s) levels[s * d + j] = steps[s].level;
  }
  Append(&level, levels);
}

DeviceMeanStats::DeviceMeanStats(const MeanStats& host)
    : variance_(ToDevice(host.variance)),
      slope_(ToDevice(host.slope)),
      distortion_(ToDevice(host.distortion)),
      level_(ToDevice(host.level)),
      center_(ToDevice(host.center)),
      mean_step_(ToDevice(host.mean_step)),
      weight_(ToDevice(host.weight)),
      range_(ToDevice(host.range)) {}

MeanIndex::Layer DeviceMeanStats::Layer(const ScanPiece* pieces, const HostSegments& planes) const {
  return {variance_.data(),   slope_.data(),  level_.data(),
          distortion_.data(), center_.data(), mean_step_.data(),
          weight_.data(),     pieces,         planes};
}

}  // namespace fathom::cuda
