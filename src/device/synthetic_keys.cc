// SPDX-License-Identifier: MIT
#include <cmath>
#include <cstddef>
#include <span>

#include "backend/cuda/host_copy.h"
#include "device/bench_keys.h"
#include "device/synthetic.h"

namespace fathom::cuda {
namespace {

constexpr std::int64_t kSampleBlocks = 64;  // statistics are of so many

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Deviations of key channels, unequal as in real models: a few strong ones, many weak.
// [n_kv_heads][D].
std::vector<float> ChannelDeviations(const HeadGeometry& heads) {
  std::vector<float> sigma;
  for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) {
    for (std::int32_t j = 0; j < heads.head_dim; ++j) {
      const int rank = (j * 37 + h * 11) % heads.head_dim;  // some order of the channels
      sigma.push_back(
          2.5F * std::exp(-3.0F * static_cast<float>(rank) / static_cast<float>(heads.head_dim)));
    }
  }
  return sigma;
}

// All layers are alike: statistics are those of layer 0.
class SyntheticKeys final : public BenchKeys {
 public:
  SyntheticKeys(const StepSizes& sizes, std::uint64_t seed, cudaStream_t stream)
      : sizes_(sizes),
        seed_(seed),
        stream_(stream),
        sigma_(ChannelDeviations(sizes.heads)),
        device_sigma_(std::span<const float>(sigma_)) {}

  void Fill(std::int32_t layer, Half* const* rows, std::int64_t first, std::int64_t n,
            cudaStream_t stream) override {
    FillRows({sizes_.n_heads(), sizes_.heads.n_kv_heads, sizes_.heads.head_dim, rows, first, n,
              device_sigma_.data(), seed_ + static_cast<std::uint64_t>(layer)},
             stream);
  }

  // Values are normal: so are their means, and there is none over all.
  void FillValueMeans(std::int32_t layer, Half* means, std::int64_t n_blocks, float* mean_value,
                      cudaStream_t stream) override {
    const std::int64_t width = std::int64_t{sizes_.n_heads()} * sizes_.heads.head_dim;
    FillNormal(means, width * n_blocks, 1.0F / std::sqrt(static_cast<float>(kBlockTokens)),
               (seed_ + static_cast<std::uint64_t>(layer)) << 40 | 5, stream);
    Check(cudaMemsetAsync(mean_value, 0, Size(width) * sizeof(float), stream), "cudaMemsetAsync");
  }

  std::int32_t n_sets() const override { return 1; }
  std::int32_t n_samples() const override { return sizes_.n_heads(); }
  std::int32_t SampleOf(std::int32_t head) const override { return head; }

  SampleRows Sample(std::int32_t /*set*/, std::int32_t sample) override {
    const std::int64_t head = kSampleBlocks * kBlockTokens * 2 * sizes_.heads.head_dim;
    if (sample_.empty()) {
      const DeviceBuffer<Half> rows(Size(sizes_.n_heads() * head));
      const auto pointers = Pointers(rows.data(), sizes_.n_heads(), head);
      Fill(0, pointers.data(), 0, kSampleBlocks * kBlockTokens, stream_);
      sample_ = ToHost(rows.data(), rows.size(), stream_);
    }
    return {sample_.data() + sample * head, kSampleBlocks};
  }

  // Known without looking at keys: they have no mean.
  HeadStats Stats(std::int32_t /*set*/, std::int32_t sample, BasisRule /*rule*/,
                  bool /*abs*/) override {
    const std::int32_t dim = sizes_.heads.head_dim;
    HeadStats stats;
    stats.basis = RawBasis(dim, {});
    const float* sigma = sigma_.data() + sample % sizes_.heads.n_kv_heads * dim;
    for (std::int32_t j = 0; j < dim; ++j) {
      stats.variance.push_back(static_cast<double>(sigma[j]) * sigma[j]);
    }
    return stats;
  }

 private:
  const StepSizes sizes_;
  const std::uint64_t seed_;
  const cudaStream_t stream_;
  const std::vector<float> sigma_;
  const DeviceBuffer<float> device_sigma_;
  std::vector<Half> sample_;  // [n_heads][kSampleBlocks * 64][2][D]
};

}  // namespace

std::unique_ptr<BenchKeys> MakeSyntheticKeys(const StepSizes& sizes, std::uint64_t seed,
                                             cudaStream_t stream) {
  return std::make_unique<SyntheticKeys>(sizes, seed, stream);
}

}  // namespace fathom::cuda
