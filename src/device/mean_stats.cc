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
void Copy(DeviceBuffer<T>* to, const std::vector<T>& from) {
  to->Reserve(from.size());
  Check(cudaMemcpy(to->data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
        "cudaMemcpy to the device");
}

}  // namespace

void MeanStats::Add(const HeadIndex& index) {
  const std::vector<double> of_head = index.Distortions();
  hulls.emplace_back(of_head, index.shape().mean_bits);
  Add(index, of_head, hulls.back());
}

void MeanStats::Add(const HeadIndex& index, std::span<const double> of_head,
                    const DistortionHull& hull) {
  head_dim = index.shape().head_dim;
  n_codecs = static_cast<std::int32_t>(index.codecs().size());
  const auto d = static_cast<std::size_t>(head_dim);
  Append(&variance, hull.variance());
  Append(&slope, hull.step_slopes());
  Append(&distortion, of_head);
  Append(&center, index.basis().center);
  for (const MeanCodec& codec : index.codecs()) {
    Append(&mean_step, codec.mean_step);
    Append(&weight, codec.weight);
    Append(&range, codec.range);
  }
  std::vector<std::uint8_t> levels(d * (kLevels - 1), 0);
  for (std::size_t j = 0; j < d; ++j) {
    const auto steps = hull.steps(static_cast<std::int32_t>(j));
    for (std::size_t s = 0; s < steps.size(); ++s) levels[s * d + j] = steps[s].level;
  }
  Append(&level, levels);
}

void DeviceMeanStats::Set(const MeanStats& host) {
  head_dim_ = host.head_dim;
  n_codecs_ = host.n_codecs;
  Copy(&variance_, host.variance);
  Copy(&slope_, host.slope);
  Copy(&distortion_, host.distortion);
  Copy(&level_, host.level);
  Copy(&center_, host.center);
  Copy(&mean_step_, host.mean_step);
  Copy(&weight_, host.weight);
  Copy(&range_, host.range);
  // Small copies may still be on their way, and streams of ours do not wait for the default one.
  Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

MeanIndex::Layer DeviceMeanStats::Layer(const ScanPiece* pieces, const HostSegments& planes,
                                        std::int64_t first_head) const {
  const std::int64_t at = first_head * head_dim_, of_codecs = at * n_codecs_;
  return {variance_.data() + at,
          slope_.data() + at * (kLevels - 1),
          level_.data() + at * (kLevels - 1),
          distortion_.data() + at * kLevels,
          center_.data() + at,
          mean_step_.data() + of_codecs,
          weight_.data() + of_codecs * kPlanes * kPlanes,
          pieces,
          planes};
}

}  // namespace fathom::cuda
