// SPDX-License-Identifier: MIT
// Indexes of bit planes: our own and the published one.
#include <algorithm>
#include <optional>
#include <utility>

#include "backend/cuda/host_copy.h"
#include "base/parallel.h"
#include "device/bench_packer.h"
#include "device/mean_stats.h"
#include "fathom/store.h"

namespace fathom::cuda {
namespace {

constexpr std::int32_t kMeanBits = 4;

// Steps and decoders of every head, as a session fits them on the rows of its prefill.
MeanStats FitStats(const BenchParts& parts, std::int32_t set) {
  BenchKeys& keys = *parts.keys;
  const std::int32_t dim = parts.place.sizes.heads.head_dim;
  std::vector<SampleRows> rows;
  for (std::int32_t s = 0; s < keys.n_samples(); ++s) rows.push_back(keys.Sample(set, s));
  std::vector<std::optional<HeadIndex>> fitted(rows.size());
  const auto backend = MakeBackend("cpu", 0);
  ParallelFor(keys.n_samples(), backend->n_threads(), [&](std::int64_t s) {
    const SampleRows& of_head = rows[Size(s)];
    const auto even = static_cast<std::int32_t>((of_head.n_blocks + 1) / 2 * 2);
    HeadIndex& index = fitted[Size(s)].emplace(
        IndexShape{Codec::kMean, dim, kMeanBits, even},
        keys.Stats(set, static_cast<std::int32_t>(s), BasisRule::kCentred, false).basis);
    index.Build(of_head.rows, of_head.n_blocks, *backend);
  });
  MeanStats stats;
  for (std::int32_t h = 0; h < parts.place.sizes.n_heads(); ++h) {
    stats.Add(*fitted[Size(keys.SampleOf(h))]);
  }
  return stats;
}

class MeanBench final : public BenchIndex {
 public:
  MeanBench(const BenchMethod& method, const BenchParts& parts)
      : bits_(method.bits),
        place_(parts.place),
        stream_(parts.stream),
        memory_(parts.arena, place_.on_host),
        multiplier_(1),
        index_(parts.sizes(), kMeanBits, multiplier_.data(), place_.on_host) {
    Packer packer(parts);
    std::vector<MeanIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place_.sizes.n_layers; ++layer) {
      if (layer < parts.keys->n_sets()) {
        const MeanStats stats = FitStats(parts, layer);
        device_stats_.emplace_back(stats);
        hulls_.push_back(stats.hulls);
      }
      made.push_back(MakeLayer(layer, &packer));
      parts.Done(layer);
    }
    index_.SetLayers(std::move(made));
    SetMultiplier(0);
  }

  IndexScan* scan() override { return &index_; }

  void FitMultiplier(std::span<const std::vector<float>> queries) override {
    const HeadGeometry& heads = place_.sizes.heads;
    const std::size_t head = Size(std::int64_t{heads.group()} * heads.head_dim);
    MultiplierFit fit;
    for (std::size_t i = 0; i < queries.size(); ++i) {
      const auto& hulls = hulls_[i % Size(place_.sizes.n_layers) % hulls_.size()];
      for (std::size_t h = 0; (h + 1) * head <= queries[i].size(); ++h) {
        fit.Add(queries[i].data() + h * head, heads.group(), hulls[h % hulls.size()]);
      }
    }
    SetMultiplier(fit.Fit(bits_));
  }

 private:
  void SetMultiplier(double value) {
    CopyToDevice(multiplier_.data(), &value, 1, stream_);
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  MeanIndex::Layer MakeLayer(std::int32_t layer, Packer* packer) {
    const std::int64_t heads = place_.sizes.n_heads(), dim = place_.sizes.heads.head_dim;
    const std::int64_t blocks = place_.cap_blocks();
    const std::int64_t plane_bytes = dim * kPlanes * blocks * 8, mean_bytes = dim * blocks / 2;
    std::byte* planes = memory_.Take(heads * plane_bytes);
    means_.emplace_back(Size(heads * mean_bytes));
    plane_lists_.push_back(
        Pointers(reinterpret_cast<std::uint64_t*>(planes), heads, plane_bytes / 8));
    mean_lists_.push_back(Pointers(means_.back().data(), heads, mean_bytes));
    segments_.push_back(Pointers<const std::byte>(planes, heads, plane_bytes));
    const DeviceMeanStats& stats = device_stats_[Size(layer) % device_stats_.size()];
    PackBlocks pack{};
    pack.codec = Codec::kMean;
    pack.head_dim = static_cast<std::int32_t>(dim);
    pack.mean_bits = kMeanBits;
    pack.n_heads = static_cast<std::int32_t>(heads);
    pack.center = stats.center();
    pack.mean_step = stats.mean_step();
    pack.range = stats.range();
    pack.planes = plane_lists_.back().data();
    pack.plane_stride = blocks;
    pack.side = mean_lists_.back().data();
    pack.side_stride = blocks / 2;
    packer->Pack(layer, pack);
    std::vector<ScanPiece> pieces;
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::uint64_t* from =
          place_.on_host ? index_.staged_planes() + h * dim * kPlanes * blocks
                         : reinterpret_cast<const std::uint64_t*>(planes + h * plane_bytes);
      pieces.push_back({from, blocks, means_.back().data() + h * mean_bytes, blocks / 2,
                        static_cast<std::int32_t>(place_.n_tokens / kBlockTokens), 0,
                        static_cast<std::int32_t>(h), static_cast<std::int32_t>(h), place_.on_host,
                        false});
    }
    pieces_.push_back(ToDevice(pieces));
    return stats.Layer(pieces_.back().data(),
                       {segments_.back().data(), 1, static_cast<std::int32_t>(blocks)});
  }

  const double bits_;
  const BenchPlace place_;
  const cudaStream_t stream_;
  Memory memory_;
  DeviceBuffer<double> multiplier_;
  MeanIndex index_;
  std::vector<DeviceMeanStats> device_stats_;       // of every set of the keys
  std::vector<std::vector<DistortionHull>> hulls_;  // likewise, [n_heads]
  std::vector<DeviceBuffer<std::uint8_t>> means_;
  std::vector<DeviceBuffer<std::uint64_t*>> plane_lists_;
  std::vector<DeviceBuffer<std::uint8_t*>> mean_lists_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<ScanPiece>> pieces_;
};

class PaperBench final : public BenchIndex {
 public:
  PaperBench(const BenchMethod& method, const BenchParts& parts)
      : place_(parts.place),
        memory_(parts.arena, place_.on_host),
        index_(parts.sizes(), method.budget, place_.on_host) {
    Packer packer(parts);
    std::vector<PaperIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place_.sizes.n_layers; ++layer) {
      if (layer < parts.keys->n_sets()) AddVariance(parts.keys, layer);
      made.push_back(MakeLayer(layer, &packer));
      parts.Done(layer);
    }
    index_.SetLayers(std::move(made));
  }

  IndexScan* scan() override { return &index_; }

 private:
  void AddVariance(BenchKeys* keys, std::int32_t set) {
    std::vector<std::vector<double>> of_sample(Size(keys->n_samples()));
    ParallelFor(keys->n_samples(), MakeBackend("cpu", 0)->n_threads(), [&](std::int64_t s) {
      of_sample[Size(s)] =
          keys->Stats(set, static_cast<std::int32_t>(s), BasisRule::kRaw, false).variance;
    });
    std::vector<double> all;
    for (std::int32_t h = 0; h < place_.sizes.n_heads(); ++h) {
      const std::vector<double>& one = of_sample[Size(keys->SampleOf(h))];
      all.insert(all.end(), one.begin(), one.end());
    }
    variance_.push_back(ToDevice(all));
  }

  PaperIndex::Layer MakeLayer(std::int32_t layer, Packer* packer) {
    const std::int64_t heads = place_.sizes.n_heads(), dim = place_.sizes.heads.head_dim;
    const std::int64_t blocks = place_.cap_blocks();
    const std::int64_t plane_bytes = dim * kPlanes * blocks * 8, scale_bytes = dim * blocks * 2;
    std::byte* planes = memory_.Take(heads * plane_bytes);
    std::byte* scales = memory_.Take(heads * scale_bytes);
    plane_lists_.push_back(
        Pointers(reinterpret_cast<std::uint64_t*>(planes), heads, plane_bytes / 8));
    scale_lists_.push_back(Pointers(reinterpret_cast<std::uint8_t*>(scales), heads, scale_bytes));
    segments_.push_back(Pointers<const std::byte>(planes, heads, plane_bytes));
    segments_.push_back(Pointers<const std::byte>(scales, heads, scale_bytes));
    PackBlocks pack{};
    pack.codec = Codec::kPaper;
    pack.head_dim = static_cast<std::int32_t>(dim);
    pack.n_heads = static_cast<std::int32_t>(heads);
    pack.planes = plane_lists_.back().data();
    pack.plane_stride = blocks;
    pack.side = scale_lists_.back().data();
    pack.side_stride = blocks * 2;
    packer->Pack(layer, pack);
    std::vector<PaperPiece> pieces;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto* own = reinterpret_cast<const std::uint64_t*>(planes + h * plane_bytes);
      const auto* own_scales = reinterpret_cast<const Half*>(scales + h * scale_bytes);
      pieces.push_back({place_.on_host ? index_.staged_planes() + h * dim * kPlanes * blocks : own,
                        blocks,
                        place_.on_host ? index_.staged_scales() + h * dim * blocks : own_scales,
                        blocks, static_cast<std::int32_t>(place_.n_tokens / kBlockTokens), 0,
                        static_cast<std::int32_t>(h), place_.on_host});
    }
    pieces_.push_back(ToDevice(pieces));
    const auto segment_blocks = static_cast<std::int32_t>(blocks);
    return {variance_[Size(layer) % variance_.size()].data(),
            pieces_.back().data(),
            {segments_[segments_.size() - 2].data(), 1, segment_blocks},
            {segments_.back().data(), 1, segment_blocks}};
  }

  const BenchPlace place_;
  Memory memory_;
  PaperIndex index_;
  std::vector<DeviceBuffer<double>> variance_;  // of every set of the keys, [n_heads][D]
  std::vector<DeviceBuffer<std::uint64_t*>> plane_lists_;
  std::vector<DeviceBuffer<std::uint8_t*>> scale_lists_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<PaperPiece>> pieces_;
};

}  // namespace

std::unique_ptr<BenchIndex> MakeMeanBench(const BenchMethod& method, const BenchParts& parts) {
  return std::make_unique<MeanBench>(method, parts);
}

std::unique_ptr<BenchIndex> MakePaperBench(const BenchMethod& method, const BenchParts& parts) {
  return std::make_unique<PaperBench>(method, parts);
}

}  // namespace fathom::cuda
