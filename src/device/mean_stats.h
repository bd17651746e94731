// SPDX-License-Identifier: MIT
// What plans and scans of the mean codec need to know of every head: as MeanIndex::Layer takes it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cuda/buffer.h"
#include "device/scans.h"
#include "fathom/plan.h"
#include "fathom/store.h"

namespace fathom::cuda {

// On the host, head behind head; all heads have as many channels and codecs.
struct MeanStats {
  std::int32_t head_dim = 0, n_codecs = 0;
  std::vector<double> variance, slope, distortion;
  std::vector<std::uint8_t> level;
  std::vector<float> center, mean_step, weight;
  std::vector<float> range;           // for Pack; no scan asks for it
  std::vector<DistortionHull> hulls;  // [n_heads], for MultiplierFit

  // Of the next head. index: of Codec::kMean with a codec, so built.
  void Add(const HeadIndex& index);
  // The same with its distortions and their hull, which is not kept.
  void Add(const HeadIndex& index, std::span<const double> of_head, const DistortionHull& hull);
};

// On the device.
class DeviceMeanStats {
 public:
  DeviceMeanStats() = default;
  explicit DeviceMeanStats(const MeanStats& host) { Set(host); }
  // In the memory that is there, where as much fits. Not while the device reads it. Waits.
  void Set(const MeanStats& host);
  // Of first_head and those behind it. Points into this.
  MeanIndex::Layer Layer(const ScanPiece* pieces, const HostSegments& planes,
                         std::int64_t first_head = 0) const;
  const float* center() const { return center_.data(); }
  const float* mean_step() const { return mean_step_.data(); }
  const float* range() const { return range_.data(); }

 private:
  std::int64_t head_dim_ = 0, n_codecs_ = 0;
  DeviceBuffer<double> variance_, slope_, distortion_;
  DeviceBuffer<std::uint8_t> level_;
  DeviceBuffer<float> center_, mean_step_, weight_, range_;
};

}  // namespace fathom::cuda
