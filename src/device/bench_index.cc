// SPDX-License-Identifier: MIT
#include "device/bench_index.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "backend/cuda/pack.h"
#include "device/mean_stats.h"
#include "device/synthetic.h"
#include "fathom/store.h"
#include "store/layout.h"

namespace fathom::cuda {
namespace {

constexpr std::int64_t kChunkBlocks = 512;  // packed at a time
constexpr std::int64_t kFitBlocks = 64;     // steps and decoders are fitted on
constexpr std::int32_t kMeanBits = 4;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <typename T>
DeviceBuffer<T> ToDevice(const std::vector<T>& host) {
  return DeviceBuffer<T>(std::span<const T>(host));
}

// Memory of an index: of the arena, or of the device.
class Memory {
 public:
  Memory(HostArena* arena, bool on_host) : arena_(on_host ? arena : nullptr) {}
  std::byte* Take(std::int64_t bytes) {
    if (arena_ != nullptr) return arena_->Allocate(bytes);
    device_.emplace_back(Size(bytes));
    return device_.back().data();
  }

 private:
  HostArena* arena_;
  std::vector<DeviceBuffer<std::byte>> device_;
};

// Pointers base + i * stride as a device array.
template <typename T>
DeviceBuffer<T*> Pointers(std::byte* base, std::int64_t n, std::int64_t stride) {
  std::vector<T*> host;
  for (std::int64_t i = 0; i < n; ++i) host.push_back(reinterpret_cast<T*>(base + i * stride));
  return ToDevice(host);
}

// Keys of a layer, made and packed a chunk of blocks at a time.
class Packer {
 public:
  Packer(const BenchPlace& place, const std::vector<float>& sigma, cudaStream_t stream)
      : place_(place), stream_(stream), sigma_(ToDevice(sigma)) {
    const std::int64_t heads = place.sizes.n_heads(), dim = place.sizes.heads.head_dim;
    const std::int64_t head = kChunkBlocks * kBlockTokens * 2 * dim;
    rows_.Reserve(Size(heads * head));
    pointers_ = Pointers<Half>(reinterpret_cast<std::byte*>(rows_.data()), heads, head * 2);
  }

  void Fill(std::int32_t layer, std::int64_t first_block, std::int64_t n_blocks) {
    const HeadGeometry& heads = place_.sizes.heads;
    FillRows({place_.sizes.n_heads(), heads.n_kv_heads, heads.head_dim, pointers_.data(),
              first_block * kBlockTokens, n_blocks * kBlockTokens, sigma_.data(),
              place_.seed + static_cast<std::uint64_t>(layer)},
             stream_);
  }

  // base: what PackBlocks says beside the rows and the blocks.
  void Pack(std::int32_t layer, PackBlocks base) {
    const std::int64_t n_blocks = place_.n_tokens / kBlockTokens;
    for (std::int64_t first = 0; first < n_blocks; first += kChunkBlocks) {
      const std::int64_t n = std::min(kChunkBlocks, n_blocks - first);
      Fill(layer, first, n);
      base.rows = pointers_.data();
      base.first_block = static_cast<std::int32_t>(first);
      base.n_blocks = static_cast<std::int32_t>(n);
      cuda::Pack(base, stream_);
    }
  }

  // Rows of the first blocks of layer 0, on the host: [n_heads][kFitBlocks * 64][2][D].
  std::vector<Half> Sample() {
    const std::int64_t heads = place_.sizes.n_heads(), dim = place_.sizes.heads.head_dim;
    Fill(0, 0, kFitBlocks);
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const std::int64_t from = kChunkBlocks * kBlockTokens * 2 * dim;
    const std::int64_t to = kFitBlocks * kBlockTokens * 2 * dim;
    std::vector<Half> host(Size(heads * to));
    Check(cudaMemcpy2D(host.data(), Size(to) * 2, rows_.data(), Size(from) * 2, Size(to) * 2,
                       Size(heads), cudaMemcpyDeviceToHost),
          "cudaMemcpy2D to the host");
    return host;
  }

 private:
  const BenchPlace place_;
  cudaStream_t stream_;
  DeviceBuffer<float> sigma_;
  DeviceBuffer<Half> rows_;
  DeviceBuffer<Half*> pointers_;
};

// The same for all layers.
MeanStats FitStats(const BenchPlace& place, Packer* packer) {
  const std::vector<Half> rows = packer->Sample();
  const auto backend = MakeBackend("cpu", 0);
  const std::int32_t dim = place.sizes.heads.head_dim;
  const std::int64_t head = kFitBlocks * kBlockTokens * 2 * dim;
  MeanStats stats;
  for (std::int32_t h = 0; h < place.sizes.n_heads(); ++h) {
    // Synthetic keys have no mean: the origin is their centre.
    HeadIndex index({Codec::kMean, dim, kMeanBits, static_cast<std::int32_t>(kFitBlocks)},
                    RawBasis(dim, std::vector<double>(Size(dim), 0.0)));
    index.Build(rows.data() + h * head, kFitBlocks, *backend);
    stats.Add(index);
  }
  return stats;
}

IndexSizes SizesOf(const BenchPlace& place, const Lengths* lengths) {
  return {place.sizes.heads, place.sizes.batch, place.cap_blocks(), lengths};
}

class MeanBench final : public BenchIndex {
 public:
  MeanBench(const BenchMethod& method, const BenchPlace& place, const std::vector<float>& sigma,
            const Lengths* lengths, HostArena* arena, cudaStream_t stream,
            const BenchProgress& progress)
      : bits_(method.bits),
        place_(place),
        stream_(stream),
        memory_(arena, place.on_host),
        multiplier_(1),
        index_(SizesOf(place, lengths), kMeanBits, multiplier_.data(), place.on_host) {
    Packer packer(place, sigma, stream);
    stats_ = FitStats(place, &packer);
    device_stats_ = DeviceMeanStats(stats_);
    const std::int32_t layers = place.sizes.n_layers;
    std::vector<MeanIndex::Layer> made;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      made.push_back(MakeLayer(layer, &packer));
      Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      if (progress) progress(layer + 1, layers);
    }
    index_.SetLayers(std::move(made));
    SetMultiplier(0);
  }

  IndexScan* scan() override { return &index_; }

  void FitMultiplier(std::span<const std::vector<float>> queries) override {
    const HeadGeometry& heads = place_.sizes.heads;
    const std::int64_t head = std::int64_t{heads.group()} * heads.head_dim;
    MultiplierFit fit;
    for (const std::vector<float>& q : queries) {
      const std::int64_t n = static_cast<std::int64_t>(q.size()) / head;
      for (std::int64_t i = 0; i < n; ++i) {
        fit.Add(q.data() + i * head, heads.group(), stats_.hulls[Size(i % place_.sizes.n_heads())]);
      }
    }
    SetMultiplier(fit.Fit(bits_));
  }

 private:
  void SetMultiplier(double value) {
    Check(
        cudaMemcpyAsync(multiplier_.data(), &value, sizeof(value), cudaMemcpyHostToDevice, stream_),
        "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  MeanIndex::Layer MakeLayer(std::int32_t layer, Packer* packer) {
    const std::int64_t heads = place_.sizes.n_heads(), dim = place_.sizes.heads.head_dim;
    const std::int64_t blocks = place_.cap_blocks();
    const std::int64_t plane_bytes = dim * kPlanes * blocks * 8, mean_bytes = dim * blocks / 2;
    std::byte* planes = memory_.Take(heads * plane_bytes);
    means_.emplace_back(Size(heads * mean_bytes));
    auto* means = reinterpret_cast<std::byte*>(means_.back().data());
    plane_lists_.push_back(Pointers<std::uint64_t>(planes, heads, plane_bytes));
    mean_lists_.push_back(Pointers<std::uint8_t>(means, heads, mean_bytes));
    segments_.push_back(Pointers<const std::byte>(planes, heads, plane_bytes));
    PackBlocks pack{};
    pack.codec = Codec::kMean;
    pack.head_dim = static_cast<std::int32_t>(dim);
    pack.mean_bits = kMeanBits;
    pack.n_heads = static_cast<std::int32_t>(heads);
    pack.center = device_stats_.center();
    pack.mean_step = device_stats_.mean_step();
    pack.range = device_stats_.range();
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
      pieces.push_back({from, blocks, reinterpret_cast<const std::uint8_t*>(means + h * mean_bytes),
                        blocks / 2, static_cast<std::int32_t>(place_.n_tokens / kBlockTokens), 0,
                        static_cast<std::int32_t>(h), static_cast<std::int32_t>(h), place_.on_host,
                        false});
    }
    pieces_.push_back(ToDevice(pieces));
    return device_stats_.Layer(pieces_.back().data(),
                               {segments_.back().data(), 1, static_cast<std::int32_t>(blocks)});
  }

  const double bits_;
  const BenchPlace place_;
  const cudaStream_t stream_;
  Memory memory_;
  MeanStats stats_;
  DeviceBuffer<double> multiplier_;
  MeanIndex index_;
  DeviceMeanStats device_stats_;
  std::vector<DeviceBuffer<std::uint8_t>> means_;
  std::vector<DeviceBuffer<std::uint64_t*>> plane_lists_;
  std::vector<DeviceBuffer<std::uint8_t*>> mean_lists_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<ScanPiece>> pieces_;
};

class PaperBench final : public BenchIndex {
 public:
  PaperBench(const BenchMethod& method, const BenchPlace& place, const std::vector<float>& sigma,
             const Lengths* lengths, HostArena* arena, cudaStream_t stream,
             const BenchProgress& progress)
      : place_(place),
        memory_(arena, place.on_host),
        index_(SizesOf(place, lengths), method.budget, place.on_host) {
    Packer packer(place, sigma, stream);
    std::vector<double> variance;
    for (std::int32_t s = 0; s < place.sizes.batch; ++s) {
      for (const float x : sigma) variance.push_back(static_cast<double>(x) * x);
    }
    variance_ = ToDevice(variance);
    std::vector<PaperIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place.sizes.n_layers; ++layer) {
      made.push_back(MakeLayer(layer, &packer));
      Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      if (progress) progress(layer + 1, place.sizes.n_layers);
    }
    index_.SetLayers(std::move(made));
  }

  IndexScan* scan() override { return &index_; }

 private:
  PaperIndex::Layer MakeLayer(std::int32_t layer, Packer* packer) {
    const std::int64_t heads = place_.sizes.n_heads(), dim = place_.sizes.heads.head_dim;
    const std::int64_t blocks = place_.cap_blocks();
    const std::int64_t plane_bytes = dim * kPlanes * blocks * 8, scale_bytes = dim * blocks * 2;
    std::byte* planes = memory_.Take(heads * plane_bytes);
    std::byte* scales = memory_.Take(heads * scale_bytes);
    plane_lists_.push_back(Pointers<std::uint64_t>(planes, heads, plane_bytes));
    scale_lists_.push_back(Pointers<std::uint8_t>(scales, heads, scale_bytes));
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
    return {variance_.data(),
            pieces_.back().data(),
            {segments_[segments_.size() - 2].data(), 1, segment_blocks},
            {segments_.back().data(), 1, segment_blocks}};
  }

  const BenchPlace place_;
  Memory memory_;
  PaperIndex index_;
  DeviceBuffer<double> variance_;
  std::vector<DeviceBuffer<std::uint64_t*>> plane_lists_;
  std::vector<DeviceBuffer<std::uint8_t*>> scale_lists_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<PaperPiece>> pieces_;
};

// Random codes: how fast labels are scanned does not depend on what they say.
class LabelBench final : public BenchIndex {
 public:
  LabelBench(const BenchMethod& method, const BenchPlace& place, const Lengths* lengths,
             HostArena* arena, cudaStream_t stream, const BenchProgress& progress)
      : place_(place),
        shape_(method.labels),
        memory_(arena, place.on_host),
        index_(SizesOf(place, lengths), method.labels, place.on_host) {
    std::vector<LabelIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place.sizes.n_layers; ++layer) {
      made.push_back(MakeLayer(layer, stream));
      Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      if (progress) progress(layer + 1, place.sizes.n_layers);
    }
    index_.SetLayers(std::move(made));
  }

  IndexScan* scan() override { return &index_; }

 private:
  LabelIndex::Layer MakeLayer(std::int32_t layer, cudaStream_t stream) {
    const std::int64_t heads = place_.sizes.n_heads(), blocks = place_.cap_blocks();
    const std::int64_t code_bytes =
        shape_.table_width * blocks *
        static_cast<std::int64_t>(layout::LabelBlockBytes(shape_.planes));
    const std::int64_t scale_bytes = shape_.table_width * blocks * 2;
    std::byte* codes = memory_.Take(heads * code_bytes);
    std::byte* scales = memory_.Take(heads * scale_bytes);
    const std::uint64_t seed = (place_.seed + static_cast<std::uint64_t>(layer)) << 40;
    FillCodes(codes, heads * code_bytes, seed, stream);
    FillScales(reinterpret_cast<Half*>(scales), heads * scale_bytes / 2, seed ^ 1, stream);
    segments_.push_back(Pointers<const std::byte>(codes, heads, code_bytes));
    segments_.push_back(Pointers<const std::byte>(scales, heads, scale_bytes));
    std::vector<LabelPiece> pieces;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto* own = reinterpret_cast<const std::uint8_t*>(codes + h * code_bytes);
      const auto* own_scales = reinterpret_cast<const Half*>(scales + h * scale_bytes);
      pieces.push_back(
          {place_.on_host ? index_.staged_codes() + h * index_.code_bytes() : own,
           place_.on_host ? index_.staged_scales() + h * shape_.n_channels * blocks : own_scales,
           static_cast<std::int32_t>(blocks),
           static_cast<std::int32_t>(place_.n_tokens / kBlockTokens), 0,
           static_cast<std::int32_t>(h)});
    }
    pieces_.push_back(ToDevice(pieces));
    const auto segment_blocks = static_cast<std::int32_t>(blocks);
    return {pieces_.back().data(),
            {segments_[segments_.size() - 2].data(), 1, segment_blocks},
            {segments_.back().data(), 1, segment_blocks}};
  }

  const BenchPlace place_;
  const LabelIndex::Shape shape_;
  Memory memory_;
  LabelIndex index_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<LabelPiece>> pieces_;
};

// Keys themselves, or the means of chunks: normal numbers.
class KeyBench final : public BenchIndex {
 public:
  KeyBench(const BenchMethod& method, const BenchPlace& place, const Lengths* lengths,
           HostArena* arena, cudaStream_t stream, const BenchProgress& progress)
      : place_(place),
        n_keys_(place.n_tokens / kBlockTokens * kBlockTokens / method.chunk),
        cap_keys_((n_keys_ + kTileTokens) / kTileTokens * kTileTokens),
        memory_(arena, place.on_host),
        counts_(ToDevice(std::vector<std::int32_t>(Size(place.sizes.n_heads()),
                                                   static_cast<std::int32_t>(n_keys_)))),
        index_({place.sizes.heads, place.sizes.batch, cap_keys_ / kBlockTokens, lengths},
               method.chunk, place.sizes.heads.head_dim, counts_.data(),
               static_cast<std::int32_t>(n_keys_), place.on_host) {
    const std::int64_t heads = place.sizes.n_heads(), dim = place.sizes.heads.head_dim;
    const std::int64_t head_bytes = cap_keys_ * dim * 2;
    std::vector<KeyIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place.sizes.n_layers; ++layer) {
      std::byte* keys = memory_.Take(heads * head_bytes);
      FillNormal(reinterpret_cast<Half*>(keys), heads * head_bytes / 2, 1.0F,
                 (place.seed + static_cast<std::uint64_t>(layer)) << 40, stream);
      Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      segments_.push_back(Pointers<const std::byte>(keys, heads, head_bytes));
      keys_.push_back(Pointers<const Half>(
          place.on_host ? reinterpret_cast<std::byte*>(index_.staged()) : keys, heads, head_bytes));
      HostSegments table;
      if (place.on_host) {
        table = {segments_.back().data(), 1, static_cast<std::int32_t>(cap_keys_ / kBlockTokens)};
      }
      made.push_back({keys_.back().data(), table});
      if (progress) progress(layer + 1, place.sizes.n_layers);
    }
    index_.SetLayers(std::move(made),
                     place.on_host ? static_cast<double>(heads * n_keys_ * dim * 2) : 0.0);
  }

  IndexScan* scan() override { return &index_; }

 private:
  const BenchPlace place_;
  const std::int64_t n_keys_, cap_keys_;
  Memory memory_;
  DeviceBuffer<std::int32_t> counts_;
  KeyIndex index_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<const Half*>> keys_;
};

}  // namespace

std::unique_ptr<BenchIndex> MakeBenchIndex(const BenchMethod& method, const BenchPlace& place,
                                           const std::vector<float>& sigma, const Lengths* lengths,
                                           HostArena* arena, cudaStream_t stream,
                                           const BenchProgress& progress) {
  switch (method.kind) {
    case BenchMethod::Kind::kDense:
      return nullptr;
    case BenchMethod::Kind::kMean:
      return std::make_unique<MeanBench>(method, place, sigma, lengths, arena, stream, progress);
    case BenchMethod::Kind::kPaper:
      return std::make_unique<PaperBench>(method, place, sigma, lengths, arena, stream, progress);
    case BenchMethod::Kind::kLabels:
      return std::make_unique<LabelBench>(method, place, lengths, arena, stream, progress);
    case BenchMethod::Kind::kKeys:
      return std::make_unique<KeyBench>(method, place, lengths, arena, stream, progress);
  }
  return nullptr;
}

}  // namespace fathom::cuda
