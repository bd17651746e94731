// SPDX-License-Identifier: MIT
// What plans and scans of the mean codec need to know of every head: as MeanIndex::Layer takes it.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/buffer.h"
#include "device/scans.h"
#include "fathom/plan.h"
#include "fathom/store.h"

namespace fathom::cuda {

// On the host, head behind head.
struct MeanStats {
  std::vector<double> variance, slope, distortion;
  std::vector<std::uint8_t> level;
  std::vector<float> center, mean_step, weight;
  std::vector<float> range;           // for Pack; no scan asks for it
  std::vector<DistortionHull> hulls;  // [n_heads], for MultiplierFit

  // Of the next head. index: of Codec::kMean with a codec, so built.
  void Add(const HeadIndex& index);
};

// On the device.
class DeviceMeanStats {
 public:
  DeviceMeanStats() = default;
  explicit DeviceMeanStats(const MeanStats& host);
  // Points into this.
  MeanIndex::Layer Layer(const ScanPiece* pieces, const HostSegments& planes) const;
  const float* center() const { return center_.data(); }
  const float* mean_step() const { return mean_step_.data(); }
  const float* range() const { return range_.data(); }

 private:
  DeviceBuffer<double> variance_, slope_, distortion_;
  DeviceBuffer<std::uint8_t> level_;
  DeviceBuffer<float> center_, mean_step_, weight_, range_;
};

}  // namespace fathom::cuda
